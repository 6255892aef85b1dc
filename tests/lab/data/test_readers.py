"""Each format is written as other programs do, read back, cut, damaged, and read again; frames only when asked for."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import h5py
import numcodecs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.example_count import example_count
from tests.lab import cameras
from tests.lab.cameras import ACTION, ENDS, FRONT, GRIPPER, STATE, STEPS, WRIST, frame_table, write_npz, write_video
from zarr.codecs import BloscCodec

from specact.errors import ConfigError, DataError
from specact.lab.data import frames as frames_module
from specact.lab.data import lerobot, readers
from specact.lab.data.checks import describe
from specact.lab.data.episodes import Episodes, concatenate
from specact.lab.data.frames import Frames, as_frames, copied
from specact.lab.data.readers import Source, read

Write = Callable[[Path], Path]
ORDER = np.random.default_rng(1).permutation(STEPS)


def lerobot_v2(folder: Path) -> Path:
    return cameras.write_lerobot(folder, "v2.1")


def zarr_v3(folder: Path) -> Path:
    path = cameras.write_zarr(folder, 3)
    root = zarr.open_group(str(path), mode="a")
    root.create_array("data/action", data=ACTION, chunks=(6, 2), compressors=BloscCodec(), overwrite=True)
    return path


WRITERS = [write_npz, cameras.write_zarr, zarr_v3, cameras.write_lerobot, lerobot_v2, cameras.write_robomimic]


def kind_of(write: Write) -> str:
    return next(kind for kind in ("npz", "zarr", "lerobot", "robomimic") if kind in write.__name__)


def front_of(write: Write) -> tuple[str, float]:
    """The first camera's name, and how far a frame of it may be from what was written."""
    return "image" if kind_of(write) in ("npz", "zarr") else "image.front", 6.0 if kind_of(write) == "lerobot" else 0.0


@pytest.mark.parametrize("write", WRITERS)
def test_every_step_is_what_was_written_and_frames_go_elsewhere_unread(write: Write, tmp_path: Path) -> None:
    dataset, (front, off) = read(write(tmp_path)), front_of(write)
    state = np.concatenate([GRIPPER[:, None], STATE], axis=1) if kind_of(write) == "robomimic" else STATE
    for values, wanted in ((dataset.numbers("state"), state), (dataset.action, ACTION), (dataset.ends, ENDS)):
        np.testing.assert_array_equal(values, wanted)
        assert values.dtype == wanted.dtype
    assert dataset.rate_hz == 10.0 and set(dataset.cameras) == {front, "image.wrist"}
    for _ in range(2):
        for index in (slice(None), ORDER, slice(None, None, -2), slice(5, 5), 4, -1, ORDER.reshape(4, 5), ENDS - 1):
            np.testing.assert_array_equal(dataset.frames("image.wrist")[index], WRIST[index])
            np.testing.assert_allclose(dataset.frames(front)[index].astype(int), FRONT[index], atol=off)
    with pytest.raises(IndexError):
        dataset.frames(front)[STEPS]
    part = dataset.select(np.array([2, 0]))
    rows = np.concatenate([np.arange(ENDS[1], ENDS[2]), np.arange(ENDS[0])])
    np.testing.assert_array_equal(part.frames("image.wrist")[:], WRIST[rows])
    np.testing.assert_array_equal(part.action, ACTION[rows])
    np.testing.assert_allclose(part.frames(front)[3].astype(int), FRONT[rows[3]], atol=off)
    sent = pickle.dumps(dataset)  # whatever is open now does not come along
    assert kind_of(write) == "npz" or (len(sent) < WRIST.nbytes and not dataset.frames(front).in_memory)
    np.testing.assert_array_equal(pickle.loads(sent).frames("image.wrist")[ORDER], WRIST[ORDER])


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_truncation_is_told(write: Write, share: float, tmp_path: Path) -> None:
    """Every file of every format, cut: always a DataError that names the path."""
    path = write(tmp_path)

    def read_all() -> None:
        dataset = read(path)
        for name in dataset.cameras:
            dataset.frames(name)[:]
        if kind_of(write) == "zarr":
            read(path, {"hand": Source("gripper")})  # is read on request only

    for file in [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file()):
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(DataError, match=path.name):
            read_all()
        file.write_bytes(content)
    read_all()


@settings(example_count(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("write", WRITERS)
def test_any_damage(write: Write, data: st.DataObject, tmp_path: Path) -> None:
    """Cut anywhere and with bytes changed anywhere: a DataError that names the path, or valid episodes."""
    root = tmp_path / write.__name__
    if not root.exists():
        root.mkdir()
        write(root)
    path = next(root.iterdir())
    inside = sorted(f for f in path.rglob("*") if f.is_file() and f.suffix != ".mp4")
    file = data.draw(st.sampled_from(inside or [path]))
    content = file.read_bytes()
    changed = bytearray(content)
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        changed[place] = data.draw(st.integers(0, 255))
    file.write_bytes(changed[: data.draw(st.integers(0, len(content)))])
    try:
        assert isinstance(read(path), Episodes)
    except DataError as error:
        assert path.name in str(error)
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize("write", WRITERS)
def test_a_mapping_takes_what_it_names_and_nothing_else(write: Write, tmp_path: Path) -> None:
    """By the dataset's own key, or by the name that the reader knows it by."""
    keys = {"lerobot": ("observation.gripper", "observation.images.wrist"), "robomimic": ("gripper", "wrist_image")}
    gripper, wrist = keys.get(kind_of(write), ("gripper", "image.wrist"))
    sources = {
        "hand": Source(gripper),
        "image.seen": Source(wrist, crop=(2, 4, 12, 16), size=(6, 8)),
        "image.whole": Source("image.wrist", size=(16, 24)),
    }
    dataset = read(write(tmp_path), sources)
    assert list(dataset.observation) == list(sources)
    np.testing.assert_array_equal(dataset.numbers("hand"), GRIPPER[:, None])
    assert dataset.frames("image.seen").shape == (STEPS, 6, 8, 3)
    cut = Image.fromarray(WRIST[5, 2:14, 4:20]).resize((8, 6), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(dataset.frames("image.seen")[5], np.asarray(cut))
    np.testing.assert_array_equal(dataset.frames("image.whole")[:], WRIST)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (Source("wirst"), "unknown key of this dataset 'wirst'"),
        (Source("state", size=(4, 4)), "is not made of camera frames, so it has no size and no crop"),
        (Source("image.wrist", crop=(8, 0, 9, 24)), "does not lie within frames of 16 x 24"),
    ],
)
def test_a_mapping_that_cannot_be(source: Source, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        read(cameras.write_lerobot(tmp_path), {"x": source})


def test_unknown_places_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("1")
    (tmp_path / "x.zarr").mkdir()
    for name, sentence in (
        ("none.npz", r"there is nothing at .*Supported"), ("a.csv", r"'\.csv'; supported"),
        ("", r"folder with a\.csv, x\.zarr; supported"), ("x.zarr", "zarr store is damaged"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=sentence):
            read(tmp_path / name)
    for write, package in ((zarr_v3, "zarr"), (lerobot_v2, "pyarrow"), (cameras.write_robomimic, "h5py")):
        path = write(tmp_path)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=package):
            read(path)


# --- npz and zarr ---


def save(path: Path, **arrays: Any) -> Path:
    content: dict[str, Any] = {"obs": STATE, "actions": ACTION, "episode_ends": ENDS, **arrays}
    np.savez(path / "x.npz", **{name: value for name, value in content.items() if value is not None})
    return path / "x.npz"


def test_npz_names(tmp_path: Path) -> None:
    kitchen = read(save(tmp_path, state=STATE + 1, current_subtask=np.arange(STEPS, dtype=np.uint8), img=WRIST))
    np.testing.assert_array_equal(kitchen.numbers("state"), STATE + 1)
    assert kitchen.rate_hz is None
    np.testing.assert_array_equal(kitchen.numbers("goal")[:, 0], np.arange(STEPS))
    np.testing.assert_array_equal(kitchen.frames("image"), WRIST)
    dataset = read(save(tmp_path, goal=ACTION, image=WRIST / 255.0))
    np.testing.assert_array_equal(dataset.numbers("goal"), ACTION)
    np.testing.assert_array_equal(dataset.frames("image"), WRIST)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"episode_ends": np.array([4, 7, 11])}, "number of steps 20"),
        ({"episode_ends": np.array([4, 4, 20])}, "1 do not increase"),
        ({"episode_ends": np.array([4.0, 20.0])}, "integers"),
        ({"episode_ends": np.array([], np.int64)}, "no step"),
        ({"actions": ACTION[:-1]}, "has 20 rows, but there are 19 steps"),
        ({"actions": None}, "'action' or 'actions'; found: episode_ends, obs"),
        ({"obs": STATE[:, :, None]}, r"\(20, 3, 1\)"),
        ({"obs": np.float32(3)}, "flat row per step"),
        ({"obs": STATE.astype(str)}, "real numbers"),
        ({"obs": np.array([{}] * STEPS, object)}, "pickled objects"),
        ({"rate_hz": 0.0}, "positive"),
        ({"image": WRIST.transpose(0, 3, 1, 2)}, "height, width, 3"),
        ({"image": WRIST.astype(np.uint16) * 257}, "from 0 to 65535"),
        ({"image": WRIST / np.float32(127.5) - 1.0}, "from -1 to 1"),
        ({"goal": STATE[:5]}, "5 rows"),
    ],
)
def test_npz_refusals(arrays: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(save(tmp_path, **arrays))
    assert "x.npz" in str(caught.value)
    with (tmp_path / "y.npz").open("wb") as file:
        np.save(file, STATE)
    with pytest.raises(DataError, match="not an npz archive"):
        read(tmp_path / "y.npz")


def test_a_black_first_frame_does_not_decide_what_white_is(tmp_path: Path) -> None:
    """Floats up to 255, of which the first frame shows nothing but 0; and a frame that gives a wrong guess away."""
    path = cameras.write_zarr(tmp_path)
    assert FRONT[0].max() == 0
    root = zarr.open_group(str(path), mode="a")
    for scale, most, sentence in ((255, 0.0, ""), (1, 200.0, r"some frames of the image lie within 0\.\.1 and")):
        bright = (FRONT / np.float32(255 if scale == 255 else 510)).astype(np.float32)
        bright[3] = np.maximum(bright[3], most)
        root.create_array("data/img", data=bright, chunks=(6, *FRONT.shape[1:]), overwrite=True)
        if sentence:
            with pytest.raises(DataError, match=sentence):
                read(path).frames("image")[:]
        else:
            np.testing.assert_array_equal(read(path).frames("image")[:], FRONT)


class Payload:
    """Creates a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


PICKLE = {"id": "pickle", "protocol": 4}
BITROUND = {"name": "numcodecs.bitround", "configuration": {"keepbits": 3}}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


@pytest.mark.filterwarnings("ignore")  # zarr says that numcodecs are not in the specification
@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("state/.zarray", {"filters": [PICKLE], "compressor": None, "dtype": "|O", "fill_value": None}, "pickle"),
        ("state/.zarray", {"filters": [PICKLE], "compressor": None}, "pickle"),
        ("state/.zarray", {"filters": None, "compressor": PICKLE}, "pickle"),
        ("state/.zarray", {"filters": [{"id": "packbits"}]}, r"'data/state' is compressed with 'packbits'.*Store it"),
        ("state/.zarray", {"dtype": "<U3", "fill_value": None}, r"'data/state' holds <U3; store numbers"),
        ("state/zarr.json", {"codecs": [BITROUND, BYTES]}, "'data/state' is compressed with 'bitround'"),
        ("img/zarr.json", {"codecs": [BITROUND, BYTES]}, "'data/img' is compressed with 'bitround'"),
    ],
)
def test_zarr_unpacks_only_what_is_known_to_be_harmless(tmp_path: Path, file: str, changes: Any, sentence: str) -> None:
    path, touched = (cameras.write_zarr if file.endswith(".zarray") else zarr_v3)(tmp_path), tmp_path / "touched"
    described = path / "data" / file
    described.write_text(json.dumps(json.loads(described.read_text()) | changes))
    for chunk in described.parent.glob("[0-9]*"):
        chunk.write_bytes(pickle.dumps([Payload(touched), "|O", (1,)]))
    with pytest.raises(DataError, match=sentence):
        read(path)
    assert not touched.exists()


def test_zarr_cannot_hide_lost_chunks(tmp_path: Path) -> None:
    path = cameras.write_zarr(tmp_path)
    (path / "data/.DS_Store").write_text("a stray file")
    assert read(path).steps == STEPS
    next((path / "data/action").rglob("1.0")).unlink()
    with pytest.raises(DataError, match="1 of 4 chunks of 'data/action' are missing"):
        read(path)
    shutil.rmtree(path / "data/action")
    with pytest.raises(DataError, match=r"'action' or 'actions'; found: .*state"):
        read(path)


# --- LeRobot and robomimic ---


def test_lerobot_versions(tmp_path: Path) -> None:
    path = lerobot_v2(tmp_path)
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
    path = cameras.write_lerobot(tmp_path)
    file, rows = path / "data/chunk-000/file-001.parquet", np.arange(ENDS[1], STEPS)
    ragged = pa.array([[1.0, 2.0]] * 7 + [[1.0]], type=pa.list_(pa.float32()))
    for table, message in (
        (frame_table(rows[:-1]), "episode 2 has 7 frames in the data and 8 in the metadata"),
        (frame_table(rows, frame_index=np.array([0, 1, 1, 3, 4, 5, 6, 7])), "frame_index 1 where 2 is expected"),
        (frame_table(rows).drop_columns("action"), "no column 'action'; found: observation.state"),
        (frame_table(rows, action=ragged), "between 1 and 2 numbers"),
        (frame_table(rows, action=pa.array(list(STATE[rows]))), r"file-001.parquet are 3 wide, those of .* 2"),
        (frame_table(rows, action=pa.array([[1.0, 2.0], None] * 4)), "empty in 4 of 8 rows"),
        (frame_table(rows, action=pa.array(["a"] * 8)), "string"),
    ):
        pq.write_table(table, file)
        with pytest.raises(DataError, match=message):
            read(path)
    file.unlink()
    with pytest.raises(DataError, match=r"file-001\.parquet is damaged or missing"):
        read(path)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_dataset_without_its_videos_still_gives_everything_else(
    version: Literal["v2.1", "v3.0"], tmp_path: Path
) -> None:
    path = cameras.write_lerobot(tmp_path, version)
    shutil.rmtree(path / "videos")
    dataset = read(path)
    np.testing.assert_array_equal(dataset.numbers("state"), STATE)
    assert dataset.frames("image.front").shape == (STEPS, 32, 48, 3)
    with pytest.raises(DataError, match=r"\.mp4 is damaged or missing"):
        dataset.frames("image.front")[0]
    assert any(text.startswith("the camera image.front cannot be read") for text in describe(dataset, path)["warnings"])


def test_videos_and_images_that_are_not_what_the_metadata_say(tmp_path: Path) -> None:
    path = cameras.write_lerobot(tmp_path)
    video = path / "videos/observation.images.front/chunk-000/file-001.mp4"
    for content, sentence in (
        (FRONT[ENDS[1] : ENDS[2] - 2], r"file-001\.mp4 ends before 0\.600 s"),
        (WRIST[ENDS[1] : ENDS[2]], r"of \(16, 24, 3\)|of shape \(16, 24, 3\)"),
        (None, "damaged or missing"),
    ):
        if content is None:
            video.write_text("#EXTM3U\n/etc/passwd\n")  # a playlist names other files
        else:
            write_video(video, content)
        with pytest.raises(DataError, match=sentence):
            read(path).frames("image.front")[:]
    write_video(video, FRONT[ENDS[1] : ENDS[2]])
    file, key = path / "data/chunk-000/file-001.parquet", "observation.images.wrist"
    rows = np.arange(ENDS[1], STEPS)
    late = (cameras.FRAME[rows] / cameras.FPS + 0.05).astype(np.float32)
    pq.write_table(frame_table(rows, timestamp=late), file)
    with pytest.raises(DataError, match=r"has no frame at 0\.050 s, the next one is at 0\.100 s"):
        read(path).frames("image.front")[:]
    for entry, word in ((b"no image", "identify"), (None, "name of a file")):
        images = pa.array([{"bytes": entry, "path": "frame.png"}] * len(rows))
        pq.write_table(frame_table(rows, **{key: images}), file)
        assert len(read(path).frames("image.wrist")[: ENDS[1]]) == ENDS[1]
        with pytest.raises(DataError, match=rf"file-001\.parquet.*{word}"):
            read(path).frames("image.wrist")[:]


def test_robomimic_refusals(tmp_path: Path) -> None:
    def replaced(file: h5py.File, values: np.ndarray) -> None:
        del file["data/demo_2/actions"]
        file["data/demo_2/actions"] = values

    edits: list[tuple[Callable[[h5py.File], object], str]] = [
        (lambda file: replaced(file, ACTION[:2]), "demo_2 has 5 steps of 'front_image' and 2 actions"),
        (lambda file: replaced(file, ACTION[:5, :1]), "actions of demo_2 are 1 wide, those of demo_0 2"),
        (lambda file: file.pop("data/demo_2/actions"), "demo_2 has no 'actions'"),
        (lambda file: file.pop("data/demo_10/obs/joints"), "demo_10 has the observations .*, but demo_0 has"),
        (lambda file: file.pop("data/demo_0/obs"), "dataset_states_to_obs"),
        (lambda file: file.pop("data"), "no 'data/demo_0'"),
    ]
    for edit, message in edits:
        path = cameras.write_robomimic(tmp_path)
        with h5py.File(path, "a") as file:
            edit(file)
        with pytest.raises(DataError, match=message):
            read(path)


# --- hostile files ---


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Much less may be unpacked, so that small files are too large."""
    monkeypatch.setattr(readers, "_UNPACKED_BYTES", 1 << 20)


@pytest.mark.usefixtures("narrow")
def test_an_archive_that_unpacks_to_far_more_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", state=STATE, action=ACTION, episode_ends=ENDS, other=np.zeros(1 << 22))
    with pytest.raises(DataError, match=r"x\.npz.* GB of memory"):
        read(tmp_path / "x.npz")


@pytest.mark.parametrize("write", [cameras.write_zarr, zarr_v3])
def test_a_zarr_chunk_that_unpacks_to_more_than_a_chunk_is_refused(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path)
    for array, coder in (("state", numcodecs.Blosc("zstd")), ("action", numcodecs.Blosc("zstd"))):
        described = path / "data" / array / ("zarr.json" if write is zarr_v3 else ".zarray")
        if "zstd" in described.read_text() and "blosc" not in described.read_text():
            coder = numcodecs.Zstd()
        chunk = next(file for file in described.parent.rglob("*") if file.is_file() and file.name[0] not in ".z")
        whole = chunk.read_bytes()
        chunk.write_bytes(coder.encode(bytes(1 << 24)))
        with pytest.raises(DataError, match="more than the"):
            read(path)
        chunk.write_bytes(whole)
    assert read(path).steps == STEPS


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("state/.zarray", {"compressor": {"id": "gzip", "level": 1}}),
        ("state/.zarray", {"filters": [{"id": "zstd", "level": 1}], "compressor": {"id": "zstd", "level": 1}}),
        ("image.wrist/.zarray", {"shape": [1 << 40, 16, 24, 3], "chunks": [1 << 40, 16, 24, 3]}),
    ],
)
def test_zarr_arrays_that_unpack_to_any_size_are_refused(file: str, changes: Any, tmp_path: Path) -> None:
    described = cameras.write_zarr(tmp_path) / "data" / file
    described.write_text(json.dumps(json.loads(described.read_text()) | changes))
    with pytest.raises(DataError, match=r"twice|GB of memory|missing"):
        read(tmp_path / "demos.zarr")


@pytest.mark.usefixtures("narrow")
def test_parquet_that_repeats_what_it_stores_once_is_refused(tmp_path: Path) -> None:
    path = cameras.write_lerobot(tmp_path)
    file = path / "data/chunk-000/file-001.parquet"
    whole = file.read_bytes()
    many = np.zeros(1 << 22, np.int64)
    names = ("action", "frame_index", "episode_index", "timestamp", "observation.state")
    pq.write_table(pa.table(dict.fromkeys(names, many)), file)
    assert file.stat().st_size < 1 << 17
    with pytest.raises(DataError, match=r"file-001\.parquet.* GB of memory"):
        read(path)
    file.write_bytes(whole)
    episodes = path / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(episodes)
    large = pa.table({name: pa.repeat(table[name][0], 200) for name in table.column_names})
    pq.write_table(large.append_column("tasks", pa.array([["a" * (1 << 16)]] * 200)), episodes)
    assert episodes.stat().st_size < 1 << 18
    with pytest.raises(DataError, match=r"file-000\.parquet.* GB of memory"):
        read(path)


@pytest.mark.parametrize(
    "template",
    [
        "{episode_index.__class__.__mro__}", "{episode_index!r}", "{episode_index:>999999999999}", "{video_key}",
        "{episode_index:999d}", "{{episode_index}}", "{", "data/{episode_index}/../../../etc", "/{episode_index}",
    ],
)  # fmt: skip
def test_a_template_of_names_does_nothing_but_name_files(template: str, tmp_path: Path) -> None:
    path = lerobot_v2(tmp_path)
    info = json.loads((path / "meta/info.json").read_text())
    (path / "meta/info.json").write_text(json.dumps({**info, "data_path": template}))
    with pytest.raises(DataError, match="data_path"):
        read(path)


def test_a_camera_whose_name_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    path = cameras.write_lerobot(tmp_path)
    text = (path / "meta/info.json").read_text()
    (path / "meta/info.json").write_text(text.replace("observation.images.front", "../../../front"))
    with pytest.raises(DataError):
        read(path)


def test_images_of_other_kinds_or_of_huge_size_are_refused(tmp_path: Path) -> None:
    path = cameras.write_lerobot(tmp_path)
    file, rows = path / "data/chunk-000/file-001.parquet", np.arange(ENDS[1], STEPS)
    large, script = io.BytesIO(), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
    Image.new("1", (1 << 13, 1 << 12)).save(large, format="png")
    for image, word in ((large.getvalue(), "pixels"), (script, "identify")):
        images = pa.array([{"bytes": image, "path": None}] * len(rows))
        pq.write_table(frame_table(rows, **{"observation.images.wrist": images}), file)
        with pytest.raises(DataError, match=word):
            read(path).frames("image.wrist")[:]


def test_a_video_of_huge_frames_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cameras.write_lerobot(tmp_path)
    monkeypatch.setattr(lerobot, "_MAX_PIXELS", 32 * 48 - 1)
    with pytest.raises(DataError, match=r"\.mp4"):
        read(path).frames("image.front")[:]


def test_hdf5_is_read_from_the_file_itself_only(tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(ACTION.tobytes())
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["actions"] = ACTION[12:]

    def virtual(demo: h5py.Group) -> None:
        layout = h5py.VirtualLayout((5, 2), "f4")
        layout[:] = h5py.VirtualSource(tmp_path / "other.hdf5", "actions", (8, 2))[:5]
        demo.create_virtual_dataset("actions", layout)

    def twice(demo: h5py.Group) -> None:
        kind, shape = h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((5, 2))
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_chunk((5, 2))
        layout.set_deflate(9)
        layout.set_deflate(9)
        h5py.h5d.create(demo.id, b"actions", kind, shape, layout)

    outside = [(str(tmp_path / "secret.bin"), 0, h5py.h5f.UNLIMITED)]
    edits: list[tuple[Callable[[h5py.Group], object], str]] = [
        (lambda demo: demo.__setitem__("actions", h5py.ExternalLink(tmp_path / "other.hdf5", "actions")), "link"),
        (lambda demo: demo.__setitem__("actions", h5py.SoftLink("/data/demo_0/actions")), "link"),
        (lambda demo: demo.create_dataset("actions", (5, 2), "f4", external=outside), "other files"),
        (virtual, "other files"),
        (twice, "twice"),
        (lambda demo: demo.create_dataset("actions", (1 << 36, 2), "f4", chunks=(1 << 10, 2)), "GB of memory"),
        (
            lambda demo: demo.create_dataset(
                "obs/far", (5, 1 << 12, 1 << 18, 3), "u1", chunks=(1, 1 << 12, 1 << 18, 3)
            ),
            "GB",
        ),
    ]
    for edit, message in edits:
        path = cameras.write_robomimic(tmp_path)
        with h5py.File(path, "a") as file:
            del file["data/demo_2/actions"]
            edit(file["data/demo_2"])
        with pytest.raises(DataError, match=message):
            read(path)


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
    parts = [
        Episodes({"image": frames, "state": STATE}, ACTION, ENDS),
        Episodes({"image": WRIST[:5], "state": STATE[:5]}, ACTION[:5], np.array([5])),
    ]
    both = concatenate(parts)
    assert source.read == []
    np.testing.assert_array_equal(half[[3, 1, 3]], WRIST[[6, 2, 6], :8, :8])
    np.testing.assert_array_equal(both.frames("image")[[STEPS + 4, 3]], WRIST[[4, 3]])
    assert source.read == [2, 6, 3]
    with pytest.raises(DataError, match="some of these demonstrations have a image and some do not"):
        concatenate([parts[0], parts[1].only("state")])
    small = Episodes({"image": WRIST[:5, :8, :8], "state": STATE[:5]}, ACTION[:5], np.array([5]))
    with pytest.raises(DataError, match=r"camera frames of \(8, 8, 3\) and of \(16, 24, 3\) cannot be joined"):
        concatenate([parts[0], small])
    for shape, sentence in (((STEPS, 16, 25, 3), r"where \(16, 25, 3\) was announced"), ((9, 9), "height, width, 3")):
        with pytest.raises(DataError, match=sentence):
            Frames(shape, source)[0]


def test_a_copy_is_made_once_in_blocks_and_only_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames_module, "_BLOCK_BYTES", 3 * WRIST[0].nbytes)
    source, told = Counted(), list[int]()
    file = tmp_path / "run" / "frames" / "image.npy"
    copy = copied(Frames(WRIST.shape, source), file, told.append)
    assert told == [*range(3, STEPS, 3), STEPS] and source.read == list(range(STEPS))
    np.testing.assert_array_equal(copy[ORDER], WRIST[ORDER])
    repeat = copied(Frames(WRIST.shape, source), file)
    np.testing.assert_array_equal(repeat[ORDER], WRIST[ORDER])
    assert len(source.read) == STEPS
    replacement = copied(as_frames(WRIST[:4]), file)  # of other data
    np.testing.assert_array_equal(replacement[:], WRIST[:4])
    assert [path.name for path in file.parent.iterdir()] == ["image.npy"]
    huge = Frames((1 << 40, 480, 640, 3), Counted(), np.arange(3))
    huge.shape = (1 << 40, 480, 640, 3)
    with pytest.raises(ConfigError, match="give them a smaller size"):
        copied(huge, tmp_path / "image.npy")
    assert not (tmp_path / "image.npy").exists()
