"""When a verification's outcome is executed: synchronously, or late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specact.errors import ConfigError
from specact.rng import StepAddress
from specact.types import NO_OFFLOAD, Miss, Outcome, Proposal
from specact.verification import Pending, Verifier

SKIPPED: Pending[Outcome | None] = Pending(lambda: None)
"""In place of the request of a step that is not verified, or whose verdict comes late."""


@dataclass(frozen=True, slots=True)
class LateVerdict:
    """A verdict that arrived after its chunk started.

    Attributes:
        result: the verdict.
        in_time: whether it can still be used: its chunk is being executed, and its observation is not too old.
    """

    result: Outcome | Miss
    in_time: bool


class Verdicts:
    """How a policy waits for the outcomes of its verifications; this one waits for each, as in the paper."""

    late: ClassVar[bool] = False

    @property
    def free(self) -> bool:
        """Whether another verification may be requested now."""
        return True

    def reset(self) -> None:
        """Forgets the episode."""

    def ask(
        self, verifier: Verifier, proposal: Proposal, address: StepAddress, seen_s: float
    ) -> Pending[Outcome | None]:
        """Requests verification of a step observed at ``seen_s`` [s]; the result is None if the verdict comes late."""
        return verifier.submit(proposal, address)

    def arrived(self, now: float, wanted: StepAddress | None) -> LateVerdict | None:
        """A late verdict that has arrived by ``now`` [s], or None; it can be used for the step ``wanted`` only."""
        return None


WAIT = Verdicts()


class LateVerdicts(Verdicts):
    """Executes the draft's chunk without waiting; a verdict that arrives meanwhile replaces its remaining actions.

    At most one verification is in flight. A request that cannot be sent is a miss at once.

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
        self.reset()

    @property
    def free(self) -> bool:
        return self._in_flight is None

    def reset(self) -> None:
        # A request, the address of its step, and the time of its observation.
        self._in_flight: tuple[Pending[Outcome], StepAddress, float] | None = None

    def ask(
        self, verifier: Verifier, proposal: Proposal, address: StepAddress, seen_s: float
    ) -> Pending[Outcome | None]:
        request = verifier.submit(proposal, address)
        if not request.sent:
            return Pending(lambda: Miss("disconnected", NO_OFFLOAD, sent=False))
        self._in_flight = request, address, seen_s
        return SKIPPED

    def arrived(self, now: float, wanted: StepAddress | None) -> LateVerdict | None:
        if self._in_flight is None or not self._in_flight[0].done():
            return None
        (request, address, seen_s), self._in_flight = self._in_flight, None
        # Taken in any case: the client counts its misses when they are taken.
        return LateVerdict(request.result(), in_time=address == wanted and now - seen_s <= self._max_age_s)
