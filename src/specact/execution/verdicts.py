"""When a verification's outcome is executed: synchronously, or late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from specact.errors import ConfigError
from specact.rng import StepAddress
from specact.types import Miss, OffloadTimes, Outcome, Proposal
from specact.verification import Pending, Verifier


@dataclass(frozen=True, slots=True)
class LateVerdict:
    """A verdict that arrived after its chunk started.

    Attributes:
        result: the verdict.
        in_time: whether it can still be used: its chunk is being executed, and its observation is not too old.
    """

    result: Outcome | Miss
    in_time: bool


class Verdicts(Protocol):
    """How a policy waits for the outcomes of its verifications."""

    late: ClassVar[bool]

    @property
    def free(self) -> bool:
        """Whether another verification may be requested now."""
        ...

    def reset(self) -> None:
        """Forgets the episode."""
        ...

    def ask(
        self, verifier: Verifier, proposal: Proposal, address: StepAddress, seen_s: float
    ) -> Pending[Outcome] | Miss | None:
        """Requests verification of a step observed at ``seen_s`` [s].

        Returns:
            The request whose outcome the step waits for, a miss, or None if the outcome is executed late.
        """
        ...

    def arrived(self, now: float, wanted: StepAddress | None) -> LateVerdict | None:
        """A late verdict that has arrived by ``now`` [s], or None; it can be used for the step ``wanted`` only."""
        ...


class Wait:
    """The robot waits for every verdict, as in the paper."""

    late: ClassVar[bool] = False
    free = True

    def reset(self) -> None:
        """Does nothing: there is no state."""

    def ask(self, verifier: Verifier, proposal: Proposal, address: StepAddress, seen_s: float) -> Pending[Outcome]:
        """See :class:`Verdicts`."""
        return verifier.submit(proposal, address)

    def arrived(self, now: float, wanted: StepAddress | None) -> None:
        """None: no verdict is late."""


WAIT = Wait()


@dataclass(frozen=True)
class _InFlight:
    pending: Pending[Outcome]
    address: StepAddress
    seen_s: float


class LateVerdicts:
    """Executes the draft's chunk without waiting; a verdict that arrives meanwhile replaces its remaining actions.

    At most one verification is in flight.

    Args:
        for_s: a verdict is not used later than this after its observation [s]; infinite for no limit.

    Raises:
        ConfigError: if that is not positive.
    """

    late: ClassVar[bool] = True

    def __init__(self, for_s: float) -> None:
        if not for_s > 0.0:
            raise ConfigError(f"the time for which late verdicts are used must be above 0 s, got {for_s}")
        self._max_age_s = for_s
        self._in_flight: _InFlight | None = None

    @property
    def free(self) -> bool:
        """See :class:`Verdicts`."""
        return self._in_flight is None

    def reset(self) -> None:
        """See :class:`Verdicts`."""
        self._in_flight = None

    def ask(self, verifier: Verifier, proposal: Proposal, address: StepAddress, seen_s: float) -> Miss | None:
        """See :class:`Verdicts`; a miss if the request cannot be sent."""
        pending = verifier.submit(proposal, address)
        if not pending.sent:
            return Miss("disconnected", OffloadTimes(), sent=False)
        self._in_flight = _InFlight(pending, address, seen_s)
        return None

    def arrived(self, now: float, wanted: StepAddress | None) -> LateVerdict | None:
        """See :class:`Verdicts`."""
        sent = self._in_flight
        if sent is None or not sent.pending.done():
            return None
        self._in_flight = None
        in_time = sent.address == wanted and now - sent.seen_s <= self._max_age_s
        # Taken in any case: the client counts its misses when they are taken.
        return LateVerdict(sent.pending.result(), in_time)
