"""Each format is written by hand, read back, damaged, and read again; then the real data, where it is there."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.example_count import example_count
from zarr.codecs import BloscCodec

from specact.errors import DataError
from specact.lab.data.episodes import Episodes
from specact.lab.data.readers import read

LENGTHS = [4, 3, 5]
ENDS = np.cumsum(LENGTHS)
STEPS = int(ENDS[-1])
RNG = np.random.default_rng(0)
STATE = RNG.normal(size=(STEPS, 6)).astype(np.float32)
ACTION = RNG.uniform(-1, 1, size=(STEPS, 2)).astype(np.float32)
IMAGE = RNG.integers(0, 256, size=(STEPS, 8, 8, 3)).astype(np.uint8)


def write_npz(path: Path) -> Path:
    path = path / "demos.npz"
    np.savez_compressed(path, state=STATE, action=ACTION, episode_ends=ENDS, rate_hz=10.0)
    return path


def write_zarr(path: Path, version: Literal[2, 3] = 2, image: np.ndarray = IMAGE, rate: float | None = 10.0) -> Path:
    path = path / "demos.zarr"
    root = zarr.open_group(str(path), mode="w", zarr_format=version)
    data, meta = root.create_group("data"), root.create_group("meta")
    for name, value in {"state": STATE, "action": ACTION, "img": image}.items():
        data.create_array(name, data=value, chunks=(5, *value.shape[1:]))
    meta.create_array("episode_ends", data=ENDS)
    if rate is not None:
        meta.create_array("rate_hz", data=np.array([rate]))
    return path


def episode_of_steps() -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(len(LENGTHS)), LENGTHS), np.concatenate([np.arange(n) for n in LENGTHS])


def lists(values: np.ndarray, fixed: bool) -> pa.Array:
    kind = pa.list_(pa.float32(), values.shape[1]) if fixed else pa.list_(pa.float32())
    return pa.array(list(values), type=kind)


def frame_table(rows: np.ndarray, fixed: bool = True, **other: np.ndarray) -> pa.Table:
    episode, frame = episode_of_steps()
    return pa.table(
        {
            "observation.state": lists(STATE[rows], fixed),
            "action": lists(ACTION[rows], fixed),
            "timestamp": (frame[rows] / 10).astype(np.float32),
            "frame_index": frame[rows],
            "episode_index": episode[rows],
            "index": rows,
            "task_index": np.zeros(len(rows), np.int64),
            **other,
        }
    )


def write_info(path: Path, version: str, data_path: str) -> None:
    (path / "meta").mkdir(parents=True)
    (path / "meta/info.json").write_text(
        json.dumps(
            {
                "codebase_version": version,
                "robot_type": "test",
                "total_episodes": len(LENGTHS),
                "total_frames": STEPS,
                "chunks_size": 2 if version == "v2.1" else 1000,
                "fps": 10,
                "data_path": data_path,
                "features": {},
            }
        )
    )


def write_zarr_v3(path: Path) -> Path:
    return write_zarr(path, version=3)


def write_zarr_v3_blosc(path: Path) -> Path:
    path = write_zarr(path, version=3)
    root = zarr.open_group(str(path), mode="a")
    root.create_array("data/action", data=ACTION, chunks=(5, 2), compressors=BloscCodec(), overwrite=True)
    return path


def write_lerobot_v2(path: Path) -> Path:
    path = path / "lerobot2"
    write_info(path, "v2.1", "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet")
    lines = [json.dumps({"episode_index": e, "tasks": ["t"], "length": n}) for e, n in enumerate(LENGTHS)]
    (path / "meta/episodes.jsonl").write_text("\n".join(lines) + "\n")
    for e, (start, end) in enumerate(zip(ENDS - LENGTHS, ENDS, strict=True)):
        file = path / f"data/chunk-{e // 2:03d}/episode_{e:06d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(frame_table(np.arange(start, end)[::-1]), file)  # the order in a file must not matter
    return path


def write_lerobot_v3(path: Path) -> Path:
    """Two data files: the first two episodes in one, the third in the other; lists of free length."""
    path = path / "lerobot3"
    write_info(path, "v3.0", "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet")
    zeros = np.zeros(3, np.int64)
    (path / "meta/episodes/chunk-000").mkdir(parents=True)
    pq.write_table(
        pa.table(
            {
                "episode_index": np.arange(3),
                "tasks": [["t"]] * 3,
                "length": np.array(LENGTHS),
                "data/chunk_index": zeros,
                "data/file_index": np.array([0, 0, 1]),
                "dataset_from_index": ENDS - LENGTHS,
                "dataset_to_index": ENDS,
                "meta/episodes/chunk_index": zeros,
                "meta/episodes/file_index": zeros,
            }
        ),
        path / "meta/episodes/chunk-000/file-000.parquet",
    )
    (path / "data/chunk-000").mkdir(parents=True)
    pq.write_table(frame_table(np.arange(7), fixed=False), path / "data/chunk-000/file-000.parquet")
    pq.write_table(frame_table(np.arange(7, STEPS), fixed=False), path / "data/chunk-000/file-001.parquet")
    return path


def write_robomimic(path: Path) -> Path:
    """Demonstrations are written in the order of their names (demo_10 before demo_2), to be read by number."""
    path = path / "demos.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "env_kwargs": {"control_freq": 10}})
        for number, start, end in zip([0, 2, 10], ENDS - LENGTHS, ENDS, strict=True):
            demo = data.create_group(f"demo_{number}")
            demo["actions"] = ACTION[start:end].astype(np.float64)
            demo["obs/a_pos"], demo["obs/b_width"] = STATE[start:end, :5], STATE[start:end, 5]
            demo["obs/agentview_image"] = IMAGE[start:end]
    return path


WRITERS = [
    write_npz,
    write_zarr,
    write_zarr_v3,
    write_zarr_v3_blosc,
    write_lerobot_v2,
    write_lerobot_v3,
    write_robomimic,
]


@pytest.mark.parametrize("write", WRITERS)
def test_round_trip(write: Callable[[Path], Path], tmp_path: Path) -> None:
    found = read(str(write(tmp_path)))
    np.testing.assert_array_equal(found.numbers("state"), STATE)
    np.testing.assert_array_equal(found.action, ACTION)
    np.testing.assert_array_equal(found.ends, ENDS)
    assert found.rate_hz == 10.0
    assert [str(a.dtype) for a in (found.numbers("state"), found.action, found.ends)] == ["float32", "float32", "int64"]


def read_frames(path: Path, cut: Path) -> None:
    seen = read(path)
    assert seen.cameras, f"{cut} can be cut without notice"
    seen.frames("image")[:]  # frames are read only here


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95])
def test_truncation_is_told(write: Callable[[Path], Path], share: float, tmp_path: Path) -> None:
    """Every file of every format, cut: always a DataError that names the path."""
    path = write(tmp_path)
    for file in [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file()):
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(DataError, match=path.name):
            read_frames(path, file)
        file.write_bytes(content)
    assert read(path).steps == STEPS


@settings(example_count(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("write", [write_npz, write_robomimic])
def test_any_damage(write: Callable[[Path], Path], data: st.DataObject, tmp_path: Path) -> None:
    """Cut anywhere and with bytes changed anywhere: a DataError or valid episodes, nothing else."""
    content = bytearray(write(tmp_path).read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    damaged = tmp_path / f"damaged{write(tmp_path).suffix}"
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        assert isinstance(read(damaged), Episodes)
    except DataError as error:
        assert "damaged" in str(error)


@settings(example_count(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("write", [write_zarr, write_zarr_v3, write_lerobot_v2, write_lerobot_v3])
def test_any_damage_in_a_folder(write: Callable[[Path], Path], data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / write.__name__
    if not path.exists():
        path.mkdir()
        write(path)
    root = next(path.iterdir())
    file = data.draw(st.sampled_from(sorted(f for f in root.rglob("*") if f.is_file())))
    content = file.read_bytes()
    changed = bytearray(content)
    changed[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(changed[: data.draw(st.integers(0, len(content)))])
    try:
        found = read(root)
        for name in found.cameras:
            assert found.frames(name)[:].dtype == np.uint8
    except DataError as error:
        assert root.name in str(error)
    finally:
        file.write_bytes(content)


def save(path: Path, **arrays: Any) -> Path:
    path = path / "x.npz"
    content: dict[str, Any] = {"obs": STATE, "actions": ACTION, "episode_ends": ENDS, **arrays}
    np.savez(path, **content)
    return path


def test_npz_names(tmp_path: Path) -> None:
    kitchen = read(save(tmp_path, state=STATE + 1, current_subtask=np.arange(STEPS, dtype=np.uint8), img=IMAGE))
    np.testing.assert_array_equal(kitchen.numbers("state"), STATE + 1)
    assert kitchen.rate_hz is None
    np.testing.assert_array_equal(kitchen.numbers("goal")[:, 0], np.arange(STEPS))
    np.testing.assert_array_equal(kitchen.frames("image"), IMAGE)
    goal = read(save(tmp_path, goal=ACTION, image=IMAGE / 255.0)).numbers("goal")
    np.testing.assert_array_equal(goal, ACTION)
    image = read(save(tmp_path, image=IMAGE / 255.0)).frames("image")
    np.testing.assert_array_equal(image, IMAGE)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"episode_ends": np.array([4, 7, 11])}, "number of steps 12"),
        ({"episode_ends": np.array([4, 4, 12])}, "1 do not increase"),
        ({"episode_ends": np.array([4.0, 12.0])}, "integers"),
        ({"episode_ends": np.array([], np.int64)}, "no step"),
        ({"actions": ACTION[:-1]}, "has 12 rows, but there are 11 steps"),
        ({"obs": STATE[:, :, None]}, r"\(12, 6, 1\)"),
        ({"obs": np.float32(3)}, "flat row per step"),
        ({"obs": STATE.astype(str)}, "real numbers"),
        ({"obs": np.array([{}] * STEPS, object)}, "pickled objects"),
        ({"rate_hz": 0.0}, "positive"),
        ({"image": IMAGE.transpose(0, 3, 1, 2)}, "height, width, 3"),
        ({"goal": STATE[:5]}, "5 rows"),
    ],
)
def test_npz_refusals(arrays: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(save(tmp_path, **arrays))
    assert "x.npz" in str(caught.value)


def test_npz_without_actions_lists_what_is_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", obs=STATE, episode_ends=ENDS)
    with pytest.raises(DataError, match="'action' or 'actions'; found: episode_ends, obs"):
        read(tmp_path / "x.npz")
    with (tmp_path / "y.npz").open("wb") as file:
        np.save(file, STATE)
    with pytest.raises(DataError, match="not an npz archive"):
        read(tmp_path / "y.npz")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("image", [IMAGE, IMAGE.astype(np.float32), (IMAGE / 255).astype(np.float32)])
def test_zarr_frames_are_lazy_uint8(version: Literal[2, 3], image: np.ndarray, tmp_path: Path) -> None:
    found = read(write_zarr(tmp_path, version, image)).frames("image")
    assert not found.in_memory
    assert (len(found), found.shape) == (STEPS, IMAGE.shape)
    for index in (3, -1, slice(2, 9), slice(None, None, -2), slice(5, 5), [7, 1, 7], np.arange(STEPS) % 3 == 0):
        assert found[index].dtype == np.uint8
        np.testing.assert_array_equal(found[index], IMAGE[index])
    np.testing.assert_array_equal(np.asarray(found), IMAGE)
    with pytest.raises(IndexError):
        found[STEPS]


class Payload:
    """Creates a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"filters": [{"id": "pickle", "protocol": 4}], "compressor": None, "dtype": "|O"}, "pickle"),
        ({"filters": [{"id": "pickle", "protocol": 4}], "compressor": None}, "pickle"),
        ({"filters": None, "compressor": {"id": "pickle", "protocol": 4}}, "pickle"),
        (
            {"filters": [{"id": "quantize", "digits": 3, "dtype": "<f4", "astype": "<f4"}]},
            r"'data/state' is compressed with 'quantize', which is not supported; supported: .*Store it again",
        ),
        ({"filters": [{"id": "packbits"}]}, r"'data/state' is compressed with 'packbits'"),
        ({"dtype": "<U3"}, r"'data/state' holds <U3; store numbers"),
    ],
    ids=["objects", "a filter", "a compressor", "quantize", "packbits", "text"],
)
def test_zarr_unpacks_only_what_is_known_to_be_harmless(tmp_path: Path, changes: Any, sentence: str) -> None:
    path, touched = write_zarr(tmp_path), tmp_path / "touched"
    file = path / "data" / "state" / ".zarray"
    described = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(described | ({"fill_value": None} if "dtype" in changes else {})))
    for chunk in file.parent.glob("[0-9]*"):
        chunk.write_bytes(pickle.dumps([Payload(touched), "|O", (1,)]))
    with pytest.raises(DataError, match=sentence):
        read(path)
    assert not touched.exists()


@pytest.mark.parametrize("name", ["state", "img"])
def test_zarr_of_version_3_unpacks_only_what_is_known_to_be_harmless(tmp_path: Path, name: str) -> None:
    path = write_zarr(tmp_path, version=3)
    file = path / "data" / name / "zarr.json"
    described = json.loads(file.read_text())
    described["codecs"].insert(0, {"name": "numcodecs.bitround", "configuration": {"keepbits": 3}})
    file.write_text(json.dumps(described))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr says that numcodecs are not in the specification
        with pytest.raises(DataError, match=rf"'data/{name}' is compressed with 'bitround'"):
            read(path)


def test_zarr_selects_and_cannot_hide_lost_chunks(tmp_path: Path) -> None:
    path = write_zarr(tmp_path)
    (path / "data/.DS_Store").write_text("a stray file")
    image = read(path).select(np.array([2, 0])).frames("image")
    np.testing.assert_array_equal(image, np.concatenate([IMAGE[7:12], IMAGE[0:4]]))
    next((path / "data/action").rglob("1.0")).unlink()
    with pytest.raises(DataError, match="1 of 3 chunks of 'data/action' are missing"):
        read(path)
    shutil.rmtree(path / "data/action")
    with pytest.raises(DataError, match=r"'action' or 'actions'; found: .*state"):
        read(path)


def test_lerobot_versions(tmp_path: Path) -> None:
    path = write_lerobot_v2(tmp_path)
    info = json.loads((path / "meta/info.json").read_text())
    for change, message in (
        ({"codebase_version": "v1.6"}, r"'v1\.6'; supported: v2\.0, v2\.1, v3\.0"),
        ({"data_path": "../{episode_index}.parquet"}, "outside the dataset"),
        ({"data_path": "{nothing}.parquet"}, "cannot be filled in"),
        ({"data_path": "{episode_index[0]}.parquet"}, "cannot be filled in"),
        ({"chunks_size": 0}, "chunks_size"),
        ({"fps": "fast"}, "fps"),
        ({"fps": 0.0}, "rate"),
        ({"total_episodes": 9}, "declares 9 episodes, but 3"),
    ):
        (path / "meta/info.json").write_text(json.dumps({**info, **change}))
        with pytest.raises(DataError, match=message):
            read(path)


def test_lerobot_counts_and_columns(tmp_path: Path) -> None:
    path = write_lerobot_v3(tmp_path)
    file = path / "data/chunk-000/file-001.parquet"
    rows = np.arange(7, STEPS)
    ragged = pa.array([[1.0, 2.0]] * 4 + [[1.0]], type=pa.list_(pa.float32()))
    for table, message in (
        (frame_table(rows[:-1]), "episode 2 has 4 frames in the data and 5 in the metadata"),
        (frame_table(rows, frame_index=np.array([0, 1, 1, 3, 4])), "frame_index 1 where 2 is expected"),
        (frame_table(rows).drop_columns("action"), "no column 'action'; found: observation.state"),
        (frame_table(rows, action=ragged), "between 1 and 2 numbers"),
        (
            frame_table(rows, action=lists(STATE[rows], True)),
            "file-001.parquet are 6 wide, those of .*file-000.parquet 2",
        ),
        (frame_table(rows, action=pa.array([[1.0, 2.0], None] * 2 + [None])), "empty in 3 of 5 rows"),
        (frame_table(rows, action=pa.array(["a"] * 5)), "string"),
    ):
        pq.write_table(table, file)
        with pytest.raises(DataError, match=message):
            read(path)
    file.unlink()
    with pytest.raises(DataError, match=r"file-001\.parquet is damaged or missing"):
        read(path)


def test_robomimic_refusals(tmp_path: Path) -> None:
    def change(edit: Callable[[h5py.File], object], message: str) -> None:
        path = write_robomimic(tmp_path)
        with h5py.File(path, "a") as file:
            edit(file)
        with pytest.raises(DataError, match=message):
            read(path)

    def shorten(file: h5py.File) -> None:
        del file["data/demo_2/actions"]
        file["data/demo_2/actions"] = ACTION[:2]

    def narrow(file: h5py.File) -> None:
        del file["data/demo_2/actions"]
        file["data/demo_2/actions"] = ACTION[:3, :1]

    change(shorten, "demo_2 has 3 steps of 'a_pos' and 2 actions")
    change(narrow, "actions of demo_2 are 1 wide, those of demo_0 2")
    change(lambda file: file.pop("data/demo_2/actions"), "demo_2 has no 'actions'")
    change(
        lambda file: file.pop("data/demo_10/obs/a_pos"),
        "demo_10 has the observations agentview_image, b_width, but demo_0 has",
    )
    change(lambda file: file.pop("data/demo_0/obs"), "dataset_states_to_obs")
    change(lambda file: file.pop("data"), "no 'data/demo_0'")


def test_unknown_places(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is nothing at .*Supported"):
        read(tmp_path / "none.npz")
    (tmp_path / "a.csv").write_text("1")
    with pytest.raises(DataError, match=r"'\.csv'; supported"):
        read(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"folder with a\.csv; supported"):
        read(tmp_path)
    (tmp_path / "x.zarr").mkdir()
    with pytest.raises(DataError, match="zarr store is damaged"):
        read(tmp_path / "x.zarr")


@pytest.mark.parametrize(
    ("write", "package"), [(write_zarr, "zarr"), (write_lerobot_v2, "pyarrow"), (write_robomimic, "h5py")]
)
def test_missing_package(
    write: Callable[[Path], Path], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=package):
        read(path)
