"""Cameras of every format: the right frame for every step, read from disk when it is asked for and not before."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr
from PIL import Image
from tests.lab import cameras
from tests.lab.cameras import ACTION, ENDS, FRONT, GRIPPER, STATE, STEPS, WRIST

from specact.errors import ConfigError, DataError
from specact.lab.data import frames as frames_module
from specact.lab.data.episodes import Episodes, concatenate
from specact.lab.data.frames import Frames, as_frames, copied
from specact.lab.data.info import describe
from specact.lab.data.readers import read
from specact.lab.data.sources import Source

Write = Callable[[Path], Path]
ORDER = np.random.default_rng(1).permutation(STEPS)


def lerobot_v2(folder: Path) -> Path:
    return cameras.write_lerobot(folder, "v2.1")


def names_of(write: Write) -> tuple[str, str, float]:
    """What the two cameras are called, and how far a frame of the first may be from what was written."""
    video = write in (cameras.write_lerobot, lerobot_v2)
    first = "image" if write in (cameras.write_zarr, cameras.write_npz) else "image.front"
    return first, "image.wrist", 6.0 if video else 0.0


WRITERS = [cameras.write_lerobot, lerobot_v2, cameras.write_zarr, cameras.write_npz, cameras.write_robomimic]


@pytest.mark.parametrize("write", WRITERS)
def test_every_step_has_its_own_frames(write: Write, tmp_path: Path) -> None:
    found = read(write(tmp_path))
    front, wrist, off = names_of(write)
    assert set(found.cameras) == {front, wrist}
    for _ in range(2):
        for index in (slice(None), ORDER, ORDER[:3], 4, -1, ORDER.reshape(4, 5), found.ends - 1):
            np.testing.assert_array_equal(found.frames(wrist)[index], WRIST[index])
            np.testing.assert_allclose(found.frames(front)[index].astype(int), FRONT[index], atol=off)
    part = found.select(np.array([2, 0]))
    rows = np.concatenate([np.arange(ENDS[1], ENDS[2]), np.arange(ENDS[0])])
    np.testing.assert_array_equal(part.frames(wrist)[:], WRIST[rows])
    np.testing.assert_array_equal(part.action, ACTION[rows])
    np.testing.assert_allclose(part.frames(front)[3].astype(int), FRONT[rows[3]], atol=off)


@pytest.mark.parametrize("write", WRITERS)
def test_frames_go_to_other_processes_without_being_read(write: Write, tmp_path: Path) -> None:
    found = read(write(tmp_path))
    found.frames("image.wrist")[2]  # whatever is open now must not come along
    names_of(write)
    found.frames(names_of(write)[0])[2]
    sent = pickle.dumps(found)
    assert write is cameras.write_npz or len(sent) < WRIST.nbytes
    np.testing.assert_array_equal(pickle.loads(sent).frames("image.wrist")[ORDER], WRIST[ORDER])


@pytest.mark.parametrize("write", WRITERS)
def test_a_mapping_takes_what_it_names_and_nothing_else(write: Write, tmp_path: Path) -> None:
    """By the dataset's own key, or by the name that the reader knows it by."""
    keys: dict[Write, tuple[str, str]] = {
        cameras.write_lerobot: ("observation.gripper", "observation.images.wrist"),
        lerobot_v2: ("observation.gripper", "observation.images.wrist"),
        cameras.write_robomimic: ("gripper", "wrist_image"),
    }
    gripper, wrist = keys.get(write, ("gripper", "image.wrist"))
    found = read(
        write(tmp_path),
        {
            "hand": Source(gripper),
            "image.seen": Source(wrist, crop=(2, 4, 12, 16), size=(6, 8)),
            "image.whole": Source("image.wrist", size=(16, 24)),
        },
    )
    assert list(found.observation) == ["hand", "image.seen", "image.whole"]
    np.testing.assert_array_equal(found.numbers("hand"), GRIPPER[:, None])
    assert found.frames("image.seen").shape == (STEPS, 6, 8, 3)
    cut = Image.fromarray(WRIST[5, 2:14, 4:20]).resize((8, 6), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(found.frames("image.seen")[5], np.asarray(cut))
    np.testing.assert_array_equal(found.frames("image.whole")[:], WRIST)


@pytest.mark.parametrize("write", [cameras.write_lerobot, cameras.write_zarr])
@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (Source("wirst"), "unknown key of this dataset 'wirst'"),
        (Source("state", size=(4, 4)), "is not made of camera frames, so it has no size and no crop"),
        (Source("image.wrist", crop=(8, 0, 9, 24)), "does not lie within frames of 16 x 24"),
    ],
)
def test_a_mapping_that_cannot_be(write: Write, source: Source, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        read(write(tmp_path), {"x": source})


@pytest.mark.parametrize(
    ("name", "value"), [("size", (0, 4)), ("crop", (0, 0, 0, 4)), ("crop", (-1, 0, 2, 4)), ("history", -1)]
)
def test_sizes_that_no_frame_has(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Source("image", **{name: value})


def test_a_black_first_frame_does_not_decide_what_white_is(tmp_path: Path) -> None:
    """Floats up to 255, of which the first frame shows nothing but 0; and a frame that gives a wrong guess away."""
    path = cameras.write_zarr(tmp_path)
    assert FRONT[0].max() == 0
    np.testing.assert_array_equal(read(path).frames("image")[:], FRONT)
    dark = np.full(FRONT.shape, 0.5, np.float32)
    dark[3] = 200
    zarr.open_group(str(path), mode="a").create_array(
        "data/img", data=dark, chunks=(6, *FRONT.shape[1:]), overwrite=True
    )
    with pytest.raises(DataError, match=r"some frames of the image lie within 0\.\.1 and some do not"):
        read(path).frames("image")[:]


# --- LeRobot ---


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_dataset_without_its_videos_still_gives_everything_else(
    version: Literal["v2.1", "v3.0"], tmp_path: Path
) -> None:
    path = cameras.write_lerobot(tmp_path, version)
    shutil.rmtree(path / "videos")
    found = read(path)
    np.testing.assert_array_equal(found.numbers("state"), STATE)
    assert found.frames("image.front").shape == (STEPS, 32, 48, 3)
    with pytest.raises(DataError, match=r"\.mp4 is damaged or missing"):
        found.frames("image.front")[0]
    assert any(text.startswith("the camera image.front cannot be read") for text in describe(found, path)["warnings"])


def test_a_video_that_is_not_what_the_metadata_say(tmp_path: Path) -> None:
    path = cameras.write_lerobot(tmp_path)
    video = path / "videos/observation.images.front/chunk-000/file-001.mp4"
    whole = video.read_bytes()
    for share in (0.0, 0.3, 0.8):
        video.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(DataError, match=r"file-001\.mp4"):
            read(path).frames("image.front")[:]
    cameras.write_video(video, FRONT[ENDS[1] : ENDS[2] - 2])
    with pytest.raises(DataError, match=r"file-001\.mp4 ends before 0\.600 s"):
        read(path).frames("image.front")[:]
    cameras.write_video(video, WRIST[ENDS[1] : ENDS[2]])
    with pytest.raises(DataError, match=r"frames of \(16, 24, 3\)|of shape \(16, 24, 3\)"):
        read(path).frames("image.front")[:]
    video.write_text("#EXTM3U\n/etc/passwd\n")  # a playlist names other files
    with pytest.raises(DataError, match="damaged or missing"):
        read(path).frames("image.front")[:]


def test_times_between_two_frames_are_refused(tmp_path: Path) -> None:
    path = cameras.write_lerobot(tmp_path)
    file = path / "data/chunk-000/file-001.parquet"
    table = pq.read_table(file)
    late = table.column("timestamp").to_numpy() + np.float32(0.05)
    pq.write_table(table.set_column(table.schema.get_field_index("timestamp"), "timestamp", [late]), file)
    with pytest.raises(DataError, match=r"has no frame at 0\.050 s, the next one is at 0\.100 s"):
        read(path).frames("image.front")[:]


def test_an_image_that_is_none(tmp_path: Path) -> None:
    path = cameras.write_lerobot(tmp_path)
    file = path / "data/chunk-000/file-001.parquet"
    key = "observation.images.wrist"
    table = pq.read_table(file)
    for entry, word in ((b"no image", "identify"), (None, "name of a file")):
        images = [{"bytes": entry, "path": "frame.png"}] * len(table)
        pq.write_table(table.set_column(table.schema.get_field_index(key), key, [images]), file)
        assert len(read(path).frames("image.wrist")[: ENDS[1]]) == ENDS[1]
        with pytest.raises(DataError, match=rf"file-001\.parquet.*{word}"):
            read(path).frames("image.wrist")[:]


# --- frames ---


class Counted:
    """Frames that remember how many were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        self.read += rows.tolist()
        return np.asarray(WRIST[rows], dtype=np.uint8)


def test_only_what_is_indexed_is_read_and_nothing_twice() -> None:
    source = Counted()
    frames = Frames(WRIST.shape, source)
    half = frames.select(np.arange(0, STEPS, 2)).fitted((0, 0, 8, 8), None)
    assert source.read == []
    np.testing.assert_array_equal(half[[3, 1, 3]], WRIST[[6, 2, 6], :8, :8])
    assert source.read == [2, 6]


def test_frames_of_several_files_are_joined_without_being_read() -> None:
    source = Counted()
    parts = [
        Episodes({"image": Frames(WRIST.shape, source), "state": STATE}, ACTION, ENDS),
        Episodes({"image": WRIST[:5], "state": STATE[:5]}, ACTION[:5], np.array([5])),
    ]
    both = concatenate(parts)
    assert source.read == []
    np.testing.assert_array_equal(both.frames("image")[[STEPS + 4, 3]], WRIST[[4, 3]])
    assert source.read == [3]
    with pytest.raises(DataError, match="some of these demonstrations have a image and some do not"):
        concatenate([parts[0], parts[1].only("state")])
    small = Episodes({"image": WRIST[:5, :8, :8], "state": STATE[:5]}, ACTION[:5], np.array([5]))
    with pytest.raises(DataError, match=r"camera frames of \(8, 8, 3\) and of \(16, 24, 3\) cannot be joined"):
        concatenate([parts[0], small])


def test_a_copy_is_made_once_and_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "_BLOCK_BYTES", 3 * WRIST[0].nbytes)
    source, told = Counted(), list[int]()
    file = tmp_path / "run" / "frames" / "image.npy"
    copy = copied(Frames(WRIST.shape, source), file, told.append)
    assert told == [*range(3, STEPS, 3), STEPS] and source.read == list(range(STEPS))
    np.testing.assert_array_equal(copy[ORDER], WRIST[ORDER])
    again = copied(Frames(WRIST.shape, source), file)
    np.testing.assert_array_equal(again[ORDER], WRIST[ORDER])
    assert len(source.read) == STEPS
    other = copied(as_frames(WRIST[:4]), file)  # of other data
    np.testing.assert_array_equal(other[:], WRIST[:4])
    assert [path.name for path in file.parent.iterdir()] == ["image.npy"]


def test_a_disk_without_room_is_told_beforehand(tmp_path: Path) -> None:
    huge = Frames((1 << 40, 480, 640, 3), Counted(), np.arange(3))
    huge.shape = (1 << 40, 480, 640, 3)
    with pytest.raises(ConfigError, match="give them a smaller size"):
        copied(huge, tmp_path / "image.npy")
    assert list(tmp_path.iterdir()) == []


def test_frames_that_are_not_of_the_announced_size() -> None:
    with pytest.raises(DataError, match=r"of shape \(16, 24, 3\) are where \(16, 25, 3\) was announced"):
        Frames((STEPS, 16, 25, 3), Counted())[0]
    with pytest.raises(DataError, match="height, width, 3"):
        Frames((STEPS, 16, 25), Counted())
