"""The target on a server: its distribution for a device that samples, or its verdict, as in the paper."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from specact.errors import ConfigError, unknown_name
from specact.families.codes.bundle import Bundle
from specact.families.codes.spec import PolicySpec
from specact.families.codes.values import CodeDistribution
from specact.families.codes.verify import SpeculativeVerifier, code_outcome
from specact.remote.client import Line
from specact.remote.pending import Call
from specact.rng import StepAddress
from specact.types import Miss, Outcome, Proposal, Window
from specact.verification import Answer, Pending, Verifier, sound
from specact.wire.reply import DistributionReply, VerdictReply
from specact.wire.request import LONGEST_DEADLINE_MS, InferRequest, VerifyRequest


class RemoteTarget:
    """A :class:`~specact.verification.Target` on a server; its requests can leave before the draft is computed.

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
        self._ahead: tuple[StepAddress, Call] | None = None

    def prefetch(self, window: Window, address: StepAddress) -> bool:
        """See :class:`~specact.verification.Target`; the reply to a request nobody asks for is dropped and counted."""
        call = self._call(window, patient=False)
        self._ahead = (address, call) if call.left else None
        return call.left

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[CodeDistribution]]:
        """See :class:`~specact.verification.Target`; ``done`` is True at the deadline at the latest."""
        asked = time.monotonic()
        ahead, self._ahead = self._ahead, None
        call = ahead[1] if ahead is not None and ahead[0] == address else self._call(window, patient=True)
        return _Distribution(call, self._spec, asked)

    def _call(self, window: Window, patient: bool) -> Call:
        deadline_ms = self._deadline_ms
        return Call(
            self._line,
            "infer",
            lambda identity: InferRequest(identity, deadline_ms, window, self._line.report),
            deadline_ms / 1e3,
            patient,
        )


@dataclass(frozen=True, slots=True)
class _Distribution:
    """The target's distribution, on its way."""

    call: Call
    spec: PolicySpec
    asked: float

    def done(self) -> bool:
        return not self.call.pending

    def result(self) -> Answer[CodeDistribution] | Miss:
        found = self.call.reply(self.spec, self.asked)
        if isinstance(found, Miss):
            return found
        reply, times = found
        return Answer(reply.target, times) if isinstance(reply, DistributionReply) else Miss("invalid", times)


class RemoteVerifier:
    """A :class:`~specact.verification.Verifier` that leaves the sampling to the server, as in the paper.

    The request carries the address of the step's random stream, so that the codes are those the device would have
    drawn itself, bit for bit.

    Args:
        line, spec, deadline_ms: as for :class:`RemoteTarget`.
    """

    def __init__(self, line: Line, spec: PolicySpec, deadline_ms: float) -> None:
        self._line, self._spec = line, spec
        self._deadline_ms = positive_deadline(deadline_ms)

    def prefetch(self, window: Window, address: StepAddress) -> bool:
        """Nothing can leave ahead: the request carries the draft's codes."""
        return False

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """See :class:`~specact.verification.Verifier`."""
        asked, line, drafted = time.monotonic(), self._line, proposal.evidence

        def request(identity: int) -> VerifyRequest:
            return VerifyRequest(
                identity,
                self._deadline_ms,
                proposal.window,
                drafted.draft.probs,
                drafted.draft.conditional,
                drafted.codes,
                address,
                line.report,
            )

        return _Verdict(Call(line, "verify", request, self._deadline_ms / 1e3), self._spec, asked)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The server's verdict, on its way."""

    call: Call
    spec: PolicySpec
    asked: float

    def done(self) -> bool:
        return not self.call.pending

    def result(self) -> Outcome | Miss:
        found = self.call.reply(self.spec, self.asked)
        if isinstance(found, Miss):
            return found
        reply, times = found
        if not isinstance(reply, VerdictReply) or not sound(reply.chunk):
            return Miss("invalid", times)
        return code_outcome(reply.verdict, reply.chunk, times, None)


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
        raise ConfigError(f"a deadline must lie between 0 and {LONGEST_DEADLINE_MS:.0f} ms, got {deadline_ms}")
    return deadline_ms
