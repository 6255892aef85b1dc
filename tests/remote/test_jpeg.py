"""Camera frames over the wire, raw and as JPEG, with an image policy too small to see anything."""

from __future__ import annotations

import numpy as np
import pytest

from specact import Bundle
from specact.errors import ConfigError
from specact.remote.client import Line
from specact.remote.transport import Endpoint
from specact.types import Window
from specact.wire import msgpack
from specact.wire.images import read_image
from specact.wire.request import InferRequest, request_fields

FRAMES = np.linspace(0, 255, 2 * 32 * 48 * 3).astype(np.uint8).reshape(2, 32, 48, 3)
WINDOW = Window(np.zeros((2, 3), np.float32), None, np.sort(FRAMES, axis=1))


def image_of(jpeg_quality: int | None) -> tuple[np.ndarray, int]:
    payload = msgpack.encode(request_fields(InferRequest(1, 10.0, WINDOW), jpeg_quality))
    return read_image(msgpack.decode(payload)["image"], FRAMES.shape), len(payload)


def test_raw_frames_arrive_as_they_are_and_jpeg_ones_nearly_so_and_smaller() -> None:
    assert WINDOW.image is not None
    raw, size = image_of(None)
    np.testing.assert_array_equal(raw, WINDOW.image)
    lossy, small = image_of(90)
    assert np.abs(lossy.astype(int) - WINDOW.image).mean() < 6.0
    assert small < size / 2


def test_a_quality_or_wire_that_cannot_be_is_refused_before_anything_connects(ball: Bundle) -> None:
    for quality, scheme in ((0, "ws"), (96, "ws"), (80, "http")):
        with pytest.raises(ConfigError, match="JPEG"):
            Line(Endpoint(scheme, "127.0.0.1", 9), ball, jpeg_quality=quality)
