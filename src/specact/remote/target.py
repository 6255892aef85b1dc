"""The target on a server: its distribution for a device that samples, or its verdict, as in the paper."""

from __future__ import annotations

import time

import numpy as np

from specact.errors import ConfigError
from specact.policies.policy import PolicySpec
from specact.remote.call import Call
from specact.remote.line import Line
from specact.types import Proposal, Window
from specact.verifiers import Answer, Miss, Verification
from specact.wire.reply import DistributionReply, VerdictReply
from specact.wire.request import InferRequest, VerifyRequest


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

    def prefetch(self, window: Window) -> None:
        """See :class:`~specact.verifiers.Target`; the reply to a request nobody asks for is dropped and counted."""
        self._ahead = window, self._call(window)

    def ask(self, window: Window) -> Answer | Miss:
        """See :class:`~specact.verifiers.Target`."""
        asked = time.monotonic()
        ahead, self._ahead = self._ahead, None
        call = ahead[1] if ahead is not None and ahead[0] is window else self._call(window)
        found = call.reply(self._spec, asked)
        if isinstance(found, Miss):
            return found
        reply, times = found
        return Answer(reply.target, times) if isinstance(reply, DistributionReply) else Miss("invalid", times)

    def _call(self, window: Window) -> Call:
        deadline_ms = self._deadline_ms
        return Call(
            self._line, "infer", lambda identity: InferRequest(identity, deadline_ms, window), deadline_ms / 1e3
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

    def prefetch(self, window: Window) -> None:
        """Nothing can leave ahead: the request carries the draft's codes."""

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
        )


def positive_deadline(deadline_ms: float) -> float:
    """The deadline, if it is one.

    Raises:
        ConfigError: if it does not lie in (0, 60000].
    """
    if not 0.0 < deadline_ms <= 60_000.0:
        raise ConfigError(f"a deadline lies between 0 and 60000 ms, got {deadline_ms}")
    return deadline_ms
