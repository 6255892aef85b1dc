from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specact.errors import WireError
from specact.wire.arrays import ArraySpec, Layout

FLOATS: list[type[np.floating[Any]]] = [np.float16, np.float32, np.float64]
DTYPES = [np.bool_, np.uint8, np.int16, np.int64, *FLOATS]
LAYOUT = Layout({
    "flags": ArraySpec((3,), np.bool_), "codes": ArraySpec((2,), np.int64, 0, 4),
    "law": ArraySpec((2, 3), np.float64, distribution=True), "share": ArraySpec((2,), np.float32, 0.0, 1.0),
    "free": ArraySpec((2, 2), np.float32), "other": ArraySpec((1,), np.float32), "half": ArraySpec((2,), np.float16),
    "bytes": ArraySpec((2,), np.uint8), "kind": ArraySpec((1,), np.uint8, 0, 2),
})  # fmt: skip
SHAPES = st.lists(st.integers(1, 3), max_size=4).map(tuple)
SPECS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.builds(ArraySpec, SHAPES, st.sampled_from(DTYPES)), max_size=6
)


@given(SPECS, st.integers(0, 2**32))
def test_arrays_come_back_bit_for_bit_aligned_and_writable(specs: dict[str, ArraySpec], seed: int) -> None:
    layout, rng = Layout(specs), np.random.default_rng(seed)
    arrays: dict[str, NDArray[Any]] = {
        name: (rng.normal(size=spec.shape) * 3).astype(spec.dtype) for name, spec in specs.items()
    }
    for name, spec in specs.items():
        # The largest numbers are finite, and memory may lie in any order.
        if issubclass(spec.dtype, np.floating) and spec.shape:
            arrays[name].flat[0] = np.finfo(spec.dtype).max
            arrays[name] = np.repeat(np.asfortranarray(arrays[name]), 2, axis=0)[::2]
    payload = layout.pack(arrays)
    assert len(payload) == layout.nbytes == sum(array.nbytes for array in arrays.values())
    copies = layout.unpack(payload)
    for name, array in arrays.items():
        assert (copies[name].dtype, copies[name].shape) == (array.dtype, array.shape)
        assert copies[name].tobytes() == array.tobytes()
        assert copies[name].flags.aligned and copies[name].flags.writeable
    assert [name for name, *_ in layout.describe()] == list(layout.specs)
    sizes = [np.dtype(dtype).itemsize for _, dtype, _ in layout.describe()]
    assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(WireError, match=str(layout.nbytes)):
        layout.unpack(payload + b"x")


@pytest.mark.parametrize("wrong", [None, np.zeros((2, 2)), np.zeros(4, np.float32), np.zeros((2, 2), np.float64)])
def test_an_array_of_another_shape_or_type_is_not_sent(wrong: Any) -> None:
    with pytest.raises(ValueError, match="free"):
        LAYOUT.pack({**LAYOUT.example(), "free": wrong})


REFUSED = {
    "flags": [np.array([0, 1, 2], np.uint8)],
    "codes": [np.array([0, 5]), np.array([-1, 0])],
    "law": [np.full((2, 3), number) for number in (0.3, np.nan, 1e300)] + [np.array([[1.5, -0.5, 0.0], [1, 0, 0]])],
    "share": [np.array([0, 1.25], np.float32), np.array([np.nan, 0], np.float32)],
    "free": [np.array([[0, np.nan], [0, 0]], np.float32), np.array([[0, 0], [0, np.inf]], np.float32)],
    "other": [np.array([-np.inf], np.float32)],
    "half": [np.array([0, np.inf], np.float16)],
    "kind": [np.array([3], np.uint8)],
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, cases in REFUSED.items() for wrong in cases])
def test_what_is_not_finite_or_out_of_range_is_refused_by_name(name: str, wrong: NDArray[Any]) -> None:
    arrays, right = LAYOUT.example() | {name: wrong}, LAYOUT.pack(LAYOUT.example())
    payload = bytearray().join(arrays[key].tobytes() for key in LAYOUT.specs)
    with pytest.raises(WireError, match=rf"\b{name}\b") as refused:
        LAYOUT.unpack(payload)
    assert refused.value.code == "bad_message"
    # Of a batch those rows are found that are wrong, and no others.
    assert LAYOUT.faults([right, payload, right, payload[:-1], right, payload]).keys() == {1, 3, 5}
