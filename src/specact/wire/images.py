"""Camera frames on the wire: raw, or as JPEG to save bandwidth."""

from __future__ import annotations

import io
import math
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import MissingExtraError, WireError
from specact.observation import ObservationSpec

# A camera's JPEG has about ten scans at most and a header of a few kilobytes. Each scan is a pass over the whole frame,
# however short it is, and Pillow reads the header segment by segment: a message could take seconds to decode.
MAX_SCANS, MAX_HEADER_BYTES = 64, 1 << 16


def to_jpeg(frames: NDArray[np.uint8], quality: int) -> list[bytes]:
    """Frames ``[T, H, W, 3]`` as JPEG, one file each; lossy, so draft and target see different pixels.

    It needs Pillow, as reading does: MissingExtraError without it.
    """
    image, files = _pillow(), [io.BytesIO() for _ in frames]
    for frame, file in zip(frames, files, strict=True):
        image.fromarray(frame).save(file, "JPEG", quality=quality)
    return [file.getvalue() for file in files]


def read_images(files: list[bytes], spec: ObservationSpec) -> dict[str, NDArray[np.uint8]]:
    """The camera frames of a window, from their files in the order of the spec's fields, oldest first.

    Anything else is a WireError, ``bad_message``; a file's size and its scans are checked before it is decoded.
    """
    shapes = {name: spec[name].window_shape for name in spec.images}
    counts = {name: math.prod(shape[:-3]) for name, shape in shapes.items()}
    if len(files) != sum(counts.values()):
        raise WireError("bad_message", f"{sum(counts.values())} camera frames are needed, got {len(files)}")
    left = iter(files)
    return {name: read_jpegs(list(islice(left, counts[name])), name, shape) for name, shape in shapes.items()}


def read_jpegs(files: list[bytes], name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Frames of exactly this shape, ``(T, H, W, 3)`` or ``(H, W, 3)``, from as many files; see :func:`read_images`."""
    _pillow()
    return np.stack([_read_jpeg(file, name, (shape[-2], shape[-3])) for file in files]).reshape(shape)


def _read_jpeg(file: bytes, name: str, size: tuple[int, int]) -> NDArray[np.uint8]:
    from PIL.JpegImagePlugin import JpegImageFile

    # Compressed data does not contain the bytes that start a scan; metadata can, which makes it an upper bound.
    if (scans := file.count(b"\xff\xda")) > MAX_SCANS:
        raise WireError("bad_message", f"{name} must be a JPEG of at most {MAX_SCANS} scans, got {scans}")
    try:
        # Not Image.open, which warns or raises DecompressionBombError for a huge size in the header.
        with JpegImageFile(io.BytesIO(file[:MAX_HEADER_BYTES])) as opened:
            if opened.size != size:
                raise WireError("bad_message", f"{name} must be a JPEG of {size} pixels, got {opened.size}")
            opened.fp = io.BytesIO(file)
            return np.asarray(opened.convert("RGB"))
    # The kinds of errors that Pillow raises for damaged files.
    except (OSError, ValueError, SyntaxError, EOFError, IndexError) as error:
        readable = f"a readable JPEG with a header of at most {MAX_HEADER_BYTES} bytes"
        raise WireError("bad_message", f"{name} must be {readable} ({type(error).__name__})") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingExtraError("pillow", "server") from error
    return Image
