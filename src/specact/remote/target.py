"""The target on a server: its distribution for a device that samples, or its verdict, as in the paper."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from specact.errors import ConfigError, unknown_name
from specact.families.codes.bundle import Bundle
from specact.families.codes.spec import PolicySpec
from specact.remote.client import Line
from specact.remote.pending import Call
from specact.types import Proposal, Window
from specact.verifiers import Answer, Miss, SpeculativeVerifier, Verification, Verifier
from specact.wire.reply import DistributionReply, VerdictReply
from specact.wire.request import LONGEST_DEADLINE_MS, InferRequest, VerifyRequest


class RemoteTarget:
    """A :class:`~specact.verifiers.Target` behind a line; its requests can leave before the draft is computed.

    Args:
        line: to the server.
        spec: of the bundle on both sides.
        deadline_ms: how long a step's action may wait for the target, from the request's leaving [ms].

    Raises:
        ConfigError: if the deadline is not positive.
    """

    def __init__(self, line: Line, spec: PolicySpec, deadline_ms: float) -> None:
        self._line, self._spec = line, spec
        self._deadline_ms = positive_deadline(deadline_ms)
        self._ahead: tuple[Window, Call] | None = None

    def prefetch(self, window: Window) -> bool:
        """See :class:`~specact.verifiers.Target`; the reply to a request nobody asks for is dropped and counted."""
        call = self._call(window, patient=False)
        self._ahead = (window, call) if call.left else None
        return call.left

    def pending(self, window: Window) -> bool:
        """See :class:`~specact.verifiers.Target`; not for longer than the deadline."""
        return self._ahead is not None and self._ahead[0] is window and self._ahead[1].pending

    def ask(self, window: Window) -> Answer | Miss:
        """See :class:`~specact.verifiers.Target`."""
        asked = time.monotonic()
        ahead, self._ahead = self._ahead, None
        call = ahead[1] if ahead is not None and ahead[0] is window else self._call(window, patient=True)
        found = call.reply(self._spec, asked)
        if isinstance(found, Miss):
            return found
        reply, times = found
        return Answer(reply.target, times) if isinstance(reply, DistributionReply) else Miss("invalid", times)

    def _call(self, window: Window, patient: bool) -> Call:
        deadline_ms = self._deadline_ms
        return Call(
            self._line,
            "infer",
            lambda identity: InferRequest(identity, deadline_ms, window, self._line.report),
            deadline_ms / 1e3,
            patient,
        )


class RemoteVerifier:
    """A :class:`~specact.verifiers.Verifier` that leaves the sampling to the server, as in the paper.

    The request carries the address of the step's random stream, so that the codes are those the device would have
    drawn itself, bit for bit.

    Args:
        line, spec, deadline_ms: as for :class:`RemoteTarget`.
    """

    def __init__(self, line: Line, spec: PolicySpec, deadline_ms: float) -> None:
        self._line, self._spec = line, spec
        self._deadline_ms = positive_deadline(deadline_ms)

    def prefetch(self, window: Window) -> bool:
        """Nothing can leave ahead: the request carries the draft's codes."""
        return False

    def pending(self, window: Window) -> bool:
        """Never: nothing left ahead."""
        return False

    def verify(self, proposal: Proposal, rng: np.random.Generator) -> Verification | Miss:
        """See :class:`~specact.verifiers.Verifier`."""
        asked = time.monotonic()
        call = Call(
            self._line, "verify", lambda identity: self._request(identity, proposal, rng), self._deadline_ms / 1e3
        )
        found = call.reply(self._spec, asked)
        if isinstance(found, Miss):
            return found
        reply, times = found
        if not isinstance(reply, VerdictReply):
            return Miss("invalid", times)
        return Verification(reply.verdict, reply.chunk, None, times)

    def _request(self, identity: int, proposal: Proposal, rng: np.random.Generator) -> VerifyRequest:
        state = rng.bit_generator.state["state"]
        seed, (_, step, episode, robot) = int(state["key"][0]), map(int, state["counter"])
        return VerifyRequest(
            identity,
            self._deadline_ms,
            proposal.window,
            proposal.draft.probs,
            proposal.draft.conditional,
            proposal.codes,
            (seed, robot, episode, step),
            self._line.report,
        )


def remote_verifier(
    line: Line, bundle: Bundle, deadline_ms: float, sampling: Literal["device", "server"] = "device"
) -> Verifier:
    """Exact speculative sampling with the target on a server.

    Args:
        line: to the server.
        bundle: on this device.
        deadline_ms: how long a step's action may wait for the target [ms].
        sampling: where the final codes are drawn; both give the same ones. On the ``device`` requests can leave ahead
            of the draft, on the ``server`` it is as in the paper.

    Raises:
        ConfigError: for an unknown place or a deadline that is not positive.
    """
    if sampling not in ("device", "server"):
        raise unknown_name("place of sampling", sampling, ("device", "server"))
    if sampling == "server":
        return RemoteVerifier(line, bundle.spec, deadline_ms)
    return SpeculativeVerifier(RemoteTarget(line, bundle.spec, deadline_ms), bundle.tokenizer)


def positive_deadline(deadline_ms: float) -> float:
    """The deadline, if it is one.

    Raises:
        ConfigError: if it is not positive, or longer than the protocol allows.
    """
    if not 0.0 < deadline_ms <= LONGEST_DEADLINE_MS:
        raise ConfigError(f"a deadline lies between 0 and {LONGEST_DEADLINE_MS:.0f} ms, got {deadline_ms}")
    return deadline_ms
