"""Verification of token policies for robots in lock step: one batch for all of them, with measured times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specact.families.tokens.policy import Tokens
from specact.families.tokens.verify import TokenTarget, token_outcome
from specact.pair import Pending, checked
from specact.rng import StepAddress
from specact.types import ActionUnits, Clock, Miss, OffloadTimes, Outcome, Proposal


class SharedClock(Clock):
    """The machine's clock for one of several robots, which can be set to leave out what it did for the others."""

    def __init__(self) -> None:
        self._others_s = 0.0

    def now(self) -> float:
        """See :class:`~specact.types.Clock`; monotonic if it is only set to times since the last reading."""
        return super().now() - self._others_s

    def set(self, now: float) -> None:
        """Sets the time [s]."""
        self._others_s += self.now() - now


class TokenBatch:
    """Answers all pending requests of several robots in one batch, at the first :meth:`Pending.result` of them.

    Args:
        target: in this process.
        units: of the actions.

    Attributes:
        greedy: tokens of the last batch's requests that were decoded greedily, because nothing was drafted, by address.
    """

    def __init__(self, target: TokenTarget, units: ActionUnits) -> None:
        self._target, self._units = target, units
        self.greedy: dict[StepAddress, Tokens] = {}
        self._pending: list[_Request] = []

    def verifier(self, clock: SharedClock) -> BatchVerifier:
        """The verifier of one robot with this clock."""
        return BatchVerifier(self, clock)

    def add(self, request: _Request) -> None:
        """Adds a request to the next batch."""
        self._pending.append(request)

    # Finite numbers can still overflow on their way to an action.
    @np.errstate(over="ignore", invalid="ignore")
    def answer(self) -> None:
        """Answers the pending requests; each takes the time of the batch divided by their number."""
        requests, self._pending = self._pending, []
        clock = Clock()
        started = clock.now()
        prefilled = self._target.prefill([request.proposal.window for request in requests])
        decoded = prefilled.decode([request.proposal.evidence.request for request in requests])
        times = OffloadTimes(target=(clock.now() - started) / len(requests))
        self.greedy = {
            request.address: one.tokens
            for request, one in zip(requests, decoded, strict=True)
            if sum(one.read) == len(one.read)
        }
        for request, one in zip(requests, decoded, strict=True):
            outcome = token_outcome(one, prefilled.policy, self._units, times)
            request.outcome = checked(outcome, request.proposal)


class BatchVerifier:
    """See :class:`~specact.pair.Verifier`.

    Args:
        batch: answers the requests.
        clock: the robot's; a request takes its share of the batch's time.
    """

    def __init__(self, batch: TokenBatch, clock: SharedClock) -> None:
        self._batch, self._clock = batch, clock

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        """See :class:`~specact.pair.Verifier`."""
        request = _Request(proposal, address)
        self._batch.add(request)

        def result() -> Outcome | Miss:
            started = self._clock.now()
            if request.outcome is None:
                self._batch.answer()
            assert request.outcome is not None
            self._clock.set(started + request.outcome.times.total)
            return request.outcome

        return Pending(result)


@dataclass
class _Request:
    proposal: Proposal
    address: StepAddress
    outcome: Outcome | Miss | None = None
