"""When the outcome of a verification is executed: at once, because the robot waits for it, or late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from specact.errors import ConfigError
from specact.rng import StepAddress
from specact.types import Miss, OffloadTimes, Outcome, Proposal
from specact.verification import Pending, Verifier


@dataclass(frozen=True, slots=True)
class Arrived:
    """A verdict that came late.

    Attributes:
        found: what it says; None where it came too late to be used.
    """

    found: Outcome | Miss | None


class Verdicts(Protocol):
    """What a policy does between asking and knowing."""

    late: ClassVar[bool]

    @property
    def free(self) -> bool:
        """Whether another step may be asked about now."""
        ...

    def reset(self) -> None:
        """Forgets the episode."""
        ...

    def ask(self, verifier: Verifier, proposal: Proposal, address: StepAddress, seen_s: float) -> Outcome | Miss | None:
        """Asks about a step whose observation was made at ``seen_s`` [s]; None where the answer will come later."""
        ...

    def arrived(self, now: float, wanted: StepAddress | None) -> Arrived | None:
        """What has come late by ``now`` [s], if anything has; of use only for the step ``wanted``."""
        ...


class Wait:
    """The robot waits for every verdict, as in the paper."""

    late: ClassVar[bool] = False
    free = True

    def reset(self) -> None:
        """Nothing is remembered."""

    def ask(self, verifier: Verifier, proposal: Proposal, address: StepAddress, seen_s: float) -> Outcome | Miss:
        """See :class:`Verdicts`."""
        return verifier.submit(proposal, address).result()

    def arrived(self, now: float, wanted: StepAddress | None) -> None:
        """Nothing is late."""


WAIT = Wait()


@dataclass(frozen=True)
class _UnderWay:
    pending: Pending[Outcome]
    address: StepAddress
    seen_s: float


class LateVerdicts:
    """Nobody waits: the draft's chunk runs at once, and a verdict that arrives while it runs corrects what is left.

    While one is under way no other is asked for. Needs a verifier whose requests can leave ahead, one that draws on
    the device.

    Args:
        for_s: a verdict older than this after its observation is not used [s]; infinite for no limit.

    Raises:
        ConfigError: if that is not positive.
    """

    late: ClassVar[bool] = True

    def __init__(self, for_s: float) -> None:
        if not for_s > 0.0:
            raise ConfigError(f"the time for which late verdicts are used must be above 0 s, got {for_s}")
        self._for_s = for_s
        self._under_way: _UnderWay | None = None

    @property
    def free(self) -> bool:
        """See :class:`Verdicts`."""
        return self._under_way is None

    def reset(self) -> None:
        """See :class:`Verdicts`."""
        self._under_way = None

    def ask(self, verifier: Verifier, proposal: Proposal, address: StepAddress, seen_s: float) -> Miss | None:
        """See :class:`Verdicts`; a miss where the request cannot leave without waiting."""
        if not verifier.prefetch(proposal.window, address):
            return Miss("disconnected", OffloadTimes(), sent=False)
        self._under_way = _UnderWay(verifier.submit(proposal, address), address, seen_s)
        return None

    def arrived(self, now: float, wanted: StepAddress | None) -> Arrived | None:
        """See :class:`Verdicts`."""
        sent = self._under_way
        if sent is None or not sent.pending.done():
            return None
        self._under_way = None
        useful = sent.address == wanted and now - sent.seen_s <= self._for_s
        return Arrived(sent.pending.result() if useful else None)
