"""Camera frames as JPEG are as Pillow reads them; anything else is a typed refusal."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.example_count import example_count
from tests.wire.contracts import CODES, SEEN, window_of

from specact.errors import MissingExtraError, WireError
from specact.observation import Field, ObservationSpec
from specact.rng import StepAddress
from specact.wire.exchange import Request
from specact.wire.images import MAX_HEADER_BYTES, MAX_SCANS, read_images, read_jpegs, to_jpeg
from specact.wire.messages import ask, encode, read_ask, request_of

Image = pytest.importorskip("PIL.Image")

SHAPE = (2, 12, 16, 3)
ONE = (1, *SHAPE[1:])
HERE = StepAddress(0, 0, 0, 0)


def gradient() -> NDArray[np.uint8]:
    frames = np.zeros(SHAPE, np.uint8)
    frames[0, :, :, 0] = np.linspace(0, 255, 16)
    frames[1, :, :, 2] = np.linspace(255, 0, 12)[:, None]
    return frames


def jpeg(size: tuple[int, int], mode: str = "RGB", kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A JPEG whose header says it has another size."""
    file = jpeg((16, 12))
    at = file.index(b"\xff\xc0") + 5
    return file[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + file[at + 4 :]


def progressive(scans: int) -> bytes:
    """A JPEG whose last scan, which changes nothing, is repeated until there are so many."""
    made = io.BytesIO()
    Image.new("RGB", (16, 12)).save(made, "JPEG", progressive=True)
    file, end = made.getvalue()[:-2], made.getvalue()[-2:]
    return file + file[file.rindex(b"\xff\xda") :] * (scans - file.count(b"\xff\xda")) + end


WHOLE = to_jpeg(gradient()[:1], 90)[0]


def padded(filler: bytes, size: int) -> bytes:
    return WHOLE[:2] + filler * (size // len(filler)) + WHOLE[2:]


def test_a_jpeg_is_read_as_pillow_reads_it() -> None:
    frames, files = gradient(), to_jpeg(gradient(), 90)
    for frame, file in zip(read_jpegs(files, "image", SHAPE), files, strict=True):
        np.testing.assert_array_equal(frame, np.asarray(Image.open(io.BytesIO(file)).convert("RGB")))
    # It is lossy: close, and not the same.
    assert 0 < np.abs(read_jpegs(files, "image", SHAPE).astype(int) - frames).mean() < 8
    assert sum(map(len, to_jpeg(frames, 10))) < sum(map(len, to_jpeg(frames, 95)))


def test_a_request_carries_frames_raw_or_as_jpeg() -> None:
    request = Request(window_of(SEEN), HERE)
    raw, files = (ask(request, CODES, "infer", 0, 1.0, None, quality) for quality in (None, 95))
    assert raw.jpegs is None and files.jpegs is not None and len(files.jpegs) == 2
    image = request.window["image"]
    np.testing.assert_array_equal(request_of(read_ask(encode(raw)), CODES).window["image"], image)
    again = request_of(read_ask(encode(files)), CODES).window
    np.testing.assert_array_equal(again["image"], read_jpegs(to_jpeg(image, 95), "image", image.shape))
    np.testing.assert_array_equal(again["state"], request.window["state"])


def test_another_number_of_frames_is_refused() -> None:
    spec = ObservationSpec({"image": Field(SHAPE[1:], "uint8", 2)})
    for count in (0, 1, 3):
        with pytest.raises(WireError, match="2"):
            read_images([WHOLE] * count, spec)
    assert read_images([WHOLE] * 2, spec)["image"].shape == SHAPE


REFUSED = {
    **{kind: jpeg((16, 12), kind=kind) for kind in ("PNG", "GIF", "BMP", "TIFF")},
    "nothing": b"",
    "a byte": b"\xff",
    **{
        f"{width} x {height}": claiming(width, height)
        for width, height in [(12, 16), (16, 13), (17, 12), (10_000, 10_000), (65_500, 65_500)]
    },
    # Each scan is a pass over the whole frame and takes twelve bytes: a message has room for seconds of them.
    "a scan too many": progressive(MAX_SCANS + 1),
    "thousands of scans": progressive(10_000),
    # Pillow reads headers in Python: without a limit, seconds for a message of the largest size.
    **{
        f"a long header of {filler[:2].hex()}": padded(filler, MAX_HEADER_BYTES + 8192)
        for filler in (b"\xff", b"\xff\xe0\x00\x02", b"\xff\xfe\x10\x00" + bytes(4094))
    },
}


@pytest.mark.parametrize("file", REFUSED.values(), ids=REFUSED)
def test_what_is_no_jpeg_of_this_size_is_refused_by_name(file: bytes) -> None:
    with pytest.raises(WireError, match=r"image\.front") as refused:
        read_jpegs([file], "image.front", ONE)
    assert refused.value.code == "bad_message"


@pytest.mark.parametrize("file", [progressive(10), progressive(MAX_SCANS), padded(b"\xff", MAX_HEADER_BYTES - 8192),
                                  *(jpeg((16, 12), mode) for mode in ("L", "CMYK"))])  # fmt: skip
def test_what_is_just_within_the_limits_is_read(file: bytes) -> None:
    assert read_jpegs([file], "image", ONE).shape == ONE


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file with a few stretches of bytes replaced by others, or by none."""
    file = bytearray(WHOLE)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(file)))
        file[at : at + draw(st.sampled_from((0, 1, 20, len(file))))] = draw(st.binary(max_size=10))
    return bytes(file)


@example_count(400)
@given(file=damaged())
@example(file=b"")
def test_a_damaged_jpeg_is_read_or_refused_and_nothing_else(file: bytes) -> None:
    try:
        assert read_jpegs([file], "image", ONE).shape == ONE
    except WireError as error:
        assert error.code == "bad_message"


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    files = to_jpeg(gradient(), 90)
    monkeypatch.setitem(sys.modules, "PIL", None)
    for call in (lambda: to_jpeg(gradient(), 90), lambda: read_jpegs(files, "image", SHAPE)):
        with pytest.raises(MissingExtraError, match="pillow"):
            call()
