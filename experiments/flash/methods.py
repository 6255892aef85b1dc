"""FLASH and its controls, as compositions of the same parts."""

from __future__ import annotations

from dataclasses import replace

from experiments.flash.shuffled import shuffled
from experiments.grid import by_name
from specact.lab.rollout.methods import composed
from specact.systems.flash import Rounds

FLASH = Rounds("FLASH: a block drafts, the flow checks at 5 and 10 % of noise within .15", "block")
FITTED = replace(FLASH, about="FLASH with fitted noise levels and delta", levels=None, within=None)
UNCHECKED = Rounds(
    "drafts unchecked, as many full rounds as FLASH, at random: the control", "block", on_device=True, full=True,
    gate="random", rate_of="flash",
)  # fmt: skip


def _fitted(about: str, rounds: Rounds) -> Rounds:
    return replace(rounds, about=about, levels=None, within=None)


LAST = Rounds("FLASH's check of what is left of the last chunk", "last")
POLICY = Rounds("FLASH's check of a draft policy's chunk", "policy")
METHODS = by_name(
    composed("full", Rounds("every chunk in 10 steps")),
    composed("full_5", Rounds("every chunk in 5 steps", steps=5)),
    composed("full_3", Rounds("every chunk in 3 steps", steps=3)),
    composed("full_2", Rounds("every chunk in 2 steps: the control at FLASH's cost", steps=2), "full"),
    composed("full_1", Rounds("every chunk in 1 step", steps=1), "full"),
    composed("flash", FLASH, "full", "full_2", "unchecked", "flash_last", "flash_unguarded", "flash_shuffled"),
    composed("flash_fitted", FITTED, "full", "full_2", "unchecked_fitted", "flash_fitted_shuffled"),
    composed(
        "flash_shuffled",
        shuffled(FLASH, "FLASH with the verdict of another of its rounds, drawn at random: the control"),
    ),
    composed(
        "flash_fitted_shuffled",
        shuffled(
            FITTED, "FLASH with fitted noise levels and delta, and the verdict of another of its rounds: the control"
        ),
    ),
    composed(
        "flash_unguarded",
        replace(FLASH, about="FLASH without guards and periodic full rounds", guarded=False, periodic=False),
    ),
    composed("flash_stale", replace(FLASH, about="FLASH, checked on the cache of the last full round", stale=True)),
    composed("flash_device", replace(FLASH, about="FLASH, the block on the device", on_device=True)),
    composed("flash_last", LAST),
    composed("flash_last_fitted", _fitted("the fitted check of what is left of the last chunk", LAST)),
    composed("flash_policy", POLICY),
    composed("flash_policy_fitted", _fitted("the fitted check of a draft policy's chunk", POLICY)),
    composed(
        "block",
        replace(FLASH, about="FLASH's block alone, never checked: the control", on_device=True, gate="never"),
        "full",
    ),
    composed("unchecked", UNCHECKED),
    composed(
        "unchecked_fitted",
        replace(
            _fitted("drafts unchecked, as many full rounds as fitted FLASH, at random: the control", UNCHECKED),
            rate_of="flash_fitted",
        ),
    ),
)  # fmt: skip
