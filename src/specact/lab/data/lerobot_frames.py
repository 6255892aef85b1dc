"""Camera frames of LeRobot datasets: images within the parquet files, and videos."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.lab.data.decoding import reading
from specact.lab.data.frames import Frames, Images, join_frames

# A frame is the wanted one if its time differs by less than this share of a frame's period.
_TOLERANCE = 0.4
# Further ahead than this, a video is searched for its next key frame instead of decoded up to there [s].
_SEEK_S = 2.0


def stored_images(path: Path, key: str, files: Mapping[str, int]) -> Frames:
    """Frames that are stored as encoded images, a column of the parquet files, in the order of the files' rows.

    Args:
        path: the dataset.
        key: the column, a struct with the image file's ``bytes``.
        files: number of rows of the parquet files, by their names.

    Raises:
        DataError: if the first one cannot be read.
    """
    readers = {name: _ImageColumn(path, name, key) for name in files}
    first = next(name for name, rows in files.items() if rows)
    shape = readers[first](np.zeros(1, np.int64)).shape[1:]
    return join_frames([Frames((rows, *shape), readers[name]) for name, rows in files.items()])


@dataclass(frozen=True)
class _ImageColumn:
    """Images of a file; only groups of rows that hold one of them are read."""

    path: Path
    name: str
    key: str

    def __call__(self, rows: NDArray[np.int64]) -> Images:
        from pyarrow import parquet

        images: list[Images] = []
        with reading(f"{self.path}: {self.key} in {self.name}"), parquet.ParquetFile(self.path / self.name) as file:
            ends = np.cumsum([file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)])
            groups = np.searchsorted(ends, rows, side="right")
            for group in np.unique(groups).tolist():
                column = file.read_row_group(group, columns=[self.key]).column(self.key).combine_chunks()
                encoded, start = column.field("bytes"), int(ends[group]) - len(column)
                own = [encoded[row - start].as_py() for row in rows[groups == group].tolist()]
                images += [decoded(image, f"{self.key} in {self.name}") for image in own]
        return np.stack(images)


def decoded(encoded: bytes | None, what: str) -> Images:
    """An image file's pixels, uint8 ``[H, W, 3]``.

    Raises:
        DataError: if it is none.
    """
    from PIL import Image

    if not encoded:
        raise DataError(f"{what} holds no image, only the name of a file; store the images within the parquet files")
    with reading(f"{what}: an image", "record it again"), Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB"))


@dataclass(frozen=True)
class Film:
    """Where an episode was filmed.

    Attributes:
        file: name of the video.
        start: the time in it at which the episode begins [s].
    """

    file: str
    start: float


def videos(path: Path, films: Sequence[Film], times: Sequence[NDArray[Any]], shape: Any, fps: float | None) -> Frames:
    """A camera's frames in videos; nothing is decoded where the metadata say the size.

    Args:
        path: the dataset.
        films: of the episodes.
        times: of each episode's steps, since its begin [s].
        shape: of a frame, as in ``meta/info.json``: ``[H, W, 3]`` or ``[3, H, W]``, or anything else if unknown.
        fps: frames per second.

    Raises:
        DataError: if the rate is not known.
    """
    if not fps:
        raise DataError("meta/info.json does not say how many frames a second has; copy the dataset again")
    readers = [_Filmed(path / film.file, film.start + time, 1.0 / fps) for film, time in zip(films, times, strict=True)]
    size = _size(shape) or readers[0](np.zeros(1, np.int64)).shape[1:]
    return join_frames([Frames((len(reader.times), *size), reader) for reader in readers])


def _size(shape: Any) -> tuple[int, ...] | None:
    """``(H, W, 3)``, if the metadata say it."""
    if isinstance(shape, list) and len(shape) == 3 and all(isinstance(n, int) and n > 0 for n in shape):
        if shape[2] == 3:
            return tuple(shape)
        if shape[0] == 3:
            return (shape[1], shape[2], 3)
    return None


@dataclass(frozen=True)
class _Filmed:
    """Frames of an episode.

    Attributes:
        file: the video.
        times: of its frames in the video, ascending [s].
        period: between two frames [s].
    """

    file: Path
    times: NDArray[np.float64]
    period: float

    def __call__(self, rows: NDArray[np.int64]) -> Images:
        video = _video(self.file)
        with reading(str(self.file), "copy the dataset again"):
            return np.stack([video.at(time, self.period) for time in self.times[rows].tolist()])


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
        self._coming: Iterator[Any] = iter(())
        self._last: Any = None

    def at(self, time: float, period: float) -> Images:
        """The frame at this time [s], uint8 ``[H, W, 3]``.

        Raises:
            DataError: if there is none within a fraction of a period.
        """
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
