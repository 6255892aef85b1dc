"""Arrays as one string of bytes, whose layout both sides know from the handshake."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import WireError
from specact.observation import ObservationSpec

Arrays = Mapping[str, NDArray[Any]]
# A row of a distribution sums to 1 up to this.
_SUM_WITHIN = 1e-6


@dataclass(frozen=True)
class ArraySpec:
    """One array of a message.

    Attributes:
        shape, dtype: exact ones; bool, uint8, int16, int64, float16, float32 or float64.
        low, high: smallest and largest number allowed; floats are finite in any case.
        distribution: whether every row along the last axis is a distribution.
    """

    shape: tuple[int, ...]
    dtype: type[np.generic]
    low: float = -math.inf
    high: float = math.inf
    distribution: bool = False

    @cached_property
    def bounds(self) -> tuple[float, float] | None:
        """Smallest and largest number that it may hold; None if its type has no others."""
        if self.distribution:
            return 0.0, 1.0 + _SUM_WITHIN
        if np.issubdtype(self.dtype, np.floating):
            limit = float(np.finfo(np.dtype(self.dtype)).max)
            return max(self.low, -limit), min(self.high, limit)
        if self.dtype is np.bool_:
            return 0, 1
        return None if math.isinf(self.low) and math.isinf(self.high) else (self.low, self.high)

    def fault(self, array: NDArray[Any]) -> str:
        """What the array must hold, if it does not."""
        if self.bounds is None:
            return ""
        low, high = self.bounds
        # The bytes of a bool may be others than 0 and 1; a comparison with NaN is false.
        numbers = array.view(np.uint8) if self.dtype is np.bool_ else array
        if not ((numbers >= low) & (numbers <= high)).all():
            finite = np.isfinite(array).all()
            return f"numbers from {low:g} to {high:g}" if finite else "finite numbers, neither NaN nor infinity"
        if self.distribution and np.abs(np.add.reduce(array, -1) - 1.0).max() > _SUM_WITHIN:
            return "rows that are distributions, with the sum 1"
        return ""


class Layout:
    """The arrays of one part of a message, one after the other, little-endian, those with the longest elements first.

    Of those with elements of one size the first given is the first. ``specs`` are in the order of their bytes;
    ``nbytes`` and ``size`` are bytes and elements of all of them.
    """

    def __init__(self, specs: Mapping[str, ArraySpec]) -> None:
        self.specs = dict(sorted(specs.items(), key=lambda entry: -np.dtype(entry[1].dtype).itemsize))
        self._places, self.nbytes, self.size = dict[str, int](), 0, 0
        for name, spec in self.specs.items():
            self._places[name], size = self.nbytes, math.prod(spec.shape)
            self.nbytes, self.size = self.nbytes + size * np.dtype(spec.dtype).itemsize, self.size + size
        # Whether all are float32 that only have to be finite, which one operation checks.
        plain = ArraySpec((), np.float32).bounds
        self._plain = bool(specs) and all(
            spec.dtype is np.float32 and spec.bounds == plain for spec in self.specs.values()
        )

    @classmethod
    def for_window(cls, observation: ObservationSpec, images: bool = True) -> Layout:
        """The layout of a window, with or without its camera frames."""
        fields = {name: field for name, field in observation.fields.items() if images or not field.is_image}
        types = {name: np.uint8 if field.is_image else np.float32 for name, field in fields.items()}
        return cls({name: ArraySpec(field.window_shape, types[name]) for name, field in fields.items()})

    def describe(self) -> list[list[Any]]:
        """Name, type and shape of each array, in the order of their bytes."""
        return [[name, np.dtype(spec.dtype).name, list(spec.shape)] for name, spec in self.specs.items()]

    def example(self) -> dict[str, NDArray[Any]]:
        """Valid arrays: uniform distributions, elsewhere the numbers nearest to zero."""
        values = {name: 1 / spec.shape[-1] if spec.distribution else np.clip(0, spec.low, spec.high)
                  for name, spec in self.specs.items()}  # fmt: skip
        return {name: np.full(spec.shape, values[name], spec.dtype) for name, spec in self.specs.items()}

    def pack(self, arrays: Arrays) -> bytearray:
        """The arrays as bytes; ValueError if one is missing, or has another shape or type."""
        parts = []
        for name, spec in self.specs.items():
            array = arrays.get(name)
            if array is None or array.shape != spec.shape or array.dtype != spec.dtype:
                given = None if array is None else f"{array.dtype} {array.shape}"
                raise ValueError(f"{name} must be {np.dtype(spec.dtype)} {spec.shape}, got {given}")
            parts.append(array.tobytes())
        return bytearray().join(parts)

    def unpack(self, payload: bytearray) -> dict[str, NDArray[Any]]:
        """The arrays in these bytes, whose memory they share; WireError for what :meth:`faults` finds."""
        if faults := self.faults([payload]):
            raise faults[0]
        return self.views(payload)

    def views(self, payload: bytearray) -> dict[str, NDArray[Any]]:
        """The arrays in bytes that were checked already."""
        places = self._places
        return {name: np.ndarray(spec.shape, spec.dtype, payload, places[name]) for name, spec in self.specs.items()}

    def faults(self, payloads: Sequence[bytes | bytearray]) -> dict[int, WireError]:
        """Errors by index of those payloads that have another length, or numbers that are not finite or out of range.

        All are checked together; only where that fails, one by one.
        """
        if not (fault := self._fault(payloads)):
            return {}
        if len(payloads) == 1:
            return {0: WireError("bad_message", fault)}
        return {row: error for row, payload in enumerate(payloads) for error in self.faults([payload]).values()}

    def _fault(self, payloads: Sequence[bytes | bytearray]) -> str:
        joined = payloads[0] if len(payloads) == 1 else b"".join(payloads)
        if any(len(payload) != self.nbytes for payload in payloads):
            return f"{', '.join(self.specs) or 'no array'} must have {self.nbytes} bytes together, got {len(joined)}"
        if self._plain:
            numbers = np.frombuffer(joined, np.float32)
            # For small arrays this takes a fifth of the time of all().
            if np.count_nonzero(np.isfinite(numbers)) == numbers.size:
                return ""
        for name, spec in self.specs.items():
            shape, strides = (len(payloads), *spec.shape), (self.nbytes, *np.empty(spec.shape, spec.dtype).strides)
            array: NDArray[Any] = np.ndarray(shape, spec.dtype, joined, self._places[name], strides)
            if fault := spec.fault(array):
                return f"{name} must hold {fault}"
        return ""
