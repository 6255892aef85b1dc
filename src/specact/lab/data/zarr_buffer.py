"""Replay buffers of diffusion policy: a zarr group with ``data/*`` and ``meta/episode_ends``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.lab.data import npz
from specact.lab.data.decoding import reading
from specact.lab.data.episodes import Observed
from specact.lab.data.frames import Frames, check_frames
from specact.lab.data.sources import Recording

# Allowed codecs of chunks: only pure byte transformations. A pickle codec, for example, could run any code.
_CODECS = frozenset(
    (
        "adler32", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "fletcher32", "gzip", "lz4", "lzma",
        "sharding_indexed", "shuffle", "transpose", "zlib", "zstd",
    )
)  # fmt: skip

# Number of frames that determine whether floats are within 0..1 or 0..255; a single one may be black.
_SAMPLE_FRAMES = 5


@dataclass(frozen=True)
class _Reader:
    """Reads camera frames of one array; it opens the store on each call, so that it can be pickled.

    Attributes:
        path: the store.
        name: of the array.
        scale: factor to 0..255, the same for all reads.
    """

    path: Path
    name: str
    scale: float

    def __call__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        import zarr

        with reading(f"{self.path}: a frame"):
            array: Any = zarr.open_group(str(self.path), mode="r")[self.name]
            whole = rows[-1] - rows[0] + 1 == len(rows)
            values = array[int(rows[0]) : int(rows[-1]) + 1] if whole else array.oindex[rows]
            return npz.frames(np.asarray(values), self.scale)


def read_zarr(path: Path) -> Recording:
    """Reads ``data/{state|obs, action, img|image}`` and ``meta/episode_ends`` of a zarr store, version 2 or 3.

    Camera frames are read lazily. ``goal``, ``current_subtask``, further ones such as ``image.front``, and ``rate_hz``
    are read where present, other arrays on request.

    Raises:
        DataError: for damaged stores, missing arrays or chunks, and lengths that contradict each other.
    """
    import zarr

    advice = "'data/state', 'data/action' and 'meta/episode_ends' are needed; copy it again"
    with reading("this zarr store", advice):
        root = zarr.open_group(str(path), mode="r")
        stored = {name: array for folder in ("data", "meta") for name, array in _arrays(root, folder).items()}
        names = (*npz.ACTION, "episode_ends", "rate_hz")
        columns = {name: _load(path, stored[name]) for name in names if name in stored}

    def load(key: str) -> Observed:
        with reading("this zarr store", advice):
            array = stored[key]
            if not npz.is_camera(key, array.shape):
                return npz.observed(key, _load(path, array))
            _check(path, array)
            check_frames(array.shape)
            some = np.unique(np.linspace(0, array.shape[0] - 1, _SAMPLE_FRAMES, dtype=np.int64))
            scale = npz.frame_scale(np.stack([np.asarray(array[row]) for row in some.tolist()]))
            return Frames(array.shape, _Reader(path, array.path, scale))

    return npz.from_columns(columns, tuple(stored), load)


def _arrays(root: Any, folder: str) -> dict[str, Any]:
    group = root.get(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # zarr names every stray file (.DS_Store); they do no harm
        return dict(group.arrays()) if hasattr(group, "arrays") else {}


def _load(path: Path, array: Any) -> NDArray[Any]:
    _check(path, array)
    return np.asarray(array[...])


def _check(path: Path, array: Any) -> None:
    """Checks an array's codecs before anything is decompressed, and its chunks."""
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
    _check_chunks(path, array)


def _check_chunks(path: Path, array: Any) -> None:
    """Checks for damage that zarr would silently read as wrong numbers.

    A missing chunk is read as zeros. A truncated blosc chunk is read beyond its end (numcodecs 0.16), so the size in
    its header is compared with the file's.
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
