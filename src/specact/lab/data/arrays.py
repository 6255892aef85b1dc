"""Flat arrays over all steps with the ends of episodes: ``.npz`` archives, and diffusion policy's zarr buffers."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.lab.data.episodes import Observed
from specact.lab.data.frames import Frames, Images, as_frames, check_frames, reading
from specact.lab.data.readers import Recording, check_size, matrix, numbers, positive_rate, rows

STATE = ("state", "obs", "observation")
ACTION = ("action", "actions")
GOAL = ("goal", "current_subtask")
IMAGE = ("image", "img")
_OTHERS = (*ACTION, "episode_ends", "rate_hz")

# Allowed codecs of zarr's chunks: only pure byte transformations. A pickle codec, for example, could run any code.
_CODECS = frozenset(("adler32", "bytes", "crc32", "crc32c", "delta", "fletcher32", "shuffle", "transpose"))
# Compressors, one for an array: their chunks say how large they are, so that no chunk can grow beyond any memory.
_COMPRESSORS = frozenset(("blosc", "zstd"))
# Number of frames that determine whether floats are within 0..1 or 0..255; a single one may be black.
_SAMPLE_FRAMES = 5


def read_npz(path: Path) -> Recording:
    """Reads ``state|obs|observation``, ``action|actions``, ``episode_ends`` of an .npz archive.

    ``goal|current_subtask``, ``image|img``, further ones such as ``image.front``, and ``rate_hz`` are read where
    present, the earlier name is preferred; other arrays are read on request.

    Raises:
        DataError: for damaged files, missing arrays, arrays of objects (they would have to be unpickled, which can run
            any code) and lengths that contradict each other.
    """

    def load(key: str) -> Observed:
        with _npz(path) as arrays:
            return _observed(key, arrays[key])

    with _npz(path) as arrays:
        return _recording(tuple(arrays), arrays.__getitem__, load)


@contextmanager
def _npz(path: Path) -> Iterator[Mapping[str, NDArray[Any]]]:
    try:
        # Opened here, because numpy does not close files that are no archives.
        with reading("this npz archive"), path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if isinstance(arrays, np.ndarray):
                raise DataError("this is not an npz archive; write it with numpy.savez_compressed")
            with arrays:
                check_size("its content", sum(entry.file_size for entry in arrays.zip.infolist()), path.stat().st_size)
                yield arrays
    except DataError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            "this file holds pickled objects, which are refused because unpickling can run any code; "
            "save plain numeric arrays, concatenated over episodes, with 'episode_ends'"
        ) from error


def read_zarr(path: Path) -> Recording:
    """Reads the arrays of :func:`read_npz` in ``data/`` and ``meta/`` of a zarr store, version 2 or 3.

    Camera frames are read lazily.

    Raises:
        DataError: for damaged stores, missing arrays or chunks, and lengths that contradict each other.
    """
    import zarr

    advice = "'data/state', 'data/action' and 'meta/episode_ends' are needed; copy it again"

    def load(key: str) -> Observed:
        with reading("this zarr store", advice):
            array = stored[key]
            if not _is_camera(key, array.shape):
                return _observed(key, _whole(path, array))
            _check(path, array)
            check_frames(array.shape)
            some = np.unique(np.linspace(0, array.shape[0] - 1, _SAMPLE_FRAMES, dtype=np.int64))
            scale = _scale(np.stack([np.asarray(array[row]) for row in some.tolist()]))
            return Frames(array.shape, partial(_zarr_frames, path, array.path, scale))

    with reading("this zarr store", advice), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # zarr names every stray file (.DS_Store); they do no harm
        root = zarr.open_group(str(path), mode="r")
        groups: list[Any] = [root.get("data"), root.get("meta")]
        stored: dict[str, Any] = {
            name: array for group in groups if hasattr(group, "arrays") for name, array in group.arrays()
        }
        return _recording(tuple(stored), lambda name: _whole(path, stored[name]), load)


def _zarr_frames(path: Path, name: str, scale: float, rows: NDArray[np.int64]) -> Images:
    """Camera frames of one array."""
    import zarr

    with reading(f"{path}: a frame"):
        array: Any = zarr.open_group(str(path), mode="r")[name]
        whole = rows[-1] - rows[0] + 1 == len(rows)
        values = array[int(rows[0]) : int(rows[-1]) + 1] if whole else array.oindex[rows]
        return _images(np.asarray(values), scale)


def _whole(path: Path, array: Any) -> NDArray[Any]:
    _check(path, array)
    check_size(repr(array.path), array.nbytes, sum(file.stat().st_size for file in _chunks(path, array)))
    return np.asarray(array[...])


def _chunks(path: Path, array: Any) -> list[Path]:
    """An array's files, without those that describe it."""
    files = (path / array.path).rglob("*")
    return [file for file in files if file.name[0] != "." and file.name != "zarr.json" and file.is_file()]


def _check(path: Path, array: Any) -> None:
    """Checks an array's codecs and its chunks before anything is decompressed.

    A missing chunk would silently be read as zeros. A truncated blosc chunk would be read beyond its end (numcodecs
    0.16), so the size in its header is compared with the file's; and the size of its content with that of a chunk.
    """
    if array.dtype.kind not in "biuf":
        raise DataError(f"{array.path!r} holds {array.dtype}; store numbers, such as float32")
    metadata: dict[str, Any] = dict(array.metadata.to_dict())
    steps = [*(metadata.get("filters") or ()), metadata.get("compressor"), *(metadata.get("codecs") or ())]
    names = [str(step.get("id", step.get("name"))).removeprefix("numcodecs.") for step in steps if step is not None]
    compressors = [name for name in names if name in _COMPRESSORS]
    for name in (*(name for name in names if name not in _CODECS | _COMPRESSORS), *compressors[1:]):
        raise DataError(
            f"{array.path!r} is compressed with {name!r}, which is not supported, or twice; supported: "
            f"{', '.join(sorted(_CODECS | _COMPRESSORS))}. Store it again, with blosc or zstd"
        )
    missing = array.nchunks - array.nchunks_initialized
    if missing > 0:
        raise DataError(
            f"{missing} of {array.nchunks} chunks of {array.path!r} are missing and would be read as "
            f"{array.fill_value}; copy the store again, or, if this is intended, write it with write_empty_chunks=True"
        )
    nbytes = math.prod(array.chunks) * array.dtype.itemsize
    check_size(f"a chunk of {array.path!r}", nbytes, 0)
    for file in _chunks(path, array) if compressors else ():
        with file.open("rb") as chunk:
            size, content = _sizes(compressors[0], chunk.read(18))
        if size not in (None, file.stat().st_size):
            raise DataError(f"the chunk {file.relative_to(path)} is truncated; copy the store again")
        if content > 8 * nbytes + 64:  # a filter may have made it larger
            raise DataError(f"the chunk {file.relative_to(path)} holds more than the {nbytes} bytes that belong there")


def _sizes(compressor: str, head: bytes) -> tuple[int | None, int]:
    """Sizes of a chunk, if its head states it, and of its content; 0 and 0 for a head that is damaged [bytes]."""
    if compressor == "blosc":
        return int.from_bytes(head[12:16], "little") if len(head) > 15 else 0, int.from_bytes(head[4:8], "little")
    # zstd, RFC 8878, 3.1.1.1
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        return 0, 0
    single = head[4] >> 5 & 1
    width, begin = (single, 2, 4, 8)[head[4] >> 6], 6 - single + (0, 1, 2, 4)[head[4] & 3]
    size = int.from_bytes(head[begin : begin + width], "little") + 256 * (width == 2)
    return None, size if width else sys.maxsize


def _recording(
    stored: tuple[str, ...], get: Callable[[str], NDArray[Any]], load: Callable[[str], Observed]
) -> Recording:
    """Demonstrations of the arrays that ``get`` reads, ``[N, ...]`` each, and ``episode_ends`` ``[E]`` (exclusive)."""
    fields = {name: _first(stored, known) for name, known in {"state": STATE, "goal": GOAL, "image": IMAGE}.items()}
    several = {key: key for key in sorted(stored) if key.partition(".")[0] in fields and "." in key}
    action, ends = get(_needed(stored, ACTION)), np.asarray(get(_needed(stored, ("episode_ends",))))
    if ends.dtype.kind not in "iu" or ends.ndim != 1:
        raise DataError(f"episode_ends has type {ends.dtype} and shape {ends.shape}; flat integers are needed")
    return Recording(
        names={name: key for name, key in fields.items() if key is not None} | several,
        keys=tuple(key for key in stored if key not in _OTHERS),
        load=load,
        action=matrix("actions", action),
        ends=ends.astype(np.int64),
        rate_hz=positive_rate(get("rate_hz")) if "rate_hz" in stored else None,
    )


def _first(stored: Collection[str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in stored), None)


def _needed(stored: Collection[str], names: tuple[str, ...]) -> str:
    key = _first(stored, names)
    if key is None:
        raise DataError(
            f"there is no {' or '.join(map(repr, names))}; found: {', '.join(sorted(stored)) or 'nothing'}. "
            f"Rename the array, or convert the data"
        )
    return key


def _observed(key: str, value: NDArray[Any]) -> Observed:
    """The observation from the array ``key``: camera frames ``[N, H, W, 3]``, or numbers ``[N, ...]``."""
    if _is_camera(key, value.shape):
        return as_frames(_images(value))
    return matrix("observations", value) if key in STATE else rows(key, value)


def _is_camera(key: str, shape: tuple[int, ...]) -> bool:
    """Whether an array is camera frames, by its name or else by its shape."""
    return key.partition(".")[0] in IMAGE or (len(shape) == 4 and shape[-1] == 3)


def _images(value: NDArray[Any], scale: float | None = None) -> Images:
    """Camera frames as uint8 ``[..., H, W, 3]``; floats are taken as 0..255, or as 0..1 where none is above 1."""
    value = numbers("image", value)
    check_frames(value.shape)
    if value.dtype == np.uint8:
        return value
    if not np.isfinite(value).all():
        raise DataError("the image holds values that are not finite; record it again or leave it out")
    if value.size and (value.min() < 0 or value.max() > 255):
        raise DataError(f"the image has values from {value.min():g} to {value.max():g}; store it as uint8, 0 to 255")
    factor = _scale(value) if scale is None else scale
    if factor > 1 and value.size and value.max() > 1:
        raise DataError(
            "some frames of the image lie within 0..1 and some do not; store them as uint8, or all of them in one range"
        )
    return np.clip(np.rint(value * np.float32(factor)), 0, 255).astype(np.uint8)


def _scale(value: NDArray[Any]) -> float:
    """255 if these are floats within 0..1, else 1."""
    return 255.0 if value.dtype.kind == "f" and value.size and value.max() <= 1 else 1.0
