"""Camera frames of LeRobot datasets: images within the parquet files, and videos."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError, MissingExtraError
from specact.lab.data.frames import Frames, Images

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

# A frame is the wanted one if its time differs by less than this share of a frame's period.
_TOLERANCE = 0.4
# Further ahead than this, a video is searched for its next key frame instead of decoded up to there [s].
_SEEK_S = 2.0


def stored_images(
    path: Path, key: str, files: list[str], file_of: NDArray[np.int64], rows: NDArray[np.int64]
) -> Frames:
    """Frames that are stored as encoded images, a column of the parquet files.

    Args:
        path: the dataset.
        key: the column, a struct with the image file's ``bytes``.
        files: the parquet files.
        file_of, rows: of every step its file's number and its row there, ``[N]`` each.

    Raises:
        DataError: if the first one cannot be read.
        MissingExtraError: if pyarrow or Pillow is not installed.
    """
    reader = _ImageColumn(path, key, files, file_of, rows)
    return Frames((len(rows), *reader(np.zeros(1, np.int64)).shape[1:]), reader)


@dataclass(frozen=True)
class _ImageColumn:
    path: Path
    key: str
    files: list[str]
    file_of: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __call__(self, rows: NDArray[np.int64]) -> Images:
        found: dict[int, Images] = {}
        for number in np.unique(self.file_of[rows]):
            of_file = rows[self.file_of[rows] == number]
            in_file = dict(zip(self.rows[of_file].tolist(), of_file.tolist(), strict=True))
            found |= {in_file[row]: image for row, image in self._images(self.files[number], sorted(in_file))}
        return np.stack([found[row] for row in rows.tolist()])

    def _images(self, name: str, rows: list[int]) -> Iterator[tuple[int, Images]]:
        """Images of these rows of a file; only groups of rows that hold one of them are read."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise MissingExtraError("pyarrow", "train") from error
        try:
            with pq.ParquetFile(self.path / name) as file:
                ends = np.cumsum([file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)])
                groups = np.searchsorted(ends, rows, side="right")
                for group in np.unique(groups).tolist():
                    column = file.read_row_group(group, columns=[self.key]).column(self.key).combine_chunks()
                    encoded, start = column.field("bytes"), int(ends[group]) - len(column)
                    for row in (row for row, its in zip(rows, groups.tolist(), strict=True) if its == group):
                        yield row, decoded(encoded[row - start].as_py(), f"{self.key} in {name}")
        except (pa.ArrowException, OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"{self.path}: {self.key} in {name} is damaged or missing ({error}); copy it again"
            ) from error


def decoded(encoded: bytes | None, what: str) -> Images:
    """An image file's pixels, uint8 ``[H, W, 3]``.

    Raises:
        DataError: if it is none.
        MissingExtraError: if Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError("pillow", "train") from error
    if not encoded:
        raise DataError(f"{what} holds no image, only the name of a file; store the images within the parquet files")
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{what} holds an image that cannot be read ({error}); record it again") from error


@dataclass(frozen=True)
class Films:
    """Where the episodes of a camera were filmed.

    Attributes:
        places: by episode the video's file, and the time in it at which the episode begins [s].
    """

    places: Mapping[int, tuple[str, Any]]

    def frames(
        self, path: Path, episode: NDArray[Any], time: NDArray[Any], feature: Mapping[str, Any], fps: Any
    ) -> Frames:
        """The camera's frames, of every step one; nothing is decoded where the metadata tell the size.

        Args:
            path: the dataset.
            episode, time: of every step, the latter since the episode's begin [s], ``[N]`` each.
            feature: what ``meta/info.json`` says of the camera.
            fps: frames per second.

        Raises:
            DataError: if times or sizes are no numbers, or an episode was not filmed.
        """
        names = sorted({name for name, _ in self.places.values()})
        number = {name: place for place, name in enumerate(names)}
        try:
            file_of = np.array([number[self.places[int(e)][0]] for e in episode])
            start = np.array([float(self.places[int(e)][1]) for e in episode])
            period = 1.0 / float(fps)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise DataError(f"meta/ does not tell where an episode's video is ({error}); copy it again") from error
        reader = _Videos(path, names, file_of, start + np.asarray(time, np.float64), period)
        return Frames((len(time), *_size(feature, reader)), reader)


def _size(feature: Mapping[str, Any], reader: _Videos) -> tuple[int, ...]:
    """``(H, W, 3)`` as the metadata tell, in whichever order, or else as the first frame is."""
    shape = feature.get("shape")
    if isinstance(shape, list) and len(shape) == 3 and all(isinstance(n, int) and n > 0 for n in shape):
        if shape[2] == 3:
            return tuple(shape)
        if shape[0] == 3:
            return (shape[1], shape[2], 3)
    return reader(np.zeros(1, np.int64)).shape[1:]


@dataclass(frozen=True)
class _Videos:
    """Frames by file and time. The last video stays open, so that reading on needs no search.

    Attributes:
        path: the dataset.
        files: names of the videos.
        file_of, time: of every step its file's number, and the time in the file [s], ``[N]`` each.
        period: between two frames [s].
    """

    path: Path
    files: list[str]
    file_of: NDArray[np.int64]
    time: NDArray[np.float64]
    period: float
    _open: dict[int, _Video] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, rows: NDArray[np.int64]) -> Images:
        found = {}
        for row in rows[np.lexsort((self.time[rows], self.file_of[rows]))].tolist():
            video = self._video(int(self.file_of[row]))
            found[row] = video.at(float(self.time[row]), self.period)
        shapes = {image.shape for image in found.values()}
        if len(shapes) > 1:
            raise DataError(f"{self.path}: videos of one camera have frames of {' and of '.join(map(str, shapes))}")
        return np.stack([found[row] for row in rows.tolist()])

    def __reduce__(self) -> tuple[Any, ...]:
        """Without open files."""
        return _Videos, (self.path, self.files, self.file_of, self.time, self.period)

    def _video(self, number: int) -> _Video:
        if number not in self._open:
            for video in self._open.values():
                video.close()
            self._open.clear()
            self._open[number] = _Video(self.path / self.files[number])
        return self._open[number]


class _Video:
    """One video, read forwards from where it is or from the key frame before the wanted time."""

    def __init__(self, file: Path) -> None:
        try:
            import av
        except ImportError as error:
            raise MissingExtraError("av", "train") from error
        self._file, self._errors = file, (av.FFmpegError, OSError, ValueError, IndexError)
        with self._told():
            # Nothing but MP4, which LeRobot writes: a playlist could name any other file.
            self._container = av.open(str(file), format="mp4")
            self._stream = self._container.streams.video[0]
            self._stream.thread_type = "NONE"
        self._coming: Iterator[VideoFrame] = iter(())
        self._last: VideoFrame | None = None

    def close(self) -> None:
        self._container.close()

    def at(self, time: float, period: float) -> Images:
        """The frame at this time [s], uint8 ``[H, W, 3]``.

        Raises:
            DataError: if there is none within a fraction of a period, or the video is damaged.
        """
        allowed = _TOLERANCE * period
        with self._told():
            now = math.nan if self._last is None else _time(self._last)
            if not now - allowed <= time <= now + _SEEK_S:
                before = max(0, int((time - allowed) / (self._stream.time_base or 1)))
                self._container.seek(before, stream=self._stream)
                self._coming, self._last = self._container.decode(self._stream), None
            while self._last is None or _time(self._last) < time - allowed:
                self._last = next(self._coming, None)
                if self._last is None:
                    raise DataError(f"{self._file} ends before {time:.3f} s, where a frame should be; copy it again")
            if abs(_time(self._last) - time) > allowed:
                raise DataError(
                    f"{self._file} has no frame at {time:.3f} s, the next one is at {_time(self._last):.3f} s; the "
                    "timestamps are not those of this video"
                )
            return np.asarray(self._last.to_ndarray(format="rgb24"), dtype=np.uint8)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise DataError(f"{self._file} is damaged or missing ({error}); copy the dataset again") from error


def _time(frame: VideoFrame) -> float:
    """When a frame is shown [s]."""
    if frame.time is None:
        raise DataError("a video has frames without times; encode it again")
    return float(frame.time)
