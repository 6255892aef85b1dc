"""Writer of LeRobot datasets, v3.0: each episode is first written to its own file, all are merged at the end.

Cameras are images in the parquet files (PNG, lossless). Besides LeRobot's own columns there is ``disturbed``, see
:meth:`~specact.lab.data.episodes.Episodes.followed`, and in the table of episodes ``tried``.
"""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specact.errors import DataError
from specact.files import write_json, write_whole
from specact.lab.data.episodes import Episodes, Observed
from specact.lab.data.frames import Frames, Images
from specact.lab.data.lerobot import ACTION, DISTURBED, EPISODE, FRAME, PREFIX, TIME

PARTS = "parts"
EPISODES_TABLE = "meta/episodes/chunk-000/file-000.parquet"
DATA_FILE = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_EPISODES_A_FILE = 100
_FILES_A_CHUNK = 1000
_STATISTICS = ("min", "max", "mean", "std", "count")


@dataclass(frozen=True)
class Written:
    """The content of a dataset.

    Attributes:
        steps: total number.
        kept, tried: number of episodes, and of attempts, by task.
    """

    steps: int
    kept: dict[str, int]
    tried: dict[str, int]


def part(folder: Path, number: int) -> Path:
    """The file of an episode before the merge."""
    return folder / PARTS / f"episode-{number:06d}.parquet"


def write_part(folder: Path, number: int, episode: Episodes, task: str, tried: int = 1) -> None:
    """Writes one episode atomically: a single one, with a rate, of a task (its description), after so many attempts.

    Raises:
        DataError: if an observation is neither a vector nor camera frames.
    """
    import pyarrow as pa

    frame = np.arange(episode.steps)
    assert episode.rate_hz is not None
    disturbed = np.zeros(episode.steps, np.bool_) if episode.disturbed is None else episode.disturbed
    columns: dict[str, Observed] = {
        **{_key(name): seen for name, seen in episode.observation.items()},
        ACTION: episode.action,
        DISTURBED: disturbed,
        TIME: (frame / episode.rate_hz).astype(np.float32),
        FRAME: frame,
        EPISODE: np.full(episode.steps, number),
    }
    metadata = {
        "task": task,
        "tried": tried,
        "fps": episode.rate_hz,
        "features": {name: _feature(values) for name, values in columns.items()},
        "statistics": {name: _statistics(values) for name, values in columns.items()},
    }
    table = pa.table({name: _column(name, values) for name, values in columns.items()})
    _write(part(folder, number), table.replace_schema_metadata({"episode": json.dumps(metadata)}))


def finished(folder: Path) -> int:
    """The number of episodes in the dataset; 0 without one."""
    try:
        return int(json.loads((folder / "meta/info.json").read_text())["total_episodes"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}/meta/info.json cannot be read ({error}); choose another folder") from error


def finish(folder: Path, episodes: int) -> Written:
    """Merges the parts of all new episodes into the dataset, after its existing ones, to this total number.

    If interrupted, the dataset is in its old or new state, or this function has to be called again.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    done = finished(folder)
    rows = [] if done == 0 else pq.read_table(folder / EPISODES_TABLE).to_pylist()[:done]
    metadata: dict[str, Any] = {}
    tasks: dict[str, int] = {row["tasks"][0]: row["stats/task_index/min"][0] for row in rows}
    for first in range(done, episodes, _EPISODES_A_FILE):
        last = rows[-1] if rows else {}
        file = last["data/chunk_index"] * _FILES_A_CHUNK + last["data/file_index"] + 1 if rows else 0
        place = {"chunk_index": file // _FILES_A_CHUNK, "file_index": file % _FILES_A_CHUNK}
        groups = []
        for number in range(first, min(first + _EPISODES_A_FILE, episodes)):
            table = pq.read_table(part(folder, number))
            metadata = json.loads(table.schema.metadata[b"episode"])
            start = rows[-1]["dataset_to_index"] if rows else 0
            task_index = tasks.setdefault(metadata["task"], len(tasks))
            columns = {"task_index": np.full(len(table), task_index), "index": start + np.arange(len(table))}
            statistics = metadata["statistics"] | {name: _statistics(values) for name, values in columns.items()}
            for name, values in columns.items():
                table = table.append_column(name, pa.array(values))
            rows.append(
                {
                    EPISODE: number,
                    "tasks": [metadata["task"]],
                    "length": len(table),
                    **{f"data/{name}": value for name, value in place.items()},
                    "dataset_from_index": start,
                    "dataset_to_index": start + len(table),
                    "meta/episodes/chunk_index": 0,
                    "meta/episodes/file_index": 0,
                    "tried": metadata["tried"],
                    **{
                        f"stats/{column}/{name}": value
                        for column, values in statistics.items()
                        for name, value in values.items()
                    },
                }
            )
            groups.append(table.replace_schema_metadata(None))
        _write(folder / DATA_FILE.format(**place), *groups)
    if metadata:
        _write_metadata(folder, rows, tasks, metadata)
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    return Written(
        rows[-1]["dataset_to_index"],
        {task: sum(row["tasks"][0] == task for row in rows) for task in tasks},
        {task: sum(row["tried"] for row in rows if row["tasks"][0] == task) for task in tasks},
    )


def _write_metadata(folder: Path, rows: list[dict[str, Any]], tasks: dict[str, int], metadata: dict[str, Any]) -> None:
    """Writes ``meta``; ``info.json`` last, because it commits the rest."""
    import pyarrow as pa

    ordered = sorted(tasks, key=tasks.__getitem__)
    # LeRobot looks tasks up by the index of a pandas DataFrame, which this metadata defines.
    columns = [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
        {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"},
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.2.0"}
    table = pa.table({"task_index": pa.array([tasks[task] for task in ordered], pa.int64()), "task": ordered})
    for name, content in (
        ("meta/tasks.parquet", table.replace_schema_metadata({"pandas": json.dumps(pandas)})),
        (EPISODES_TABLE, pa.Table.from_pylist(rows)),
    ):
        _write(folder / name, content)
    features = metadata["features"] | dict.fromkeys(("task_index", "index"), _feature(np.zeros(1, np.int64)))
    write_json(folder / "meta/stats.json", {name: _pooled(name, rows) for name in features})
    write_json(
        folder / "meta/info.json",
        {
            "codebase_version": "v3.0",
            "robot_type": None,
            "total_episodes": len(rows),
            "total_frames": rows[-1]["dataset_to_index"],
            "total_tasks": len(tasks),
            "chunks_size": _FILES_A_CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": int(metadata["fps"]) if metadata["fps"] == int(metadata["fps"]) else metadata["fps"],
            "splits": {"train": f"0:{len(rows)}"},
            "data_path": DATA_FILE,
            "video_path": None,
            "features": features,
        },
    )


def _key(name: str) -> str:
    """LeRobot's name of an observation: ``image.front`` is ``observation.images.front``."""
    return PREFIX + ("images." + name.removeprefix("image.") if name.startswith("image.") else name)


def _feature(values: Observed) -> dict[str, Any]:
    """The description of a column in ``meta/info.json``."""
    if isinstance(values, Frames):
        return {"dtype": "image", "shape": list(values.shape[1:]), "names": ["height", "width", "channels"]}
    return {"dtype": str(values.dtype), "shape": list(values.shape[1:]) or [1], "names": None}


def _column(name: str, values: Observed) -> Any:
    import pyarrow as pa

    if isinstance(values, Frames):
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        return pa.array([{"bytes": _png(values[row]), "path": None} for row in range(len(values))], kind)
    if values.ndim > 2:
        raise DataError(f"{name} has the shape {values.shape[1:]}; a LeRobot dataset holds vectors and camera frames")
    if values.ndim == 1 or values.shape[1] == 1:
        return pa.array(values.reshape(len(values)))
    return pa.array(list(values), pa.list_(pa.from_numpy_dtype(values.dtype)))


def _png(frame: Images) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    # Pillow's default, 6, takes twice the time for the same size.
    Image.fromarray(frame).save(file, format="png", compress_level=3)
    return file.getvalue()


def _statistics(values: Observed) -> dict[str, Any]:
    """Statistics as in LeRobot; of images per channel, of pixels between 0 and 1, ``[3, 1, 1]``."""
    if isinstance(values, Frames):
        return {**_colours(values[:].reshape(-1, 3)), "count": [len(values)]}
    numbers = values.reshape(len(values), -1).astype(np.float64)
    statistics = {name: getattr(numbers, name)(axis=0).tolist() for name in _STATISTICS[:-1]}
    return {**statistics, "count": [len(values)]}


def _colours(pixels: Images) -> dict[str, Any]:
    """Statistics of pixels ``[N, 3]``, from how often each value appears, which takes a tenth of the time."""
    counts = np.stack([np.bincount(channel, minlength=256) for channel in pixels.T], axis=1)
    level, share, present = np.arange(256)[:, None] / 255.0, counts / len(pixels), counts > 0
    mean = (share * level).sum(axis=0)
    std = np.sqrt((share * (level - mean) ** 2).sum(axis=0))
    low, high = level[present.argmax(axis=0), 0], level[255 - present[::-1].argmax(axis=0), 0]
    values = zip(_STATISTICS, (low, high, mean, std), strict=False)
    return {name: value.reshape(3, 1, 1).tolist() for name, value in values}


def _pooled(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of all episodes, from those of each."""
    low, high, mean, std, count = (np.array([row[f"stats/{name}/{kind}"] for row in rows]) for kind in _STATISTICS)
    share = (count / count.sum()).reshape(-1, *(1,) * (mean.ndim - 1))
    pooled_mean = (share * mean).sum(axis=0)
    variance = (share * (std**2 + (mean - pooled_mean) ** 2)).sum(axis=0)
    pooled = (low.min(axis=0), high.max(axis=0), pooled_mean, np.sqrt(variance), count.sum(axis=0))
    return {kind: value.tolist() for kind, value in zip(_STATISTICS, pooled, strict=True)}


def _write(path: Path, *tables: Any) -> None:
    """Writes a parquet file with a row group per table, for random access."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    write_whole(path, sink.getvalue().to_pybytes())
