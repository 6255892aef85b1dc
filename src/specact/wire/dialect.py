"""A family's wire schema as data: the arrays of a request and of its reply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specact.observation import ObservationSpec
from specact.rng import StepAddress
from specact.types import OffloadTimes, Outcome, Proposal
from specact.wire.checks import array, bad

Arrays = Mapping[str, NDArray[Any]]
A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True)
class ArraySpec:
    """One array of a message.

    Attributes:
        shape: exact shape.
        dtype: exact NumPy dtype.
        low, high: smallest and largest value allowed, inclusive.
        distribution: whether every row along the last axis is a distribution.
    """

    shape: tuple[int, ...]
    dtype: type[np.generic]
    low: float = -math.inf
    high: float = math.inf
    distribution: bool = False

    def read(self, fields: Mapping[str, Any], name: str) -> NDArray[Any]:
        """The array of this name.

        Raises:
            WireError: ``bad_message`` if it is missing or does not match.
        """
        found = array(fields, name, self.shape, self.dtype)
        if self.distribution:
            # The range is checked first because a sum could overflow. On small arrays ufunc.reduce takes half the time
            # of the array method.
            low, high = np.minimum.reduce(found, None), np.maximum.reduce(found, None)
            off = np.abs(np.add.reduce(found, -1) - 1.0) if high <= 2.0 else np.array(math.inf)
            if low < 0.0 or not np.maximum.reduce(off, None) <= 1e-6:
                raise bad(f"every row of {name} must be a distribution: no negative values, sum 1")
        elif (self.low > -math.inf and found.min() < self.low) or (self.high < math.inf and found.max() > self.high):
            raise bad(f"{name} must lie in [{self.low:g}, {self.high:g}]")
        return found


@dataclass(frozen=True)
class Exchange:
    """One kind of request and its reply.

    Attributes:
        request: arrays of the request besides the observation.
        answer: type of the reply.
        reply: its arrays.
    """

    request: Mapping[str, ArraySpec]
    answer: str
    reply: Mapping[str, ArraySpec]


@dataclass(frozen=True)
class Dialect:
    """The wire schema of a pair, shared by device and server.

    Attributes:
        family: its name.
        agreed: settings that must be equal on both sides, as plain values; compared in the handshake.
        observation: the target's observation spec; part of every request.
        exchanges: by the request's type; ``infer`` is always one of them.
        asks: type of a step's request.
    """

    family: str
    agreed: Mapping[str, Any]
    observation: ObservationSpec
    exchanges: Mapping[str, Exchange]
    asks: str = "infer"


class Codec(Protocol[A_co]):
    """Converts a family's answers from arrays."""

    @property
    def dialect(self) -> Dialect:
        """The wire schema."""
        ...

    def read(self, arrays: Arrays) -> A_co:
        """The target's answer, from the reply to ``infer``."""
        ...


@runtime_checkable
class VerifyingCodec(Codec[A_co], Protocol[A_co]):
    """A codec of a family that can verify on the server, with requests of type ``verify``."""

    def request_arrays(self, proposal: Proposal) -> Arrays:
        """The request's arrays for a proposal."""
        ...

    def outcome(self, arrays: Arrays, times: OffloadTimes) -> Outcome:
        """The outcome from the reply's arrays."""
        ...


def read_arrays(fields: Mapping[str, Any], specs: Mapping[str, ArraySpec]) -> dict[str, NDArray[Any]]:
    """Every array of a message.

    Raises:
        WireError: ``bad_message``.
    """
    return {name: spec.read(fields, name) for name, spec in specs.items()}


def read_address(fields: Mapping[str, Any]) -> StepAddress:
    """Seed, robot, episode and step of a request.

    Raises:
        WireError: ``bad_message``.
    """
    address = fields.get("address")
    whole = isinstance(address, list) and all(type(value) is int and 0 <= value < 2**64 for value in address)
    if not isinstance(address, list) or len(address) != 4 or not whole:
        raise bad("address must be [seed, robot, episode, step], integers from 0 to 2^64 - 1")
    return StepAddress(*address)
