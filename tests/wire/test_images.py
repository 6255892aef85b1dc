"""Camera frames as JPEG are as Pillow reads them; anything else is a typed refusal."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.example_count import example_count
from tests.wire.contracts import CODES, HERE, SEEN, window_of

from specact.errors import MissingExtraError, WireError
from specact.wire.exchange import Request
from specact.wire.images import MAX_HEADER_BYTES, MAX_SCANS, read_jpegs, to_jpeg
from specact.wire.messages import ask, encode, read_ask, request_of

Image = pytest.importorskip("PIL.Image")

FRAMES = np.zeros((2, 12, 16, 3), np.uint8)
FRAMES[0, :, :, 0] = np.linspace(0, 255, 16)
FRAMES[1, :, :, 2] = np.linspace(255, 0, 12)[:, None]
ONE = FRAMES[:1].shape
WHOLE = to_jpeg(FRAMES[:1], 90)[0]


def image(mode: str = "RGB", kind: str = "JPEG", **options: bool) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (16, 12)).save(file, kind, **options)
    return file.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A JPEG whose header says it has another size."""
    at = WHOLE.index(b"\xff\xc0") + 5
    return WHOLE[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + WHOLE[at + 4 :]


def progressive(scans: int) -> bytes:
    """A JPEG whose last scan, which changes nothing, is repeated until there are so many."""
    file = image(progressive=True)
    last = file[file.rindex(b"\xff\xda") : -2]
    return file[:-2] + last * (scans - file.count(b"\xff\xda")) + file[-2:]


def padded(filler: bytes, size: int) -> bytes:
    return WHOLE[:2] + filler * (size // len(filler)) + WHOLE[2:]


def test_a_jpeg_is_read_as_pillow_reads_it() -> None:
    files = to_jpeg(FRAMES, 90)
    frames = read_jpegs(files, "image", FRAMES.shape)
    for frame, file in zip(frames, files, strict=True):
        np.testing.assert_array_equal(frame, np.asarray(Image.open(io.BytesIO(file)).convert("RGB")))
    # It is lossy: close, and not the same.
    assert 0 < np.abs(frames.astype(int) - FRAMES).mean() < 8
    assert sum(map(len, to_jpeg(FRAMES, 10))) < sum(map(len, to_jpeg(FRAMES, 95)))


def test_a_request_carries_frames_raw_or_as_jpeg() -> None:
    request = Request(window_of(SEEN), HERE)
    frames = request.window["image"]
    for quality, wanted in ((None, frames), (95, read_jpegs(to_jpeg(frames, 95), "image", frames.shape))):
        message = ask(request, CODES, "infer", 0, 1.0, None, quality)
        assert len(message.jpegs or ()) == (2 if quality else 0)
        window = request_of(read_ask(encode(message)), CODES).window
        np.testing.assert_array_equal(window["image"], wanted)
        np.testing.assert_array_equal(window["state"], request.window["state"])


SIZES = [(12, 16), (16, 13), (17, 12), (10_000, 10_000), (65_500, 65_500)]
LONG_HEADERS = [padded(filler, MAX_HEADER_BYTES + 8192)
                for filler in (b"\xff", b"\xff\xe0\x00\x02", b"\xff\xfe\x10\x00" + bytes(4094))]  # fmt: skip
REFUSED = {
    **{kind: image(kind=kind) for kind in ("PNG", "GIF", "BMP", "TIFF")}, "nothing": b"", "a byte": b"\xff",
    **{f"{width} x {height}": claiming(width, height) for width, height in SIZES},
    # Each scan is a pass over the whole frame and takes twelve bytes: a message has room for seconds of them.
    "a scan too many": progressive(MAX_SCANS + 1), "thousands of scans": progressive(10_000),
    # Pillow reads headers in Python: without a limit, seconds for a message of the largest size.
    **{f"a long header of {file[2:4].hex()}": file for file in LONG_HEADERS},
}  # fmt: skip


@pytest.mark.parametrize("file", REFUSED.values(), ids=REFUSED)
def test_what_is_no_jpeg_of_this_size_is_refused_by_name(file: bytes) -> None:
    with pytest.raises(WireError, match=r"image\.front") as refused:
        read_jpegs([file], "image.front", ONE)
    assert refused.value.code == "bad_message"


@pytest.mark.parametrize("file", [progressive(10), progressive(MAX_SCANS), padded(b"\xff", MAX_HEADER_BYTES - 8192),
                                  image("L"), image("CMYK")])  # fmt: skip
def test_what_is_just_within_the_limits_is_read(file: bytes) -> None:
    assert read_jpegs([file], "image", ONE).shape == ONE


STRETCH = st.tuples(st.integers(0, len(WHOLE)), st.sampled_from((0, 1, 20, len(WHOLE))), st.binary(max_size=10))


@example_count(400)
@given(damage=st.lists(STRETCH, max_size=4))
@example(damage=[(0, len(WHOLE), b"")])
def test_a_damaged_jpeg_is_read_or_refused_and_nothing_else(damage: list[tuple[int, int, bytes]]) -> None:
    file = bytearray(WHOLE)
    for at, length, replacement in damage:
        file[at : at + length] = replacement
    try:
        assert read_jpegs([bytes(file)], "image", ONE).shape == ONE
    except WireError as error:
        assert error.code == "bad_message"


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for call in (lambda: to_jpeg(FRAMES, 90), lambda: read_jpegs([WHOLE], "image", ONE)):
        with pytest.raises(MissingExtraError, match="pillow"):
            call()
