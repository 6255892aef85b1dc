"""Small datasets with cameras, as other programs write them, for several tests."""

from __future__ import annotations

import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import av
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from numpy.typing import NDArray
from PIL import Image

LENGTHS = (7, 5, 8)
ENDS = np.cumsum(LENGTHS)
STEPS = int(ENDS[-1])
FPS = 10
EPISODE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
FRAME = np.concatenate([np.arange(length) for length in LENGTHS])
_RNG = np.random.default_rng(0)
STATE = _RNG.normal(size=(STEPS, 3)).astype(np.float32)
GRIPPER = _RNG.uniform(size=STEPS).astype(np.float32)
ACTION = _RNG.uniform(-1, 1, size=(STEPS, 2)).astype(np.float32)
# What lossless formats keep: noise. And what a video keeps: one grey per frame, far from that of its neighbours.
WRIST: NDArray[np.uint8] = _RNG.integers(0, 256, size=(STEPS, 16, 24, 3), dtype=np.uint8)
FRONT: NDArray[np.uint8] = np.broadcast_to(
    (np.arange(STEPS) * 97 % 241).astype(np.uint8)[:, None, None, None], (STEPS, 32, 48, 3)
)


def write_lerobot(folder: Path, version: Literal["v2.1", "v3.0"] = "v3.0") -> Path:
    """A LeRobot dataset: the camera ``wrist`` as images in the parquet files, ``front`` as videos.

    Version 3.0 has the first two episodes in one file and one video, the third in others.
    """
    path = folder / f"lerobot-{version}"
    packed = version == "v3.0"
    groups = [[0, 1], [2]] if packed else [[0], [1], [2]]
    data = "data/chunk-{0:03d}/file-{1:03d}.parquet" if packed else "data/chunk-000/episode_{1:06d}.parquet"
    video = "videos/{2}/chunk-{0:03d}/file-{1:03d}.mp4" if packed else "videos/chunk-000/{2}/episode_{1:06d}.mp4"
    places: dict[int, tuple[int, float]] = {}
    for number, episodes in enumerate(groups):
        rows = np.flatnonzero(np.isin(EPISODE, episodes))
        # The order in a file must not matter.
        _write(path / data.format(0, number), frame_table(rows if packed else rows[::-1]))
        key = "observation.images.front"
        write_video(path / video.format(0, number, key), FRONT[rows])
        places |= {episode: (number, float(np.flatnonzero(EPISODE[rows] == episode)[0]) / FPS) for episode in episodes}
    features = {
        "observation.images.front": {"dtype": "video", "shape": [32, 48, 3]},
        "observation.images.wrist": {"dtype": "image", "shape": [16, 24, 3]},
    }
    info = {"codebase_version": version, "total_episodes": len(LENGTHS), "fps": FPS, "features": features}
    (path / "meta").mkdir()
    (path / "meta/info.json").write_text(json.dumps(info))
    if packed:
        filmed = "videos/observation.images.front"
        columns = {
            "episode_index": range(3), "length": LENGTHS, "data/chunk_index": [0] * 3,
            "data/file_index": [places[e][0] for e in range(3)], f"{filmed}/chunk_index": [0] * 3,
            f"{filmed}/file_index": [places[e][0] for e in range(3)],
            f"{filmed}/from_timestamp": [places[e][1] for e in range(3)],
        }  # fmt: skip
        table = pa.table({name: pa.array(list(values)) for name, values in columns.items()})
        _write(path / "meta/episodes/chunk-000/file-000.parquet", table)
    else:
        lines = [json.dumps({"episode_index": e, "length": length}) for e, length in enumerate(LENGTHS)]
        (path / "meta/episodes.jsonl").write_text("\n".join(lines))
    return path


def frame_table(rows: np.ndarray, **columns: Any) -> pa.Table:
    """The columns of these steps, with others in their place."""
    return pa.table({
        "observation.state": pa.array(list(STATE[rows])), "observation.gripper": GRIPPER[rows],
        "observation.images.wrist": pa.array([{"bytes": _png(WRIST[row]), "path": None} for row in rows]),
        "observation.note": pa.array(["text"] * len(rows)), "action": pa.array(list(ACTION[rows])),
        "timestamp": (FRAME[rows] / FPS).astype(np.float32), "frame_index": FRAME[rows],
        "episode_index": EPISODE[rows], **columns,
    })  # fmt: skip


def _write(file: Path, table: pa.Table) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=4)


def _png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, format="png")
    return file.getvalue()


def write_video(file: Path, frames: np.ndarray) -> None:
    """An MP4 with a key frame every four frames."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), mode="w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.gop_size, stream.bit_rate = "yuv420p", 4, 4_000_000
        stream.time_base = Fraction(1, FPS)
        for number, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            picture.pts = number
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def write_zarr(folder: Path, version: Literal[2, 3] = 2) -> Path:
    """A replay buffer with two cameras; one of them in floating point, as diffusion policy stores them."""
    path = folder / "demos.zarr"
    root = zarr.open_group(str(path), mode="w", zarr_format=version)
    arrays: dict[str, NDArray[Any]] = {
        "state": STATE, "gripper": GRIPPER, "action": ACTION, "img": FRONT.astype(np.float32), "image.wrist": WRIST,
        "rate_hz": np.array([FPS]),
    }  # fmt: skip
    for name, value in arrays.items():
        root.create_array(f"data/{name}", data=np.ascontiguousarray(value), chunks=(6, *value.shape[1:]))
    root.create_array("meta/episode_ends", data=ENDS)
    return path


def write_npz(folder: Path) -> Path:
    """The same in one file."""
    path = folder / "demos.npz"
    arrays: dict[str, Any] = {
        "state": STATE,
        "gripper": GRIPPER,
        "action": ACTION,
        "image": FRONT,
        "image.wrist": WRIST,
    }
    np.savez(path, episode_ends=ENDS, rate_hz=FPS, **arrays)
    return path


def write_robomimic(folder: Path) -> Path:
    """robomimic's HDF5 file with two cameras; by name demo_10 comes before demo_2, by number after it."""
    path = folder / "demos.hdf5"
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = json.dumps({"env_kwargs": {"control_freq": FPS}})
        for number, start, end in zip([0, 2, 10], ENDS - LENGTHS, ENDS, strict=True):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = ACTION[start:end]
            demo["obs/joints"], demo["obs/gripper"] = STATE[start:end], GRIPPER[start:end]
            demo["obs/front_image"], demo["obs/wrist_image"] = FRONT[start:end], WRIST[start:end]
    return path
