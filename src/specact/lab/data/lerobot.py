"""LeRobot datasets: parquet files, videos and ``meta/info.json``; layouts v2.0, v2.1 (a file per episode) and v3.0."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError, MissingExtraError
from specact.lab.data import npz
from specact.lab.data.episodes import Observed
from specact.lab.data.lerobot_frames import Films, stored_images
from specact.lab.data.sources import Recording
from specact.observation import lerobot_name

SUPPORTED = ("v2.0", "v2.1", "v3.0")
STATE, ACTION, EPISODE, FRAME, TIME = "observation.state", "action", "episode_index", "frame_index", "timestamp"
# Ours: whether something else was done at this step than the action says, see Episodes.followed.
DISTURBED = "disturbed"
PREFIX = "observation."
Kind = Literal["numbers", "image", "other"]


def read_lerobot(path: Path) -> Recording:
    """Read ``observation.*`` and ``action``, ordered by episode and frame; the rate is the dataset's ``fps``.

    ``observation.X`` is known as ``X``, a camera ``observation.images.front`` as ``image.front``. Camera frames stay on
    disk, whether they are images in the parquet files or videos. The text of an episode's task is its instruction,
    where each has exactly one.

    Raises:
        DataError: for other versions, damaged or missing files, and counts that contradict the metadata.
        MissingExtraError: if pyarrow is not installed.
    """
    info = _json("meta/info.json", (path / "meta/info.json"))
    version = info.get("codebase_version")
    if version not in SUPPORTED:
        raise DataError(
            f"this is a LeRobot dataset of version {version!r}; supported: {', '.join(SUPPORTED)}. "
            f"Convert it with LeRobot's own scripts"
        )
    features = info.get("features")
    features = features if isinstance(features, dict) else {}
    videos = {key: each for key, each in features.items() if isinstance(each, dict) and each.get("dtype") == "video"}
    listed = _packed if version == "v3.0" else _file_per_episode
    lengths, files, video_files, tasks = listed(path, info, videos)
    declared = info.get("total_episodes", len(lengths))
    if len(lengths) == 0 or declared != len(lengths):
        raise DataError(
            f"meta/info.json declares {declared} episodes, but {len(lengths)} are listed under meta/; "
            f"copy the dataset again"
        )
    index = [_columns(path, name, (EPISODE, FRAME, ACTION)) for name in files]
    episode, frame, action = (_join(name, [table[name] for table in index]) for name in (EPISODE, FRAME, ACTION))
    order = _order(episode[:, 0], frame[:, 0], lengths)
    schema = _schema(path, files[0])
    kinds = {field.name: _kind(field.type) for field in schema if field.name.startswith(PREFIX)}
    # What is neither numbers nor frames, such as text, is left alone.
    columns = [key for key, kind in kinds.items() if kind != "other"]
    keys = [*columns, *(key for key in videos if key.startswith(PREFIX) and key not in columns)]
    if not keys:
        _columns(path, files[0], (STATE,))
        raise DataError(f"{STATE} in {files[0]} is not made of numbers")
    rows = np.concatenate([np.arange(len(table[FRAME])) for table in index])[order]
    file_of = np.repeat(np.arange(len(files)), [len(table[FRAME]) for table in index])[order]

    def load(key: str) -> Observed:
        if key not in columns:
            time = _join(TIME, [_columns(path, name, (TIME,))[TIME] for name in files])[order, 0]
            return video_files[key].frames(path, episode[order, 0], time, videos[key], info.get("fps"))
        if kinds[key] == "image":
            return stored_images(path, key, files, file_of, rows)
        found = _join(key, [_columns(path, name, (key,))[key] for name in files])
        return npz.matrix("observations", found[order])

    fps, disturbed = info.get("fps"), None
    if DISTURBED in schema.names:
        found = _join(DISTURBED, [_columns(path, name, (DISTURBED,))[DISTURBED] for name in files])
        disturbed = found[order, 0].astype(np.bool_)
    tasks_of_episodes = [tasks.get(episode) for episode in sorted(lengths)]
    texts = tuple(
        each[0] for each in tasks_of_episodes if isinstance(each, list) and len(each) == 1 and isinstance(each[0], str)
    )
    return Recording(
        names={lerobot_name(key): key for key in keys},
        keys=tuple(keys),
        load=load,
        action=npz.matrix("actions", action[order]),
        ends=np.cumsum([lengths[episode] for episode in sorted(lengths)]).astype(np.int64),
        rate_hz=None if fps is None else npz.positive_rate(fps),
        instructions=texts if len(texts) == len(tasks_of_episodes) else None,
        disturbed=disturbed,
    )


def _schema(path: Path, name: str) -> Any:
    with _parquet(path, name) as file:
        return file.schema_arrow


def _kind(column: Any) -> Kind:
    """What a column of this type holds."""
    import pyarrow as pa

    if pa.types.is_struct(column) and column.get_field_index("bytes") >= 0:
        return "image"
    if pa.types.is_list(column) or pa.types.is_large_list(column) or pa.types.is_fixed_size_list(column):
        column = column.value_type
    plain = pa.types.is_integer(column) or pa.types.is_floating(column) or pa.types.is_boolean(column)
    return "numbers" if plain else "other"


# Length of each episode, the data files that hold them, where in which video they are, and the texts of their tasks.
Listed = tuple[dict[int, int], list[str], dict[str, Films], dict[int, Any]]


def _file_per_episode(path: Path, info: dict[str, Any], videos: Collection[str]) -> Listed:
    """What the metadata of v2.x list."""
    name = "meta/episodes.jsonl"
    lines = [_parse(name, line) for line in _text(name, path / name).splitlines() if line.strip()]
    lengths = _lengths(name, [line.get(EPISODE) for line in lines], [line.get("length") for line in lines])
    chunk = info.get("chunks_size", 1000)
    if not isinstance(chunk, int) or chunk < 1:
        raise DataError(f"chunks_size in meta/info.json is {chunk!r}; a positive integer is needed")

    def named(what: str, default: str, episode: int, **values: str) -> str:
        return _name(what, info.get(what, default), episode_chunk=episode // chunk, episode_index=episode, **values)

    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    films = {
        key: Films({e: (named("video_path", video, e, video_key=key), 0.0) for e in sorted(lengths)}) for key in videos
    }
    tasks = {line[EPISODE]: line.get("tasks") for line in lines}
    return lengths, [named("data_path", data, e) for e in sorted(lengths)], films, tasks


def _packed(path: Path, info: dict[str, Any], videos: Collection[str]) -> Listed:
    """What the metadata of v3.0 list."""
    filmed = ("chunk_index", "file_index", "from_timestamp")
    wanted = (
        EPISODE, "length", "data/chunk_index", "data/file_index",
        *(f"videos/{key}/{part}" for key in videos for part in filmed),
    )  # fmt: skip
    names = sorted(file.relative_to(path).as_posix() for file in path.glob("meta/episodes/*/*.parquet"))
    tables = [_columns(path, name, wanted) for name in names]
    if not tables:
        raise DataError("there is no meta/episodes/chunk-*/file-*.parquet; copy the dataset again")
    column = {name: _join(name, [table[name] for table in tables])[:, 0].tolist() for name in wanted}

    def named(what: str, default: str, chunk: int, file: int, **values: str) -> str:
        return _name(what, info.get(what, default), chunk_index=chunk, file_index=file, **values)

    data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    files = sorted(set(zip(column["data/chunk_index"], column["data/file_index"], strict=True)))
    lengths = _lengths("meta/episodes", column[EPISODE], column["length"])
    films = {}
    for key in videos:
        places = zip(column[EPISODE], *(column[f"videos/{key}/{part}"] for part in filmed), strict=True)
        films[key] = Films(
            {episode: (named("video_path", video, c, f, video_key=key), start) for episode, c, f, start in places}
        )
    tasks: dict[int, Any] = {}
    for name, table in zip(names, tables, strict=True):
        with _parquet(path, name) as file:
            if "tasks" in file.schema_arrow.names:
                texts = file.read(columns=["tasks"]).column("tasks").to_pylist()
                tasks |= dict(zip(table[EPISODE][:, 0].tolist(), texts, strict=True))
    return lengths, [named("data_path", data, c, f) for c, f in files], films, tasks


def _lengths(name: str, index: list[Any], length: list[Any]) -> dict[int, int]:
    bad = [value for value in [*index, *length] if not isinstance(value, int) or value < 0]
    if bad or len(set(index)) != len(index):
        raise DataError(
            f"{name}: episode_index and length must be non-negative integers, each episode listed once; "
            f"found {bad[0] if bad else 'an episode twice'!r}"
        )
    return dict(zip(index, length, strict=True))


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


def _name(what: str, template: Any, **values: int | str) -> str:
    try:
        name = str(template).format(**values)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{what} {template!r} in meta/info.json cannot be filled in ({error})") from error
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"{what} {template!r} in meta/info.json points outside the dataset")
    return name


def _columns(path: Path, name: str, wanted: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Columns of a parquet file, ``[rows, width]`` each."""
    with _parquet(path, name) as file:
        missing = [column for column in wanted if column not in file.schema_arrow.names]
        if missing:
            raise DataError(f"{name} has no column {missing[0]!r}; found: {', '.join(file.schema_arrow.names)}")
        table = file.read(columns=list(wanted))
        return {column: _array(f"{column} in {name}", table.column(column)) for column in wanted}


@contextmanager
def _parquet(path: Path, name: str) -> Iterator[Any]:
    """A parquet file, opened; what is damaged in it is told."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "train") from error
    try:
        with pq.ParquetFile(path / name) as file:
            yield file
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, UnicodeDecodeError) as error:
        raise DataError(f"{name} is damaged or missing ({error}); copy the dataset again") from error


def _array(name: str, column: Any) -> NDArray[Any]:
    """A column of numbers or of equally long lists, ``[rows, width]``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.null_count:
        raise DataError(f"{name} is empty in {column.null_count} of {len(column)} rows")
    kind, width = column.type, 1
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        widths = np.unique(pc.list_value_length(column).to_numpy())
        if len(widths) > 1:
            raise DataError(f"{name} has between {widths[0]} and {widths[-1]} numbers in a row; all must be equal")
        width = int(widths[0]) if len(widths) else 0
        if len(column) and not width:
            raise DataError(f"{name} has no numbers in any row; each row needs at least one")
        kind, column = kind.value_type, pc.list_flatten(column)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(f"{name} has the type {kind}; numbers, or flat lists of them, are needed")
    return np.asarray(column.to_numpy()).reshape(-1, width) if width else np.zeros((0, 0))


def _join(name: str, parts: list[NDArray[Any]]) -> NDArray[Any]:
    parts = [part for part in parts if len(part)] or parts[:1]
    widths = sorted({part.shape[1] for part in parts})
    if len(widths) > 1:
        raise DataError(f"{name} has {widths[0]} numbers in one file and {widths[-1]} in another; all must be equal")
    return np.concatenate(parts)


def _json(name: str, path: Path) -> dict[str, Any]:
    return _parse(name, _text(name, path))


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not valid JSON ({error}); copy the dataset again") from error
    if not isinstance(value, dict):
        raise DataError(f"{name} holds {type(value).__name__} where an object is needed")
    return value


def _text(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{name} cannot be read ({error}); copy the dataset again") from error
