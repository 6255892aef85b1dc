"""Replay buffers of diffusion policy: a zarr group with ``data/*`` and ``meta/episode_ends``."""

from __future__ import annotations

import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError, MissingExtraError
from specact.lab.data import npz
from specact.lab.data.episodes import Episodes

if TYPE_CHECKING:
    import zarr

# What chunks may be packed with: what only computes with bytes. A pickle, for one, runs whatever its author wrote.
_CODECS = frozenset(
    (
        "adler32", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "fletcher32", "gzip", "lz4", "lzma",
        "sharding_indexed", "shuffle", "transpose", "zlib", "zstd",
    )
)  # fmt: skip

# What zarr (v2 and v3 files) and its codecs raise on damaged stores; its own errors derive from ValueError or KeyError.
_DAMAGE = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    OSError,
    EOFError,
    RuntimeError,
    AttributeError,
    zlib.error,
    MemoryError,
    NotImplementedError,
    OverflowError,
)


class LazyFrames:
    """Camera frames that stay on disk: uint8 ``[N, H, W, 3]``, read where they are indexed.

    Takes what a numpy array takes as first index: an integer, a slice, an array of integers or booleans.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, array: zarr.Array[Any], path: Path) -> None:
        npz.check_frames(array.shape)
        self._array = array
        self._path = path
        self.shape: tuple[int, ...] = array.shape
        # The scale must not change from one slice to the next, so it is decided once, by the first frame.
        self._scale = npz.frame_scale(np.asarray(array[:1]))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        rows = np.arange(len(self))[index]  # numpy's rules for negative, boolean and reversed indices
        wanted = np.atleast_1d(rows)
        if wanted.size == 0:
            return np.zeros((0, *self.shape[1:]), np.uint8)
        try:
            if np.all(np.diff(wanted) == 1):
                values = np.asarray(self._array[int(wanted[0]) : int(wanted[-1]) + 1])
            else:
                values = np.asarray(self._array.oindex[wanted])
            found = npz.frames(values, self._scale)
        except _DAMAGE as error:
            raise DataError(f"{self._path}: some frames are damaged ({error}); copy or record it again") from error
        return found if rows.ndim else cast("NDArray[np.uint8]", found[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All frames, in memory."""
        return np.asarray(self[:], dtype=dtype)


def read_zarr(path: Path) -> Episodes:
    """Read ``data/{state|obs, action, img|image}`` and ``meta/episode_ends`` of a zarr store, version 2 or 3.

    Images are not loaded, see :class:`LazyFrames`. ``goal``, ``current_subtask`` and ``rate_hz`` are read where
    present.

    Raises:
        DataError: for damaged stores, missing arrays or chunks, and lengths that contradict each other.
        MissingExtraError: if zarr is not installed.
    """
    try:
        import zarr
    except ImportError as error:
        raise MissingExtraError("zarr", "train") from error
    try:
        root = zarr.open_group(str(path), mode="r")
        stored = {name: array for folder in ("data", "meta") for name, array in _arrays(root, folder).items()}
        names = (*npz.STATE, *npz.ACTION, *npz.GOAL, "episode_ends", "rate_hz")
        columns = {name: _load(path, stored[name]) for name in names if name in stored}
        # Other arrays are not read; their names make the message useful if something is not found.
        others = {name: np.empty(0) for name in stored if name not in names and name not in npz.IMAGE}
        episodes = npz.from_columns({**others, **columns})
        image = npz.first_of(stored, npz.IMAGE)
        if image is None:
            return episodes
        _check_codecs(stored[image])
        _check_chunks(path, stored[image])
        lazy = LazyFrames(stored[image], path)
    except _DAMAGE as error:
        raise DataError(
            f"this zarr store is damaged or not a replay buffer ({type(error).__name__}: {error}); "
            f"'data/state', 'data/action' and 'meta/episode_ends' are needed; copy it again"
        ) from error
    return replace(episodes, image=cast("NDArray[np.uint8]", lazy))


def _arrays(root: zarr.Group, folder: str) -> dict[str, zarr.Array[Any]]:
    group = root.get(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # zarr names every stray file (.DS_Store); they do no harm
        return dict(cast("zarr.Group", group).arrays()) if hasattr(group, "arrays") else {}


def _load(path: Path, array: zarr.Array[Any]) -> NDArray[Any]:
    _check_codecs(array)
    _check_chunks(path, array)
    return np.asarray(array[...])


def _check_codecs(array: zarr.Array[Any]) -> None:
    """Refuse what has to be unpacked by more than arithmetic; nothing has been unpacked yet."""
    if array.dtype.kind not in "biuf":
        raise DataError(f"{array.path!r} holds {array.dtype}; store numbers, such as float32")
    metadata: dict[str, Any] = dict(array.metadata.to_dict())
    steps = [*(metadata.get("filters") or ()), metadata.get("compressor"), *(metadata.get("codecs") or ())]
    while steps:
        step = steps.pop()
        if step is None:
            continue
        name = str(step.get("id", step.get("name"))).removeprefix("numcodecs.")
        if name not in _CODECS:
            raise DataError(
                f"{array.path!r} is compressed with {name!r}, which is not supported; supported: "
                f"{', '.join(sorted(_CODECS))}. Store it again, with blosc or zstd"
            )
        inside = step.get("configuration") or {}
        steps += [*inside.get("codecs", ()), *inside.get("index_codecs", ())]


def _check_chunks(path: Path, array: zarr.Array[Any]) -> None:
    """Refuse what zarr would read as wrong numbers without a word.

    A chunk that is not there is read as zeros. A blosc chunk that is cut short is read past its end into whatever lies
    in memory (numcodecs 0.16), so the size in its header is compared with the file's.
    """
    missing = array.nchunks - array.nchunks_initialized
    if missing > 0:
        raise DataError(
            f"{missing} of {array.nchunks} chunks of {array.path!r} are missing and would be read as "
            f"{array.fill_value}; copy the store again, or, if this is intended, write it with "
            f"write_empty_chunks=True"
        )
    codec = type(array.compressors[-1]).__name__ if array.compressors else ""
    if codec not in ("Blosc", "BloscCodec") or array.shards is not None:
        return
    for file in (path / array.path).rglob("*"):
        if file.name[0] == "." or file.name == "zarr.json" or not file.is_file():
            continue
        with file.open("rb") as chunk:
            header = chunk.read(16)
        if len(header) < 16 or int.from_bytes(header[12:], "little") != file.stat().st_size:
            raise DataError(f"the chunk {file.relative_to(path)} is truncated; copy the store again")
