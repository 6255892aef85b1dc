"""Camera frames: raw they come back as they were, as JPEG as Pillow reads them; anything else is a typed refusal."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray
from tests.example_count import example_count
from tests.wire.dialects import CODES, SPEC, of_codes

from specact.errors import MissingExtraError, WireError
from specact.observation import Field, ObservationSpec
from specact.wire import json, msgpack
from specact.wire.images import MAX_HEADER_BYTES, MAX_SCANS, read_image, to_jpeg
from specact.wire.messages import read_request
from specact.wire.sizes import max_message_bytes

Image = pytest.importorskip("PIL.Image")

SHAPE = (2, 12, 16, 3)


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


def test_a_jpeg_is_read_as_pillow_reads_it() -> None:
    frames = gradient()
    found = read_image(to_jpeg(frames, 90), "image", SHAPE)
    assert found.dtype == np.uint8
    for frame, file in zip(found, to_jpeg(frames, 90), strict=True):
        np.testing.assert_array_equal(frame, np.asarray(Image.open(io.BytesIO(file)).convert("RGB")))
    # It is lossy: close, and not the same.
    assert 0 < np.abs(found.astype(int) - frames).mean() < 8
    assert sum(map(len, to_jpeg(frames, 10))) < sum(map(len, to_jpeg(frames, 95)))


def test_a_request_carries_frames_raw_or_as_jpeg(examples: dict[str, dict[str, Any]]) -> None:
    seen = examples["infer"]["observation"]
    image = seen["image"]
    for codec in (msgpack, json):
        found = read_request(codec.decode(codec.encode(examples["infer"])), CODES).window["image"]
        np.testing.assert_array_equal(found, image)
    files = to_jpeg(image, 100)
    fields = examples["infer"] | {"observation": seen | {"image": files}}
    found = read_request(msgpack.decode(msgpack.encode(fields)), CODES).window["image"]
    np.testing.assert_array_equal(found, read_image(files, "image", image.shape))


def test_a_single_frame_without_a_history_is_an_array_of_three_axes_or_a_list_of_one_jpeg() -> None:
    frame = gradient()[0]
    assert read_image(frame, "image.front", frame.shape).shape == frame.shape
    assert read_image(to_jpeg(frame[None], 90), "image.front", frame.shape).shape == frame.shape
    for wrong in (to_jpeg(gradient(), 90), frame[None], [], to_jpeg(frame[None], 90)[0]):
        with pytest.raises(WireError, match=r"image\.front must be an array of .*"):
            read_image(wrong, "image.front", frame.shape)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_four_colours_become_rgb(mode: str) -> None:
    assert read_image([jpeg((16, 12), mode)] * 2, "image", SHAPE).shape == SHAPE


@pytest.mark.parametrize("file", [jpeg((16, 12), kind=kind) for kind in ("PNG", "GIF", "BMP", "TIFF")] + [b"", b"\xff"])
def test_other_formats_are_refused(file: bytes) -> None:
    with pytest.raises(WireError, match="not a readable JPEG"):
        read_image([file] * 2, "image", SHAPE)


@pytest.mark.parametrize("size", [(12, 16), (16, 13), (17, 12), (10_000, 10_000), (65_500, 65_500)])
def test_a_size_is_refused_by_its_header(size: tuple[int, int]) -> None:
    with pytest.raises(WireError, match=r"must be a JPEG of \(16, 12\) pixels, got \(\d+, \d+\)"):
        read_image([claiming(*size)] * 2, "image", SHAPE)


def progressive(scans: int) -> bytes:
    """A JPEG whose last scan, which changes nothing, is repeated until there are so many."""
    made = io.BytesIO()
    Image.new("RGB", (16, 12)).save(made, "JPEG", progressive=True)
    file, end = made.getvalue()[:-2], made.getvalue()[-2:]
    return file + file[file.rindex(b"\xff\xda") :] * (scans - file.count(b"\xff\xda")) + end


def test_a_jpeg_has_so_many_scans_and_no_more() -> None:
    """Each is a pass over the whole frame and takes twelve bytes: a message has room for ten seconds of them."""
    for scans in (10, MAX_SCANS):
        assert not read_image([progressive(scans)] * 2, "image", SHAPE).any()
    for scans in (MAX_SCANS + 1, 10_000):
        with pytest.raises(WireError, match=f"a JPEG of at most 64 scans, got {scans}; send a baseline") as refused:
            read_image([progressive(scans)] * 2, "image", SHAPE)
        assert refused.value.code == "bad_message"


@pytest.mark.parametrize("filler", [b"\xff", b"\xff\xe0\x00\x02", b"\xff\xfe\x10\x00" + bytes(4094)])
def test_a_jpeg_has_a_header_of_so_many_bytes_and_no_more(filler: bytes) -> None:
    """Pillow reads it in Python: without a limit, three seconds for a message of the largest size."""
    for size, fits in ((MAX_HEADER_BYTES - 8192, True), (MAX_HEADER_BYTES + 8192, False)):
        file = WHOLE[:2] + filler * (size // len(filler)) + WHOLE[2:]
        if fits:
            assert read_image([file], "image", (1, *SHAPE[1:])).any()
        else:
            with pytest.raises(WireError, match="with a header of at most 65536 bytes"):
                read_image([file], "image", (1, *SHAPE[1:]))


def test_the_usual_way_to_open_a_file_would_raise_an_error_of_its_own() -> None:
    """The wrong variant: neither an OSError nor a ValueError, so that no reader expects it."""
    with pytest.raises(Image.DecompressionBombError) as raised:
        Image.open(io.BytesIO(claiming(65_500, 65_500)), formats=["JPEG"])
    assert not isinstance(raised.value, OSError | ValueError | SyntaxError | EOFError | IndexError)


WHOLE = to_jpeg(gradient()[:1], 90)[0]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file with a few bytes changed, cut out or put in, or its end cut off."""
    file = bytearray(WHOLE)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(file)))
        match draw(st.sampled_from("xcpe")):
            case "x":
                file[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "c":
                del file[at : at + draw(st.integers(1, 20))]
            case "p":
                file[at:at] = draw(st.binary(max_size=10))
            case "e":
                del file[at:]
    return bytes(file)


@example_count(400)
@given(file=damaged())
@example(file=b"")
def test_a_damaged_jpeg_is_read_or_refused_and_nothing_else(file: bytes) -> None:
    try:
        assert read_image([file], "image", (1, *SHAPE[1:])).shape == (1, *SHAPE[1:])
    except WireError as error:
        assert error.code == "bad_message"


@pytest.mark.parametrize("size", [(1, 1), (2, 4), (96, 96), (240, 320)])
def test_even_noise_at_the_highest_quality_fits_into_a_message(
    size: tuple[int, int], examples: dict[str, dict[str, Any]]
) -> None:
    camera = Field((*size, 3), "uint8", 2)
    frames = np.random.default_rng(0).integers(0, 256, camera.window_shape).astype(np.uint8)
    files = []
    for frame in frames:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG", quality=100, subsampling=0)
        files.append(file.getvalue())
    seen = ObservationSpec({**SPEC.target.fields, "image": camera}, instruction=True)
    limit = max_message_bytes(of_codes(structs.replace(SPEC, target=seen)))
    observation = examples["verify"]["observation"] | {"image": files}
    assert len(msgpack.encode(examples["verify"] | {"observation": observation})) < limit


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    files = to_jpeg(gradient(), 90)
    monkeypatch.setitem(sys.modules, "PIL", None)
    for call in (lambda: to_jpeg(gradient(), 90), lambda: read_image(files, "image", SHAPE)):
        with pytest.raises(MissingExtraError, match="pillow"):
            call()
    read_image(gradient(), "image", SHAPE)  # raw frames need nothing
