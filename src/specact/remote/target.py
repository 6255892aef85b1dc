"""The target on a server: verification on the device, or on the server as in ADAHI's paper."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import numpy as np

from specact.errors import ConfigError, unknown_name
from specact.observation import Window
from specact.pair import Pair
from specact.remote.client import Client
from specact.remote.pending import send_request
from specact.rng import StepAddress
from specact.types import Outcome, Proposal
from specact.verification import Answer, Pending, Verifier, checked
from specact.wire.dialect import Codec, VerifyingCodec
from specact.wire.messages import MAX_DEADLINE_MS, Request

A = TypeVar("A")


class RemoteTarget(Generic[A]):
    """A :class:`~specact.verification.Target` on a server.

    Args:
        client: of the server.
        codec: of the pair on both sides.
        deadline_ms: deadline of a reply, from the sending of its request [ms].

    Raises:
        ConfigError: if the deadline is not positive.
    """

    def __init__(self, client: Client, codec: Codec[A], deadline_ms: float) -> None:
        self._client, self._codec = client, codec
        self._deadline_ms = positive_deadline(deadline_ms)

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """See :class:`~specact.verification.Target`."""
        client, deadline_ms = self._client, self._deadline_ms

        def request(identity: int) -> Request:
            return Request("infer", identity, deadline_ms, window, address, report=client.report)

        reply = send_request(client, "infer", request, deadline_ms / 1e3)
        return reply.then(lambda reply: Answer(self._codec.read(reply[0]), reply[1]))


class RemoteVerifier:
    """A :class:`~specact.verification.Verifier` whose verification runs on the server, as in ADAHI's paper.

    The request contains the address of the step's random stream, so that the server samples exactly what the device
    would have sampled.

    Args:
        client, deadline_ms: as for :class:`RemoteTarget`.
        codec: of the pair on both sides.
    """

    def __init__(self, client: Client, codec: VerifyingCodec[object], deadline_ms: float) -> None:
        self._client, self._codec = client, codec
        self._deadline_ms = positive_deadline(deadline_ms)

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """See :class:`~specact.verification.Verifier`."""
        client, arrays = self._client, self._codec.request_arrays(proposal)

        def request(identity: int) -> Request:
            return Request("verify", identity, self._deadline_ms, proposal.window, address, arrays, client.report)

        reply = send_request(client, "verify", request, self._deadline_ms / 1e3)
        return reply.then(lambda reply: checked(self._codec.outcome(*reply), proposal))


def remote_verifier(
    client: Client, pair: Pair[Any], deadline_ms: float, sampling: Literal["device", "server"] = "device"
) -> Verifier:
    """A pair's own verification, with the target on a server.

    Args:
        client: of the server.
        pair: on this device.
        deadline_ms: deadline of a reply [ms].
        sampling: where the outcome is sampled; both give the same outcome. On the ``server`` it is as in ADAHI's
            paper, for families with ``verify`` requests only. Token policies always decode on the server.

    Raises:
        ConfigError: for an unknown place, one that the family does not support, a deadline that is not positive, or a
            decoding that only a target in this process can do.
        BundleError: if the draft needs a network that is only on the server.
    """
    if sampling not in ("device", "server"):
        raise unknown_name("place of sampling", sampling, ("device", "server"))
    codec = pair.codec
    if sampling == "device" and codec.dialect.asks == "infer":
        return pair.verifier(RemoteTarget(client, codec, deadline_ms))
    if not isinstance(codec, VerifyingCodec):
        raise ConfigError(
            f"the server cannot verify for the family {codec.dialect.family!r}: its target only answers; choose "
            "sampling on the device"
        )
    check_requests(pair, codec)
    return RemoteVerifier(client, codec, deadline_ms)


def check_requests(pair: Pair[Any], codec: VerifyingCodec[Any]) -> None:
    """Refuses a pair whose proposals a server cannot verify, before a robot moves; drafts once.

    Raises:
        ConfigError: for a decoding that only a target in this process can do, or lacks a part.
        BundleError: if the draft needs a network that is only on the server.
    """
    codec.request_arrays(pair.drafter.propose(pair.observation.zeros(), np.random.default_rng(0)))


def positive_deadline(deadline_ms: float) -> float:
    """The deadline, checked.

    Raises:
        ConfigError: if it is not positive, or longer than the protocol allows.
    """
    if not 0.0 < deadline_ms <= MAX_DEADLINE_MS:
        raise ConfigError(f"a deadline must lie between 0 and {MAX_DEADLINE_MS:.0f} ms, got {deadline_ms}")
    return deadline_ms
