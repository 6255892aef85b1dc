"""LeRobot datasets: parquet files, videos and ``meta/info.json``; layouts v2.0, v2.1 (a file per episode) and v3.0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.lab.data import npz
from specact.lab.data.decoding import reading
from specact.lab.data.episodes import Observed
from specact.lab.data.lerobot_frames import Film, stored_images, videos
from specact.lab.data.sources import Recording
from specact.observation import lerobot_name
from specact.records import Count, WholeNumber, read_json

SUPPORTED = ("v2.0", "v2.1", "v3.0")
STATE, ACTION, EPISODE, FRAME, TIME = "observation.state", "action", "episode_index", "frame_index", "timestamp"
# Ours: whether something else was done at this step than the action says, see Episodes.followed.
DISTURBED = "disturbed"
PREFIX = "observation."
Kind = Literal["numbers", "image", "other"]
Template = Literal["data_path", "video_path"]


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
        try:
            name: str = template.format(**values)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{what} {template!r} in meta/info.json cannot be filled in ({error})") from error
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{what} {template!r} in meta/info.json points outside the dataset")
        return name


class _Listed(NamedTuple):
    """What the metadata list: lengths, places in videos by camera, and texts of tasks by episode; the data's files."""

    lengths: dict[int, int]
    films: dict[str, dict[int, Film]]
    tasks: dict[int, Any]
    files: list[str]


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
    features = {key: each for key, each in info.features.items() if isinstance(each, dict)}
    filmed = [key for key, each in features.items() if each.get("dtype") == "video"]
    listed = (_packed if info.codebase_version == "v3.0" else _file_per_episode)(path, info, filmed)
    lengths, films, tasks, files = listed
    declared = len(lengths) if info.total_episodes is None else info.total_episodes
    if not lengths or declared != len(lengths):
        raise DataError(
            f"meta/info.json declares {declared} episodes, but {len(lengths)} are listed under meta/; "
            f"copy the dataset again"
        )
    with _parquet(path, files[0]) as file:
        schema = file.schema_arrow
    optional = [name for name in (DISTURBED, TIME) if name in schema.names]
    table, sizes = _columns(path, files, (EPISODE, FRAME, ACTION, *optional))
    order = _order(table[EPISODE][:, 0], table[FRAME][:, 0], lengths)
    kinds = {field.name: _kind(field.type) for field in schema if field.name.startswith(PREFIX)}
    # What is neither numbers nor frames, such as text, is left alone.
    columns = [key for key, kind in kinds.items() if kind != "other"]
    keys = [*columns, *(key for key in filmed if key.startswith(PREFIX) and key not in columns)]
    if not keys:
        _columns(path, files[:1], (STATE,))
        raise DataError(f"{STATE} in {files[0]} is not made of numbers")
    numbers = sorted(lengths)
    ends = np.cumsum([lengths[episode] for episode in numbers]).astype(np.int64)

    def load(key: str) -> Observed:
        if key not in columns:
            if TIME not in table or not films[key].keys() >= lengths.keys():
                raise DataError(f"the dataset does not say where the frames of {key!r} are; copy it again")
            times = np.split(table[TIME][order, 0].astype(np.float64), ends[:-1])
            shape = features[key].get("shape")
            return videos(path, [films[key][episode] for episode in numbers], times, shape, info.fps)
        if kinds[key] == "image":
            return stored_images(path, key, dict(zip(files, sizes, strict=True))).select(order)
        return npz.matrix("observations", _columns(path, files, (key,))[0][key][order])

    described = [tasks.get(episode) for episode in numbers]
    alone = [each[0] for each in described if isinstance(each, list) and len(each) == 1]
    texts = tuple(text for text in alone if isinstance(text, str))
    return Recording(
        names={lerobot_name(key): key for key in keys},
        keys=tuple(keys),
        load=load,
        action=npz.matrix("actions", table[ACTION][order]),
        ends=ends,
        rate_hz=None if info.fps is None else npz.positive_rate(info.fps),
        instructions=texts if len(texts) == len(described) else None,
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

    return bool(types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column))


def _is_number(column: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(column) or types.is_floating(column) or types.is_boolean(column))


def _file_per_episode(path: Path, info: _Info, filmed: Sequence[str]) -> _Listed:
    """What the metadata of v2.x list."""
    name = "meta/episodes.jsonl"
    texts = filter(str.strip, _text(path, name).splitlines())
    lines = [read_json(text, dict[str, Any], name, DataError) for text in texts]
    lengths = _lengths(name, ((line.get(EPISODE), line.get("length")) for line in lines))

    def file(what: Template, default: str, episode: int, **values: str) -> str:
        chunk = episode // info.chunks_size
        return info.file(what, default, episode_chunk=chunk, episode_index=episode, **values)

    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    films = {key: {e: Film(file("video_path", video, e, video_key=key), 0.0) for e in lengths} for key in filmed}
    tasks = {line[EPISODE]: line.get("tasks") for line in lines}
    return _Listed(lengths, films, tasks, [file("data_path", data, episode) for episode in sorted(lengths)])


def _packed(path: Path, info: _Info, filmed: Sequence[str]) -> _Listed:
    """What the metadata of v3.0 list."""
    place = ("chunk_index", "file_index", "from_timestamp")
    wanted = (
        EPISODE, "length", "data/chunk_index", "data/file_index",
        *(f"videos/{key}/{part}" for key in filmed for part in place),
    )  # fmt: skip
    names = sorted(file.relative_to(path).as_posix() for file in path.glob("meta/episodes/*/*.parquet"))
    if not names:
        raise DataError("there is no meta/episodes/chunk-*/file-*.parquet; copy the dataset again")
    table = {name: column[:, 0].tolist() for name, column in _columns(path, names, wanted)[0].items()}
    episodes = table[EPISODE]
    data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    films = {}
    for key in filmed:
        rows = zip(episodes, *(table[f"videos/{key}/{part}"] for part in place), strict=True)
        films[key] = {
            episode: Film(info.file("video_path", video, chunk_index=c, file_index=f, video_key=key), start)
            for episode, c, f, start in rows
        }
    texts: list[Any] = []
    for name in names:
        with _parquet(path, name) as file:
            if "tasks" in file.schema_arrow.names:
                texts += file.read(columns=["tasks"]).column("tasks").to_pylist()
    places = sorted(set(zip(table["data/chunk_index"], table["data/file_index"], strict=True)))
    lengths = _lengths("meta/episodes", zip(episodes, table["length"], strict=True))
    files = [info.file("data_path", data, chunk_index=c, file_index=f) for c, f in places]
    return _Listed(lengths, films, dict(zip(episodes, texts, strict=False)), files)


def _lengths(name: str, listed: Iterable[tuple[Any, Any]]) -> dict[int, int]:
    pairs = list(listed)
    lengths = dict(pairs)
    if len(lengths) != len(pairs) or any(not isinstance(n, int) or n < 0 for pair in pairs for n in pair):
        raise DataError(
            f"{name}: episode_index and length must be non-negative integers, each episode listed once; found "
            f"{pairs[:5]}"
        )
    return lengths


def _order(episode: NDArray[Any], frame: NDArray[Any], lengths: dict[int, int]) -> NDArray[np.int64]:
    """Rows by episode and frame, after a check that exactly the announced frames are there."""
    present, counts = np.unique(episode, return_counts=True)
    found = dict(zip(present.tolist(), counts.tolist(), strict=True))
    for number in sorted(set(lengths) | set(found)):
        if lengths.get(number, 0) != found.get(number, 0):
            raise DataError(
                f"episode {number} has {found.get(number, 0)} frames in the data and "
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
    parts: dict[str, list[NDArray[Any]]] = {column: [] for column in wanted}
    for name in names:
        with _parquet(path, name) as file:
            missing = [column for column in wanted if column not in file.schema_arrow.names]
            if missing:
                raise DataError(f"{name} has no column {missing[0]!r}; found: {', '.join(file.schema_arrow.names)}")
            table = file.read(columns=list(wanted))
            for column in wanted:
                parts[column].append(_array(f"{column} in {name}", table.column(column)))
    sizes = [len(part) for part in parts[wanted[0]]]
    return {column: _join(column, arrays) for column, arrays in parts.items()}, sizes


@contextmanager
def _parquet(path: Path, name: str) -> Iterator[Any]:
    from pyarrow import parquet

    with reading(name, "copy the dataset again"), parquet.ParquetFile(path / name) as file:
        yield file


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


def _join(name: str, parts: list[NDArray[Any]]) -> NDArray[Any]:
    parts = [part for part in parts if len(part)] or parts[:1]
    widths = sorted({part.shape[1] for part in parts})
    if len(widths) > 1:
        raise DataError(f"{name} has {widths[0]} numbers in one file and {widths[-1]} in another; all must be equal")
    return np.concatenate(parts)


def _text(path: Path, name: str) -> str:
    with reading(name, "copy the dataset again"):
        return (path / name).read_text(encoding="utf-8")
