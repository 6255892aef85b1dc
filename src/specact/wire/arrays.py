"""Arrays as one string of bytes, whose layout both sides know from the handshake."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
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

    @property
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


class _Place:
    """Where the bytes of an array begin, and how they are checked."""

    __slots__ = ("bounds", "dtype", "name", "number", "offset", "shape", "size")

    def __init__(self, name: str, spec: ArraySpec, offset: int) -> None:
        self.name, self.shape, self.offset, self.size = name, spec.shape, offset, math.prod(spec.shape)
        self.dtype, self.bounds = np.dtype(spec.dtype), spec.bounds
        # The bytes of a bool may be others than 0 and 1.
        self.number = np.dtype(np.uint8) if spec.dtype is np.bool_ else self.dtype

    def array(self, payload: bytearray) -> NDArray[Any]:
        return np.ndarray(self.shape, self.dtype, payload, self.offset)

    def outside(self, payload: bytearray, count: int) -> bool:
        """Whether some of the ``count`` numbers from here on are out of bounds; a comparison with NaN is false."""
        assert self.bounds is not None
        numbers, (low, high) = np.frombuffer(payload, self.number, count, self.offset), self.bounds
        return int(np.count_nonzero((numbers >= low) & (numbers <= high))) < count


class Layout:
    """The arrays of one part of a message, one after the other, little-endian, those with the longest elements first.

    Args:
        specs: the arrays by name; of those with elements of one size the first given is the first.

    Attributes:
        specs: in the order of their bytes.
        nbytes, size: bytes and elements of all of them.
    """

    def __init__(self, specs: Mapping[str, ArraySpec]) -> None:
        self.specs = dict(sorted(specs.items(), key=lambda entry: -np.dtype(entry[1].dtype).itemsize))
        self._places: list[_Place] = []
        self.nbytes = 0
        for name, spec in self.specs.items():
            self._places.append(_Place(name, spec, self.nbytes))
            self.nbytes += self._places[-1].size * self._places[-1].dtype.itemsize
        self.size = sum(place.size for place in self._places)
        # Neighbours of one type with the same bounds are checked together.
        runs = [list(run) for _, run in groupby(self._places, lambda place: (place.number, place.bounds))]
        self._runs = [(run[0], sum(place.size for place in run)) for run in runs if run[0].bounds is not None]
        self._distributions = [place for place in self._places if self.specs[place.name].distribution]

    @classmethod
    def of(cls, observation: ObservationSpec, images: bool = True) -> Layout:
        """The layout of a window, with or without its camera frames."""
        fields = {name: field for name, field in observation.fields.items() if images or not field.is_image}
        return cls({name: ArraySpec(of.window_shape, _type_of(of.is_image)) for name, of in fields.items()})

    def describe(self) -> list[list[Any]]:
        """Name, type and shape of each array, in the order of their bytes."""
        return [[place.name, place.dtype.name, list(place.shape)] for place in self._places]

    def example(self) -> dict[str, NDArray[Any]]:
        """Valid arrays: uniform distributions, elsewhere the numbers nearest to zero."""
        values = {name: 1 / of.shape[-1] if of.distribution else np.clip(0, of.low, of.high)
                  for name, of in self.specs.items()}  # fmt: skip
        return {name: np.full(of.shape, values[name], of.dtype) for name, of in self.specs.items()}

    def pack(self, arrays: Arrays) -> bytearray:
        """The arrays as bytes.

        Raises:
            ValueError: if one is missing, or has another shape or type.
        """
        parts = []
        for place in self._places:
            array = arrays.get(place.name)
            if array is None or array.shape != place.shape or array.dtype != place.dtype:
                given = None if array is None else f"{array.dtype} {array.shape}"
                raise ValueError(f"{place.name} must be {place.dtype} {place.shape}, got {given}")
            parts.append(np.ascontiguousarray(array).data)
        return bytearray().join(parts)

    def unpack(self, payload: bytearray) -> dict[str, NDArray[Any]]:
        """The arrays in these bytes, whose memory they share, after :meth:`check`."""
        self.check(payload)
        return {place.name: place.array(payload) for place in self._places}

    def check(self, payload: bytearray) -> None:
        """Checks the number of bytes, and that every number is finite and in range.

        Raises:
            WireError: ``bad_message``, with the name of an array that is not allowed.
        """
        if len(payload) != self.nbytes:
            names = ", ".join(self.specs) or "no array"
            raise WireError("bad_message", f"{names} must have {self.nbytes} bytes together, got {len(payload)}")
        for first, count in self._runs:
            if first.outside(payload, count):
                raise self._refusal(payload)
        for place in self._distributions:
            if np.abs(np.add.reduce(place.array(payload), -1) - 1.0).max() > _SUM_WITHIN:
                raise WireError("bad_message", f"every row of {place.name} must be a distribution, with the sum 1")

    def _refusal(self, payload: bytearray) -> WireError:
        place = next(place for place in self._places if place.bounds and place.outside(payload, place.size))
        low, high = place.bounds or (0, 0)
        finite = np.isfinite(place.array(payload)).all()
        allowed = f"numbers from {low:g} to {high:g}" if finite else "finite numbers, neither NaN nor infinity"
        return WireError("bad_message", f"{place.name} must hold {allowed}")


def _type_of(is_image: bool) -> type[np.generic]:
    return np.uint8 if is_image else np.float32
