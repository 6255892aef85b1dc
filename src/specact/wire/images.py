"""Camera frames on the wire: raw, or as JPEG where the link is narrow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import MissingExtraError, WireError


def to_jpeg(frames: NDArray[np.uint8], quality: int) -> list[bytes]:
    """Frames ``[T, H, W, 3]`` as JPEG, one file each; lossy, so the target sees what the draft did not.

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


def read_image(value: Any, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Frames of exactly this shape ``(T, H, W, 3)``, from an array or from T JPEG files.

    Raises:
        WireError: ``bad_message`` for anything else; a file's size is read from its header before it is unpacked.
        MissingExtraError: if there are JPEG files and no Pillow.
    """
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.shape != shape:
            raise WireError("bad_message", f"image must be uint8 {shape}, got {value.dtype} {value.shape}")
        return value
    if not isinstance(value, list) or len(value) != shape[0] or not all(isinstance(file, bytes) for file in value):
        raise WireError("bad_message", f"image must be an array of uint8 {shape} or a list of {shape[0]} JPEG files")
    return np.stack([_read_jpeg(file, (shape[2], shape[1])) for file in value])


def _read_jpeg(file: bytes, size: tuple[int, int]) -> NDArray[np.uint8]:
    _pillow()
    from PIL.JpegImagePlugin import JpegImageFile

    try:
        # Not Image.open: for a huge size in the header that one raises an error of its own kind, or warns.
        with JpegImageFile(io.BytesIO(file)) as opened:
            if opened.size != size:
                raise WireError("bad_message", f"image must be a JPEG of {size} pixels, got {opened.size}")
            return np.asarray(opened.convert("RGB"))
    # Pillow raises many kinds for damaged files, all of them among these.
    except (OSError, ValueError, SyntaxError, EOFError, IndexError) as error:
        raise WireError("bad_message", f"image is not a readable JPEG ({type(error).__name__})") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingExtraError("pillow", "server") from error
    return Image
