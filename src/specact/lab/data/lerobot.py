"""LeRobot datasets: parquet files, videos and ``meta/info.json``; layouts v2.0, v2.1 (a file per episode) and v3.0."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.lab.data.episodes import Observed, joined
from specact.lab.data.frames import Frames, Images, join_frames, reading
from specact.lab.data.readers import Recording, check_size, matrix, positive_rate
from specact.observation import lerobot_name
from specact.records import Count, WholeNumber, read_json

SUPPORTED = ("v2.0", "v2.1", "v3.0")
STATE, ACTION, EPISODE, FRAME, TIME = "observation.state", "action", "episode_index", "frame_index", "timestamp"
# Ours: whether something else was done at this step than the action says, see Episodes.followed.
DISTURBED = "disturbed"
PREFIX = "observation."
# A frame is the wanted one if its time differs by less than this share of a frame's period.
_TOLERANCE = 0.4
# Further ahead than this, a video is searched for its next key frame instead of decoded up to there [s].
_SEEK_S = 2.0
# Default names of files, of v2.x and of v3.0.
_DATA = (
    "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
)
_VIDEO = (
    "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
)
_FIELD = re.compile(r"\{(\w+)(?::0?(\d)d)?\}")
# Pixels of a camera frame, and rows that are read at once of columns whose entries can be of any size.
_MAX_PIXELS, _ROWS = 1 << 24, 64
_FORMATS = ("PNG", "JPEG", "WEBP")
Kind = Literal["numbers", "image", "other"]
Template = Literal["data_path", "video_path"]
Film = tuple[Path, float]  # the video that an episode is in, and its begin in it [s]


class _Info(msgspec.Struct, frozen=True):
    """What is used of ``meta/info.json``."""

    codebase_version: str | None = None
    total_episodes: WholeNumber | None = None
    chunks_size: Count = 1000
    fps: float | None = None
    data_path: str | None = None
    video_path: str | None = None
    features: dict[str, Any] = {}

    def file(self, what: Template, default: str, **values: int | str) -> str:
        """The name of a file of the dataset.

        Raises:
            DataError: if its template cannot be filled in, or the file lies outside the dataset.
        """
        template = getattr(self, what) or default
        # Not str.format, which reads attributes and makes texts of any length.
        unknown = {field for field, _ in _FIELD.findall(template)} - values.keys()
        if unknown or set("{}") & set(_FIELD.sub("", template)):
            raise DataError(
                f"{what} {template!r:.200} in meta/info.json cannot be filled in; it may have "
                f"{{NAME}} and {{NAME:03d}}, for {', '.join(values)}"
            )
        name = _FIELD.sub(lambda field: str(values[field[1]]).zfill(int(field[2] or 0)), template)
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{what} {template!r} in meta/info.json points outside the dataset")
        return name


class _Episode(NamedTuple):
    """What the metadata say of an episode; ``films`` by camera."""

    number: int
    length: int
    data: str
    films: dict[str, Film]
    tasks: Any


def read_lerobot(path: Path) -> Recording:
    """Read ``observation.*`` and ``action``, ordered by episode and frame; the rate is the dataset's ``fps``.

    ``observation.X`` is known as ``X``, a camera ``observation.images.front`` as ``image.front``. Camera frames stay on
    disk, whether they are images in the parquet files or videos. The text of an episode's task is its instruction,
    where each has exactly one.

    Raises:
        DataError: for other versions, damaged or missing files, and counts that contradict the metadata.
    """
    info = read_json(_text(path, "meta/info.json"), _Info, "meta/info.json", DataError)
    if info.codebase_version not in SUPPORTED:
        raise DataError(
            f"this is a LeRobot dataset of version {info.codebase_version!r}; supported: {', '.join(SUPPORTED)}. "
            f"Convert it with LeRobot's own scripts"
        )
    features = {key: feature for key, feature in info.features.items() if isinstance(feature, dict)}
    filmed = [key for key, feature in features.items() if feature.get("dtype") == "video"]
    episodes = _listed(path, info, filmed)
    declared = len(episodes) if info.total_episodes is None else info.total_episodes
    if not episodes or declared != len(episodes):
        raise DataError(
            f"meta/info.json declares {declared} episodes, but {len(episodes)} are listed under meta/; "
            f"copy the dataset again"
        )
    files = list(dict.fromkeys(episode.data for episode in episodes))
    with _parquet(path, files[0]) as file:
        schema = file.schema_arrow
    optional = [name for name in (DISTURBED, TIME) if name in schema.names]
    table, sizes = _columns(path, files, (EPISODE, FRAME, ACTION, *optional))
    order = _order(table[EPISODE][:, 0], table[FRAME][:, 0], {item.number: item.length for item in episodes})
    kinds = {field.name: _kind(field.type) for field in schema if field.name.startswith(PREFIX)}
    # What is neither numbers nor frames, such as text, is left alone.
    columns = [key for key, kind in kinds.items() if kind != "other"]
    keys = [*columns, *(key for key in filmed if key.startswith(PREFIX) and key not in columns)]
    if not keys:
        _columns(path, files[:1], (STATE,))
        raise DataError(f"{STATE} in {files[0]} is not made of numbers")
    ends = np.cumsum([episode.length for episode in episodes]).astype(np.int64)

    def load(key: str) -> Observed:
        if key not in columns:
            if TIME not in table:
                raise DataError(f"the dataset does not say when the frames of {key!r} are; copy it again")
            times = np.split(table[TIME][order, 0].astype(np.float64), ends[:-1])
            return _videos([episode.films[key] for episode in episodes], times, features[key].get("shape"), info.fps)
        if kinds[key] == "image":
            return _stored_images(path, key, dict(zip(files, sizes, strict=True))).select(order)
        return matrix("observations", _columns(path, files, (key,))[0][key][order])

    alone = [item.tasks[0] for item in episodes if isinstance(item.tasks, list) and len(item.tasks) == 1]
    texts = tuple(text for text in alone if isinstance(text, str))
    return Recording(
        names={lerobot_name(key): key for key in keys},
        keys=tuple(keys),
        load=load,
        action=matrix("actions", table[ACTION][order]),
        ends=ends,
        rate_hz=None if info.fps is None else positive_rate(info.fps),
        instructions=texts if len(texts) == len(episodes) else None,
        disturbed=table[DISTURBED][order, 0].astype(np.bool_) if DISTURBED in table else None,
    )


def _kind(column: Any) -> Kind:
    """What a column of this type holds."""
    from pyarrow import types

    if types.is_struct(column) and column.get_field_index("bytes") >= 0:
        return "image"
    return "numbers" if _is_number(column.value_type if _is_list(column) else column) else "other"


def _is_list(column: Any) -> bool:
    from pyarrow import types

    return any(check(column) for check in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def _is_number(column: Any) -> bool:
    from pyarrow import types

    return any(check(column) for check in (types.is_integer, types.is_floating, types.is_boolean))


def _listed(path: Path, info: _Info, filmed: Sequence[str]) -> list[_Episode]:
    """The episodes by number: a line of the metadata for each in v2.x, a row in v3.0."""
    packed = info.codebase_version == "v3.0"

    def place(row: dict[str, Any], what: str) -> dict[str, int]:
        if packed:
            return {name: int(row[f"{what}/{name}"]) for name in ("chunk_index", "file_index")}
        return {"episode_chunk": row[EPISODE] // info.chunks_size, "episode_index": row[EPISODE]}

    def film(row: dict[str, Any], key: str) -> Film:
        name = info.file("video_path", _VIDEO[packed], video_key=key, **place(row, f"videos/{key}"))
        return path / name, float(row[f"videos/{key}/from_timestamp"]) if packed else 0.0

    with reading("meta/episodes", "copy the dataset again"):
        rows: list[dict[str, Any]] = []
        if not packed:
            rows = [json.loads(text) for text in _text(path, "meta/episodes.jsonl").splitlines() if text.strip()]
        for file in sorted(path.glob("meta/episodes/*/*.parquet")) if packed else ():
            with _parquet(path, file.relative_to(path).as_posix()) as table:
                columns = [name for name in table.schema_arrow.names if not name.startswith("stats/")]
                rows += _read(table, file, columns, _ROWS).to_pylist()
        pairs = [(row[EPISODE], row["length"]) for row in rows]
        if len(dict(pairs)) != len(rows) or any(not isinstance(n, int) or n < 0 for pair in pairs for n in pair):
            raise DataError(
                "meta/episodes: episode_index and length must be non-negative integers, each episode listed once; "
                f"found {pairs[:5]}"
            )
        return [
            _Episode(
                number=row[EPISODE],
                length=row["length"],
                data=info.file("data_path", _DATA[packed], **place(row, "data")),
                films={key: film(row, key) for key in filmed},
                tasks=row.get("tasks"),
            )
            for row in sorted(rows, key=lambda row: int(row[EPISODE]))
        ]


def _order(episode: NDArray[Any], frame: NDArray[Any], lengths: dict[int, int]) -> NDArray[np.int64]:
    """Rows by episode and frame, after a check that exactly the announced frames are there."""
    present, counts = np.unique(episode, return_counts=True)
    sizes = dict(zip(present.tolist(), counts.tolist(), strict=True))
    for number in sorted(set(lengths) | set(sizes)):
        if lengths.get(number, 0) != sizes.get(number, 0):
            raise DataError(
                f"episode {number} has {sizes.get(number, 0)} frames in the data and "
                f"{lengths.get(number, 0)} in the metadata; copy the dataset again"
            )
    order = np.lexsort((frame, episode))
    expected = np.concatenate([np.arange(lengths[number]) for number in sorted(lengths)])
    wrong = np.flatnonzero(frame[order] != expected)
    if wrong.size:
        at = order[wrong[0]]
        raise DataError(
            f"episode {episode[at]} has frame_index {frame[at]} where {expected[wrong[0]]} is expected: "
            f"frames must count 0, 1, 2 ... without gaps"
        )
    return order


def _columns(path: Path, names: Sequence[str], wanted: Sequence[str]) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """Columns of parquet files one after the other, ``[rows, width]`` each, and each file's number of rows."""
    parts: dict[str, dict[str, NDArray[Any]]] = {column: {} for column in wanted}
    for name in names:
        with _parquet(path, name) as file:
            missing = [column for column in wanted if column not in file.schema_arrow.names]
            if missing:
                raise DataError(f"{name} has no column {missing[0]!r}; found: {', '.join(file.schema_arrow.names)}")
            table = _read(file, path / name, wanted)
            for column in wanted:
                parts[column][name] = _array(f"{column} in {name}", table.column(column))
    # Of an empty file the width is not known.
    full = [name for name, part in parts[wanted[0]].items() if len(part)] or [names[0]]
    sizes = [len(part) for part in parts[wanted[0]].values()]
    return {column: joined(column, {name: files[name] for name in full}) for column, files in parts.items()}, sizes


@contextmanager
def _parquet(path: Path, name: str) -> Iterator[Any]:
    from pyarrow import parquet

    with reading(name, "copy the dataset again"), parquet.ParquetFile(path / name) as file:
        yield file


def _read(file: Any, place: Path, columns: Sequence[str], rows: int = 1 << 12) -> Any:
    """Columns of a parquet file as a table, of which so many rows are unpacked at once.

    Raises:
        DataError: if they are far larger than the file: an entry that is stored once can be there any number of times.
    """
    import pyarrow as pa

    stored, what, size, batches = place.stat().st_size, f"{', '.join(columns)} in {place.name}", 0, []
    groups, number = range(file.num_row_groups), range(file.metadata.num_columns)
    declared = sum(file.metadata.row_group(group).column(column).num_values for group in groups for column in number)
    check_size(what, 8 * declared, stored)
    for batch in file.iter_batches(rows, columns=list(columns)):
        size += batch.nbytes
        check_size(what, size, stored)
        batches.append(batch)
    return pa.Table.from_batches(batches) if batches else file.read(columns=list(columns))


def _array(name: str, column: Any) -> NDArray[Any]:
    """A column of numbers or of equally long lists, ``[rows, width]``."""
    from pyarrow import compute

    if column.null_count:
        raise DataError(f"{name} is empty in {column.null_count} of {len(column)} rows")
    kind, width = column.type, 1
    if _is_list(kind):
        widths = np.unique(compute.list_value_length(column).to_numpy())
        if len(widths) > 1:
            raise DataError(f"{name} has between {widths[0]} and {widths[-1]} numbers in a row; all must be equal")
        width = int(widths[0]) if len(widths) else 0
        if len(column) and not width:
            raise DataError(f"{name} has no numbers in any row; each row needs at least one")
        kind, column = kind.value_type, compute.list_flatten(column)
    if not _is_number(kind):
        raise DataError(f"{name} has the type {kind}; numbers, or flat lists of them, are needed")
    return np.asarray(column.to_numpy()).reshape(-1, width) if width else np.zeros((0, 0))


def _text(path: Path, name: str) -> str:
    with reading(name, "copy the dataset again"):
        return (path / name).read_text(encoding="utf-8")


def _stored_images(path: Path, key: str, files: Mapping[str, int]) -> Frames:
    """Frames that are stored as encoded images, structs in a column of the parquet files, with each one's rows."""
    readers = {name: partial(_image_column, path, name, key) for name in files}
    first = next(name for name, rows in files.items() if rows)
    shape = readers[first](np.zeros(1, np.int64)).shape[1:]
    return join_frames([Frames((rows, *shape), readers[name]) for name, rows in files.items()])


def _image_column(path: Path, name: str, key: str, rows: NDArray[np.int64]) -> Images:
    """Images of a file; only groups of rows that hold one of them are read."""
    from pyarrow import parquet

    images: list[Images] = []
    with reading(f"{path}: {key} in {name}"), parquet.ParquetFile(path / name) as file:
        ends = np.cumsum([file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)])
        groups = np.unique(np.searchsorted(ends, rows, side="right"))
        start = 0
        for group, end in enumerate(ends.tolist()):
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[key]) if group in groups else ():
                encoded = batch.column(0).field("bytes")
                places = rows[(rows >= start) & (rows < start + len(batch))] - start
                images += [_decoded(encoded[row].as_py(), f"{key} in {name}") for row in places.tolist()]
                start += len(batch)
            start = end
    return np.stack(images)


def _decoded(encoded: bytes | None, what: str) -> Images:
    """An image file's pixels, uint8 ``[H, W, 3]``."""
    from PIL import Image

    if not encoded:
        raise DataError(f"{what} holds no image, only the name of a file; store the images within the parquet files")
    # No other formats: Pillow has a PostScript interpreter read one of them.
    with reading(f"{what}: an image", "record it again"), Image.open(io.BytesIO(encoded), formats=_FORMATS) as image:
        if image.width * image.height > _MAX_PIXELS:
            raise DataError(f"{what}: an image has {image.width} x {image.height} pixels, of at most {_MAX_PIXELS}")
        return np.asarray(image.convert("RGB"))


def _videos(films: Sequence[Film], times: Sequence[NDArray[Any]], shape: Any, fps: float | None) -> Frames:
    """A camera's frames in the episodes' videos, at the times since their begins [s].

    Nothing is decoded where ``shape``, in ``meta/info.json``, is ``[H, W, 3]`` or ``[3, H, W]``.
    """
    if not fps:
        raise DataError("meta/info.json does not say how many frames a second has; copy the dataset again")
    readers = [partial(_filmed, file, start + at, 1.0 / fps) for (file, start), at in zip(films, times, strict=True)]
    match shape:
        case [int(height), int(width), 3] | [3, int(height), int(width)] if height > 0 < width:
            size: tuple[int, ...] = (height, width, 3)
        case _:
            size = readers[0](np.zeros(1, np.int64)).shape[1:]
    return join_frames([Frames((len(at), *size), reader) for at, reader in zip(times, readers, strict=True)])


def _filmed(file: Path, times: NDArray[np.float64], period: float, rows: NDArray[np.int64]) -> Images:
    """Frames of an episode: of its video, at their ascending times in it, with this period between two [s]."""
    video = _video(file)
    with reading(str(file), "copy the dataset again"):
        return np.stack([video.at(time, period) for time in times[rows].tolist()])


class _Video:
    """One video, read forwards from where it is or from the key frame before the wanted time."""

    def __init__(self, file: Path) -> None:
        import av

        self._file = file
        with reading(str(file), "copy the dataset again"):
            # Nothing but MP4, which LeRobot writes: a playlist could name any other file.
            self._container = av.open(str(file), format="mp4")
            self._stream = self._container.streams.video[0]
            self._stream.thread_type = "NONE"
            self._stream.codec_context.options = {"max_pixels": str(_MAX_PIXELS)}
        self._coming: Iterator[Any] = iter(())
        self._last: Any = None

    def at(self, time: float, period: float) -> Images:
        """The frame at this time [s], uint8 ``[H, W, 3]``; a DataError if there is none within a part of a period."""
        allowed = _TOLERANCE * period
        now = math.nan if self._last is None else self._last.time
        if not now - allowed <= time <= now + _SEEK_S:
            before = max(0, int((time - allowed) / (self._stream.time_base or 1)))
            self._container.seek(before, stream=self._stream)
            self._coming, self._last = self._container.decode(self._stream), None
        while self._last is None or self._last.time < time - allowed:
            self._last = next(self._coming, None)
            if self._last is None:
                raise DataError(f"{self._file} ends before {time:.3f} s, where a frame should be; copy it again")
        if abs(self._last.time - time) > allowed:
            raise DataError(
                f"{self._file} has no frame at {time:.3f} s, the next one is at {self._last.time:.3f} s; the "
                "timestamps are not those of this video"
            )
        return np.asarray(self._last.to_ndarray(format="rgb24"), dtype=np.uint8)


# The last one stays open, so that reading on needs no search.
_video = lru_cache(maxsize=1)(_Video)
