"""Camera frames over the wire, raw and as JPEG, with an image policy too small to see anything."""

from __future__ import annotations

import numpy as np
import pytest

from specact import Bundle
from specact.errors import ConfigError
from specact.observation import Field, ObservationSpec, Window
from specact.remote.client import Client
from specact.remote.transport import Endpoint
from specact.rng import StepAddress
from specact.wire import msgpack
from specact.wire.images import read_image
from specact.wire.messages import Request, request_fields

FRAMES = np.linspace(0, 255, 2 * 32 * 48 * 3).astype(np.uint8).reshape(2, 32, 48, 3)
SEEN = ObservationSpec({"state": Field((3,), history=2), "image": Field((32, 48, 3), "uint8", 2)})
WINDOW = Window({"state": np.zeros((2, 3), np.float32), "image": np.sort(FRAMES, axis=1)})


def image_of(jpeg_quality: int | None) -> tuple[np.ndarray, int]:
    request = Request("infer", 1, 10.0, WINDOW, StepAddress(0, 0, 0, 0))
    payload = msgpack.encode(request_fields(request, SEEN, jpeg_quality))
    return read_image(msgpack.decode(payload)["observation"]["image"], "image", FRAMES.shape), len(payload)


def test_raw_frames_arrive_as_they_are_and_jpeg_ones_nearly_so_and_smaller() -> None:
    raw, size = image_of(None)
    np.testing.assert_array_equal(raw, WINDOW["image"])
    lossy, small = image_of(90)
    assert np.abs(lossy.astype(int) - WINDOW["image"]).mean() < 6.0
    assert small < size / 2


def test_a_quality_or_wire_that_cannot_be_is_refused_before_anything_connects(ball: Bundle) -> None:
    for quality, scheme in ((0, "ws"), (96, "ws"), (80, "http")):
        with pytest.raises(ConfigError, match="JPEG"):
            Client(Endpoint(scheme, "127.0.0.1", 9), ball.codec.dialect, jpeg_quality=quality)
