"""Camera frames that are read lazily: on indexing, never all at once; and the errors of damaged files."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError, DataError, SpecactError

Images = NDArray[np.uint8]
# Reads the frames of these rows, which are unique and ascending.
Read = Callable[[NDArray[np.int64]], Images]

_BLOCK_BYTES = 1 << 25  # frames are copied in blocks of this size
_LEFT_FREE = 1 << 28  # bytes that copying leaves free on a disk


@contextmanager
def reading(what: str, advice: str = "copy it again") -> Iterator[None]:
    """Turns every error of a decoder of ``what`` into a DataError: a damaged file fails in any way that one can."""
    try:
        yield
    except (SpecactError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise DataError(f"{what} is damaged or missing ({error}); {advice}") from error


class Frames:
    """Camera frames, uint8 ``[N, H, W, 3]`` (else a DataError), indexed along the first axis as a NumPy array is.

    ``read`` reads stored frames by index, and must be picklable if the frames are sent to other processes; ``rows`` are
    indices of the stored frames, in order of appearance; None for ``0 ... N - 1``.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, shape: tuple[int, ...], read: Read, rows: NDArray[np.int64] | None = None) -> None:
        check_frames(shape)
        self._read, self._rows = read, np.arange(shape[0]) if rows is None else rows
        self.shape: tuple[int, ...] = (len(self._rows), *shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Images:
        rows = self._rows[index]  # NumPy's rules for negative, boolean and reversed indices
        unique_rows, inverse = np.unique(rows, return_inverse=True)
        if unique_rows.size == 0:
            return np.zeros((0, *self.shape[1:]), np.uint8)
        read = self._read(unique_rows)
        if read.shape != (len(unique_rows), *self.shape[1:]):
            raise DataError(f"camera frames of shape {read.shape[1:]} are where {self.shape[1:]} was announced")
        return read[inverse.reshape(np.shape(rows))]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All frames, in memory."""
        return np.asarray(self[:], dtype=dtype)

    @property
    def in_memory(self) -> bool:
        """Whether the frames are in memory."""
        return isinstance(self._read, partial) and self._read.func is _indexed

    def select(self, rows: ArrayLike) -> Frames:
        """A subset, in this order; nothing is read."""
        return Frames(self.shape, self._read, self._rows[np.asarray(rows)])

    def fitted(self, crop: tuple[int, int, int, int] | None, size: tuple[int, int] | None) -> Frames:
        """Cut to ``crop`` (top, left, height, width), then resized to ``size`` (height, width); nothing is read.

        Raises:
            DataError: if the crop does not lie within the frame.
        """
        height, width = self.shape[1:3]
        if crop is not None:
            top, left, height, width = crop
            if top + height > self.shape[1] or left + width > self.shape[2]:
                raise DataError(
                    f"the crop {list(crop)} (top, left, height, width) does not lie within frames of "
                    f"{self.shape[1]} x {self.shape[2]}"
                )
        shape = (len(self), *((height, width) if size is None else size), 3)
        return Frames(shape, partial(_fitted, self._read, crop, size), self._rows)


class FrameWindows:
    """Windows of camera frames, uint8 ``[N, T, H, W, 3]``, which are read lazily on conversion to an array.

    ``rows`` are the indices of each window's frames, ``[N, T]``, or ``[N]`` without a history.
    """

    def __init__(self, frames: Frames, rows: NDArray[np.int64]) -> None:
        self.frames, self.rows = frames, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: NDArray[Any]) -> FrameWindows:
        return FrameWindows(self.frames, self.rows[chosen])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.frames[self.rows], dtype=dtype)


# A column of a table: numbers, or windows of frames.
Column = NDArray[Any] | FrameWindows


def as_frames(array: Any) -> Frames:
    """Frames of an array in memory, or of anything with a shape that can be indexed with integer arrays."""
    return array if isinstance(array, Frames) else Frames(tuple(array.shape), partial(_indexed, array))


def join_frames(parts: Sequence[Frames]) -> Frames:
    """Concatenates frames; nothing is read.

    Raises:
        DataError: if they differ in size.
    """
    shapes = sorted({part.shape[1:] for part in parts})
    if len(shapes) > 1:
        raise DataError(f"camera frames of {shapes[0]} and of {shapes[1]} cannot be joined; give them one size")
    return Frames((sum(map(len, parts)), *shapes[0]), partial(_joined, tuple(parts)))


def copied(frames: Frames, file: Path, advance: Callable[[int], None] = lambda done: None) -> Frames:
    """Copies frames to an uncompressed ``.npy`` file, which allows random access; one of the right shape is reused.

    ``advance`` is called with the number of frames so far.

    Raises:
        ConfigError: if there is too little disk space, or they cannot be written.
        DataError: if a frame cannot be read.
    """
    if not (file.is_file() and _mapped(file).shape == frames.shape):
        _copy(frames, file, advance)
    return Frames(frames.shape, partial(_copied, file))


def _copy(frames: Frames, file: Path, advance: Callable[[int], None]) -> None:
    needed = int(np.prod(frames.shape, dtype=np.int64))
    temporary = file.with_name(f"{file.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    step = max(1, _BLOCK_BYTES // (needed // len(frames)))
    header = {"descr": "|u1", "fortran_order": False, "shape": frames.shape}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(file.parent).free
        if free < needed + _LEFT_FREE:
            raise ConfigError(
                f"{len(frames)} camera frames of {frames.shape[1]} x {frames.shape[2]} need {needed / 1e9:.1f} GB in "
                f"{file.parent}, where {free / 1e9:.1f} GB are free; give them a smaller size in [observations], or "
                "choose another --out"
            )
        with temporary.open("wb") as out:
            np.lib.format.write_array_header_1_0(out, header)
            for start in range(0, len(frames), step):
                out.write(frames[start : start + step].tobytes())
                advance(min(start + step, len(frames)))
        temporary.replace(file)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}; free some space there") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


# Readers of frames are functions with their first arguments bound, so that they can be pickled.


def _indexed(array: Any, rows: NDArray[np.int64]) -> Images:
    return np.asarray(array[rows], dtype=np.uint8)


def _mapped(file: Path) -> Images:
    return cast(Images, np.load(file, mmap_mode="r", allow_pickle=False))


def _copied(file: Path, rows: NDArray[np.int64]) -> Images:
    # Mapped again for every batch, so that the last one's pages can be freed.
    return np.array(_mapped(file)[rows])


def _joined(parts: tuple[Frames, ...], rows: NDArray[np.int64]) -> Images:
    starts = np.cumsum([0, *(len(part) for part in parts)])
    bounds = np.searchsorted(rows, starts)
    numbers = np.flatnonzero(np.diff(bounds)).tolist()
    return np.concatenate([parts[n][rows[bounds[n] : bounds[n + 1]] - starts[n]] for n in numbers])


def _fitted(
    read: Read, crop: tuple[int, int, int, int] | None, size: tuple[int, int] | None, rows: NDArray[np.int64]
) -> Images:
    return fit(read(rows), crop, size)


def fit(frames: Images, crop: tuple[int, int, int, int] | None, size: tuple[int, int] | None) -> Images:
    """Frames ``[N, H, W, 3]`` cut to (top, left, height, width), then resized to (height, width).

    Resizing is Pillow's ``BILINEAR``, which averages over all source pixels. A robot's camera must use the same.
    """
    if crop is not None:
        top, left, height, width = crop
        frames = frames[:, top : top + height, left : left + width]
    if size is None or frames.shape[1:3] == tuple(size):
        return frames
    from PIL import Image

    height, width = size
    resized = [Image.fromarray(frame).resize((width, height), Image.Resampling.BILINEAR) for frame in frames]
    return np.stack([np.asarray(image) for image in resized])


def check_frames(shape: tuple[int, ...]) -> None:
    """Raises a DataError for a shape other than ``[N, H, W, 3]``."""
    if len(shape) != 4 or shape[-1] != 3:
        raise DataError(f"the image has shape {shape}; [steps, height, width, 3] is needed")
