"""Camera frames on the wire: raw, or as JPEG to save bandwidth."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import MissingExtraError
from specact.wire.checks import NestedList, array, bad

# A camera's JPEG has about ten scans at most and a header of a few kilobytes. Each scan is a pass over the whole frame,
# however short it is, and Pillow reads the header segment by segment: a message could take seconds to decode.
MAX_SCANS, MAX_HEADER_BYTES = 64, 1 << 16
_START_OF_SCAN = b"\xff\xda"


def to_jpeg(frames: NDArray[np.uint8], quality: int) -> list[bytes]:
    """Frames ``[T, H, W, 3]`` as JPEG, one file each; lossy, so draft and target see different pixels.

    Raises:
        MissingExtraError: if Pillow is not installed.
    """
    image = _pillow()
    files = []
    for frame in frames:
        file = io.BytesIO()
        image.fromarray(frame).save(file, "JPEG", quality=quality)
        files.append(file.getvalue())
    return files


def read_image(value: Any, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Frames of exactly this shape, ``(T, H, W, 3)`` or ``(H, W, 3)``, from an array or from as many JPEG files.

    Raises:
        WireError: ``bad_message`` for anything else; a file's size and its scans are checked before it is decoded.
        MissingExtraError: if there are JPEG files and no Pillow.
    """
    if isinstance(value, np.ndarray | NestedList):
        return array({name: value}, name, shape, np.uint8)
    files = shape[0] if len(shape) == 4 else 1
    if not isinstance(value, list) or len(value) != files or not all(isinstance(file, bytes) for file in value):
        raise bad(f"{name} must be an array of uint8 {shape} or a list of {files} JPEG files")
    return np.stack([_read_jpeg(file, name, (shape[-2], shape[-3])) for file in value]).reshape(shape)


def _read_jpeg(file: bytes, name: str, size: tuple[int, int]) -> NDArray[np.uint8]:
    _pillow()
    from PIL.JpegImagePlugin import JpegImageFile

    # Compressed data does not contain these bytes; metadata can, which makes it an upper bound.
    scans = file.count(_START_OF_SCAN)
    if scans > MAX_SCANS:
        raise bad(f"{name} must be a JPEG of at most {MAX_SCANS} scans, got {scans}; send a baseline JPEG")
    try:
        # Not Image.open, which warns or raises DecompressionBombError for a huge size in the header.
        with JpegImageFile(io.BytesIO(file[:MAX_HEADER_BYTES])) as opened:
            if opened.size != size:
                raise bad(f"{name} must be a JPEG of {size} pixels, got {opened.size}")
            opened.fp = io.BytesIO(file)
            return np.asarray(opened.convert("RGB"))
    # The kinds of errors that Pillow raises for damaged files.
    except (OSError, ValueError, SyntaxError, EOFError, IndexError) as error:
        raise bad(
            f"{name} is not a readable JPEG with a header of at most {MAX_HEADER_BYTES} bytes ({type(error).__name__})"
        ) from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingExtraError("pillow", "server") from error
    return Image
