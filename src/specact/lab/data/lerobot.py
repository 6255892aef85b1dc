"""LeRobot datasets: parquet files and ``meta/info.json``; layouts v2.0, v2.1 (a file per episode) and v3.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError, MissingExtraError
from specact.lab.data import npz
from specact.lab.data.episodes import Episodes

SUPPORTED = ("v2.0", "v2.1", "v3.0")
STATE, ACTION, EPISODE, FRAME = "observation.state", "action", "episode_index", "frame_index"


def read_lerobot(path: Path) -> Episodes:
    """Read ``observation.state`` and ``action``, ordered by episode and frame; the rate is the dataset's ``fps``.

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
    lengths, files = _packed(path, info) if version == "v3.0" else _file_per_episode(path, info)
    announced = info.get("total_episodes", len(lengths))
    if len(lengths) == 0 or announced != len(lengths):
        raise DataError(
            f"meta/info.json declares {announced} episodes, but {len(lengths)} are listed under meta/; "
            f"copy the dataset again"
        )
    wanted = (EPISODE, FRAME, STATE, ACTION)
    tables = [_columns(path, name, wanted) for name in files]
    column = {name: _join(name, [table[name] for table in tables]) for name in wanted}
    order = _order(column[EPISODE][:, 0], column[FRAME][:, 0], lengths)
    fps = info.get("fps")
    return Episodes(
        state=npz.matrix("observations", column[STATE][order]),
        action=npz.matrix("actions", column[ACTION][order]),
        ends=np.cumsum([lengths[episode] for episode in sorted(lengths)]).astype(np.int64),
        rate_hz=None if fps is None else npz.positive_rate(fps),
    )


def _file_per_episode(path: Path, info: dict[str, Any]) -> tuple[dict[int, int], list[str]]:
    """Length of each episode, and the data files, of v2.x."""
    name = "meta/episodes.jsonl"
    lines = [_parse(name, line) for line in _text(name, path / name).splitlines() if line.strip()]
    lengths = _lengths(name, [line.get(EPISODE) for line in lines], [line.get("length") for line in lines])
    chunk = info.get("chunks_size", 1000)
    if not isinstance(chunk, int) or chunk < 1:
        raise DataError(f"chunks_size in meta/info.json is {chunk!r}; a positive integer is needed")
    template = info.get("data_path", "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet")
    return lengths, [_name(template, episode_chunk=e // chunk, episode_index=e) for e in sorted(lengths)]


def _packed(path: Path, info: dict[str, Any]) -> tuple[dict[int, int], list[str]]:
    """Length of each episode, and the data files that hold them, of v3.0."""
    wanted = (EPISODE, "length", "data/chunk_index", "data/file_index")
    names = sorted(file.relative_to(path).as_posix() for file in path.glob("meta/episodes/*/*.parquet"))
    tables = [_columns(path, name, wanted) for name in names]
    if not tables:
        raise DataError("there is no meta/episodes/chunk-*/file-*.parquet; copy the dataset again")
    index, length, chunk, file = (_join(name, [table[name] for table in tables])[:, 0].tolist() for name in wanted)
    template = info.get("data_path", "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet")
    files = sorted(set(zip(chunk, file, strict=True)))
    return _lengths("meta/episodes", index, length), [_name(template, chunk_index=c, file_index=f) for c, f in files]


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


def _name(template: Any, **values: int) -> str:
    try:
        name = str(template).format(**values)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise DataError(f"data_path {template!r} in meta/info.json cannot be filled in ({error})") from error
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"data_path {template!r} in meta/info.json points outside the dataset")
    return name


def _columns(path: Path, name: str, wanted: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Columns of a parquet file, ``[rows, width]`` each."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "train") from error
    try:
        with pq.ParquetFile(path / name) as file:
            missing = [column for column in wanted if column not in file.schema_arrow.names]
            if missing:
                raise DataError(f"{name} has no column {missing[0]!r}; found: {', '.join(file.schema_arrow.names)}")
            table = file.read(columns=list(wanted))
        return {column: _array(f"{column} in {name}", table.column(column)) for column in wanted}
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
