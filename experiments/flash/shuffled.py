"""The control of FLASH's check: every check is made, and the verdict of another round of the same robot is used."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from specact.pair import Answer, Target
from specact.rng import Role, StepAddress, StepStreams
from specact.systems.flash import Check, FlashVerifier, Round, RoundAnswer, Rounds
from specact.types import ActionUnits, Outcome, Proposal

_ACCEPT_ALL = Check(within=float("inf"), guarded=False)


@dataclass(frozen=True)
class ShuffledRounds(Rounds):
    """Rounds whose verdicts are shuffled; only for a target in this process."""

    @property
    def local(self) -> bool:
        return True

    def verifier(self, target: Target[RoundAnswer], units: ActionUnits, execute: int) -> FlashVerifier:
        return ShuffledVerifier(target, units, execute)


def shuffled(rounds: Rounds, about: str) -> ShuffledRounds:
    """The same rounds with shuffled verdicts."""
    values = {field.name: getattr(rounds, field.name) for field in fields(Rounds)}
    return ShuffledRounds(**values | {"about": about})


class ShuffledVerifier(FlashVerifier):
    """Uses a random one of all verdicts so far: the same distribution, independent of the scene; one per robot."""

    def __init__(self, target: Target[RoundAnswer], units: ActionUnits, execute: int) -> None:
        super().__init__(target, units, execute)
        self._streams = StepStreams()
        # Accepted actions of each check, and whether a gripper's change ended them.
        self._verdicts: list[tuple[int, bool]] = []

    def judge(self, answer: Answer[RoundAnswer], proposal: Proposal, address: StepAddress) -> Outcome:
        real = answer.value.round(proposal.evidence)
        used = self._exchanged(answer.value, proposal, real, address) if real.checked else real
        return used.outcome(self.units, self.execute, answer.times)

    def _exchanged(self, answer: RoundAnswer, proposal: Proposal, real: Round, address: StepAddress) -> Round:
        self._verdicts.append((real.accepted, real.switches))
        drawn = self._verdicts[self._streams(Role.GATE, address).integers(len(self._verdicts))]
        if drawn == (real.accepted, real.switches):
            return real
        if drawn[0] == 0:
            full = answer.round(replace(proposal.evidence, full=True, drafted=None))
            return replace(full, checked=True, deviation=real.deviation)
        whole = answer.round(replace(proposal.evidence, check=_ACCEPT_ALL))
        return replace(whole, accepted=drawn[0], switches=drawn[1], deviation=real.deviation)
