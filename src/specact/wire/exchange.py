"""What of a family crosses the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

from specact.errors import WireError
from specact.observation import ObservationSpec, Window
from specact.rng import StepAddress
from specact.types import OffloadTimes, Outcome, Proposal
from specact.wire.arrays import Arrays, Layout

A_co = TypeVar("A_co", covariant=True)
# Largest size of a hello and of a welcome, and of everything in a message but arrays.
HANDSHAKE_BYTES = 65536


@dataclass(frozen=True)
class Kind:
    """One kind of request and its reply: the arrays of both, besides the window."""

    request: Layout
    reply: Layout


@dataclass(frozen=True)
class Contract:
    """What device and server agree on in the handshake.

    Attributes:
        family: name of the family.
        spec: settings that must be equal on both sides, as plain values.
        observation: the target's; a part of every request.
        kinds: of requests, by name. ``infer``, which has no arrays but the window, asks for the target's answer.
        step_kind: the kind of a step's request.
        stated: further settings in the welcome's spec, which need not be equal on both sides.
        fingerprint: of the target, which a device refuses to differ; empty where it is not known.
    """

    family: str
    spec: Mapping[str, Any]
    observation: ObservationSpec
    kinds: Mapping[str, Kind]
    step_kind: str = "infer"
    stated: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""

    @cached_property
    def window(self) -> Layout:
        """The window of a request."""
        return Layout.for_window(self.observation)

    @cached_property
    def vectors(self) -> Layout:
        """The window of a request whose camera frames are sent as JPEG."""
        return Layout.for_window(self.observation, images=False)

    def describe(self) -> dict[str, Any]:
        """The arrays of each kind of message, as plain values, for a welcome."""
        return {name: [kind.request.describe(), kind.reply.describe()] for name, kind in self.kinds.items()}

    @property
    def max_message_bytes(self) -> int:
        """Upper bound on the size of a message; twice the arrays, since openpi's clients send them in other types."""
        return HANDSHAKE_BYTES + 2 * max(
            max(self.window.nbytes + kind.request.nbytes, kind.reply.nbytes) for kind in self.kinds.values()
        )

    @property
    def array_bytes(self) -> tuple[int, int]:
        """Bytes of the arrays of a step's request and of its reply, as float32."""
        kind = self.kinds[self.step_kind]
        return self.observation.nbytes + 4 * kind.request.size, 4 * kind.reply.size


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the target sees it: window, the random stream's address, as on the device, and its kind's arrays."""

    window: Window
    address: StepAddress
    arrays: Arrays = field(default_factory=dict)


class Exchange(Protocol[A_co]):
    """The messages of a pair or a policy: how a device reads the replies, and how a server makes them.

    It may also have ``steady``, whether an inference takes as long for every request: a short one needs no thread then;
    and ``work(kind, request)``, what a request costs relative to ``infer``: those that differ are computed apart.

    Attributes:
        contract, name: what both sides agree on; of the pair or policy.
    """

    @property
    def contract(self) -> Contract: ...
    @property
    def name(self) -> str: ...

    def read(self, arrays: Arrays) -> A_co:
        """The target's answer, from the reply to ``infer``."""
        ...

    def answer(self, kind: str, requests: Sequence[Request]) -> Sequence[Arrays | WireError]:
        """The server's replies to requests of one kind, in one batch; a pure function, without state per robot.

        The server checks that they are finite and in range. A request that cannot be answered gets an error. Where the
        target is only on another machine, this raises BundleError.
        """
        ...


@runtime_checkable
class VerifyingExchange(Exchange[A_co], Protocol[A_co]):
    """An exchange of a family that can verify on the server, with requests of the kind ``verify``."""

    def request(self, proposal: Proposal) -> Arrays:
        """The request's arrays for a proposal; ConfigError if only a target in this process can answer it."""
        ...

    def outcome(self, arrays: Arrays, times: OffloadTimes) -> Outcome:
        """The outcome, from the reply's arrays."""
        ...
