"""FLASH and its controls, as compositions of the same parts; of some the verifier keeps a state of the robot."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from experiments.grid import by_name
from specact.lab.rollout.methods import Method, composed
from specact.pair import Answer, Target
from specact.rng import Role, StepAddress, StepStreams
from specact.systems.flash import Check, FlashVerifier, Round, RoundAnswer, Rounds
from specact.systems.flow import ROUNDS, FlowParts
from specact.types import Outcome, Proposal

_ACCEPT_ALL = Check(within=1e9, guarded=False)


@dataclass(frozen=True)
class ControlRounds(Rounds):
    """Rounds with another verifier, for a target in this process."""

    kind: type[FlashVerifier] = FlashVerifier
    local: ClassVar[bool] = True

    def verifier(self, parts: FlowParts, target: Target[RoundAnswer]) -> FlashVerifier:
        return self.kind(target, parts)


def controlled(kind: type[FlashVerifier], rounds: Rounds, about: str) -> ControlRounds:
    """The same rounds with this verifier."""
    values = {field.name: getattr(rounds, field.name) for field in fields(Rounds)}
    return ControlRounds(**values | {"about": about}, kind=kind)


class ShuffledVerifier(FlashVerifier):
    """Uses a random one of all verdicts so far: the same distribution, independent of the scene; one per robot."""

    def __init__(self, target: Target[RoundAnswer], parts: FlowParts) -> None:
        super().__init__(target, parts)
        self._streams = StepStreams()
        # Accepted actions of each check, and whether a gripper's change ended them.
        self._verdicts: list[tuple[int, bool]] = []

    def judge(self, answer: Answer[RoundAnswer], proposal: Proposal, address: StepAddress) -> Outcome:
        real = answer.value.round(proposal.evidence)
        used = self._exchanged(answer.value, proposal, real, address) if real.checked else real
        return used.outcome(self.parts, answer.times)

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


class StaleVerifier(FlashVerifier):
    """Checks on the prefix cache of the last full round, as in the released code; an episode's first round is full."""

    cache: Any = None

    def judge(self, answer: Answer[RoundAnswer], proposal: Proposal, address: StepAddress) -> Outcome:
        fresh, request = answer.value, proposal.evidence
        found = fresh.round(request) if request.full else replace(fresh, cache=self.cache).round(request)
        if found.full:
            fresh = replace(fresh, cache=fresh.target.policy.networks.cache([fresh.window]))
            self.cache = fresh.cache
            if not request.full:
                found = replace(fresh.round(replace(request, full=True)), checked=True, deviation=found.deviation)
        return found.outcome(self.parts, answer.times)


FLASH, FITTED = ROUNDS["flash"], ROUNDS["flash_fitted"]
_OTHERS = "the verdict of another of its rounds"


def _changed(name: str, base: str, about: str, **changes: Any) -> Method:
    return composed(name, replace(ROUNDS[base], about=about, **changes))


_FIT = {"levels": None, "within": None}
METHODS = by_name(
    *(composed(name, ROUNDS[name]) for name in ("full", "full_5", "full_3")),
    *(composed(name, ROUNDS[name], "full") for name in ("full_2", "full_1")),
    composed("flash", FLASH, "full", "full_2", "unchecked", "flash_last", "flash_unguarded", "flash_shuffled"),
    composed("flash_fitted", FITTED, "full", "full_2", "unchecked_fitted", "flash_fitted_shuffled"),
    composed(
        "flash_shuffled", controlled(ShuffledVerifier, FLASH, f"FLASH with {_OTHERS}, drawn at random: the control")
    ),
    composed(
        "flash_fitted_shuffled",
        controlled(ShuffledVerifier, FITTED, f"FLASH with fitted noise levels and delta, and {_OTHERS}: the control"),
    ),
    _changed(
        "flash_unguarded", "flash", "FLASH without guards and periodic full rounds", guarded=False, periodic=False
    ),
    composed("flash_stale", controlled(StaleVerifier, FLASH, "FLASH, checked on the cache of the last full round")),
    *(composed(name, ROUNDS[name]) for name in ("flash_device", "flash_last")),
    _changed("flash_last_fitted", "flash_last", "the fitted check of what is left of the last chunk", **_FIT),
    composed("flash_policy", ROUNDS["flash_policy"]),
    _changed("flash_policy_fitted", "flash_policy", "the fitted check of a draft policy's chunk", **_FIT),
    composed("block", ROUNDS["block"], "full"),
    composed("unchecked", ROUNDS["unchecked"]),
    _changed(
        "unchecked_fitted", "unchecked", rate_of="flash_fitted", **_FIT,
        about="drafts unchecked, as many full rounds as fitted FLASH, at random: the control",
    ),
)  # fmt: skip
