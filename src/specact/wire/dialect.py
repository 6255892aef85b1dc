"""What one family of policies says on the wire, as data: which arrays cross with a request and with its reply."""

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
        shape: exactly.
        dtype: NumPy's, exactly.
        low, high: the smallest and the largest number allowed, inclusive.
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
            WireError: ``bad_message`` where it is missing or another.
        """
        found = array(fields, name, self.shape, self.dtype)
        if self.distribution:
            # In this order: the sum of huge numbers could overflow. Reductions of ufuncs take half the time that the
            # methods of the array take where there are few numbers.
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
    """What device and server of one pair say to each other.

    Attributes:
        family: its name.
        agreed: what both must have in common, as plain values; compared in the handshake.
        observation: what the target needs to see; it crosses with every request.
        exchanges: by the request's type; ``infer`` is always one of them.
        asks: the type that a step's request has.
    """

    family: str
    agreed: Mapping[str, Any]
    observation: ObservationSpec
    exchanges: Mapping[str, Exchange]
    asks: str = "infer"


class Codec(Protocol[A_co]):
    """A family's answers as arrays."""

    @property
    def dialect(self) -> Dialect:
        """What is said."""
        ...

    def read(self, arrays: Arrays) -> A_co:
        """The target's answer, from the reply to ``infer``."""
        ...


@runtime_checkable
class VerifyingCodec(Codec[A_co], Protocol[A_co]):
    """A family whose verification can be left to the server, with requests of type ``verify``."""

    def question(self, proposal: Proposal) -> Arrays:
        """What the request says of the proposal."""
        ...

    def outcome(self, arrays: Arrays, times: OffloadTimes) -> Outcome:
        """What is to be executed, from the reply."""
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
