"""FLASH and each of its controls, as compositions of the same parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specact.errors import unknown_name
from specact.families.freqcache.cached import Reuse

Proposes = Literal["nothing", "block", "last", "policy"]


@dataclass(frozen=True)
class Rounds:
    """One composition. A full round denoises a chunk in several steps; a checked round verifies a drafted chunk.

    Attributes:
        about: one line for a table.
        proposes: the drafter: none, so that every round is full; FLASH's block; the remainder of the last chunk, padded
            with its last action; or a draft policy.
        on_device: whether the block drafts on the device, which then needs the target's encoder; otherwise the target's
            own block drafts, on the same tokens that the check uses.
        levels, within: of the :class:`~specact.families.flash.check.Check`; None for those fitted to the target, see
            :class:`~specact.families.flash.bundle.FlashSettings`.
        guarded: whether changes of a gripper end the accepted prefix and cause a full round.
        periodic: whether full rounds are forced with the settings' period.
        stale: whether the check uses the prefix cache of the last full round, as in the released code, instead of a new
            one. Only for a target in this process.
        full: whether only full rounds are requested; steps that are not transmitted execute the draft.
        shuffled: whether each check uses the verdict of a random other check of the same robot. Only for a target in
            this process.
        steps: Euler steps of a full round.
        reuse: how prefix tokens are reused between rounds; None computes a new prefix in every round. Only for a target
            in this process with a refresh, see :func:`specact.families.freqcache.load_refresh`.
        gate: decides which steps are transmitted.
        rate_of: for random controls: the composition whose share of full rounds is used.
    """

    about: str
    proposes: Proposes = "nothing"
    on_device: bool = False
    levels: tuple[float, ...] | None = (0.1, 0.05)
    within: float | None = 0.15
    guarded: bool = True
    periodic: bool = True
    stale: bool = False
    full: bool = False
    shuffled: bool = False
    steps: int = 10
    reuse: Reuse | None = None
    gate: str = "always"
    rate_of: str | None = None


ROUNDS: dict[str, Rounds] = {
    "full": Rounds("every chunk in 10 steps"),
    "full_5": Rounds("every chunk in 5 steps", steps=5),
    "full_3": Rounds("every chunk in 3 steps", steps=3),
    "full_2": Rounds("every chunk in 2 steps: the control at FLASH's cost", steps=2),
    "full_1": Rounds("every chunk in 1 step", steps=1),
    "flash": Rounds("FLASH: a block drafts, the flow checks at 5 and 10 % of noise within .15", "block"),
    "flash_fitted": Rounds("FLASH with fitted noise levels and delta", "block", levels=None, within=None),
    "flash_shuffled": Rounds(
        "FLASH with the verdict of another of its rounds, drawn at random: the control", "block", shuffled=True
    ),
    "flash_fitted_shuffled": Rounds(
        "FLASH with fitted noise levels and delta, and the verdict of another of its rounds: the control",
        "block", levels=None, within=None, shuffled=True,
    ),
    "flash_unguarded": Rounds("FLASH without guards and periodic full rounds", "block", guarded=False, periodic=False),
    "flash_stale": Rounds("FLASH, checked on the cache of the last full round", "block", stale=True),
    "flash_device": Rounds("FLASH, the block on the device", "block", on_device=True),
    "flash_last": Rounds("FLASH's check of what is left of the last chunk", "last"),
    "flash_last_fitted": Rounds("the fitted check of what is left of the last chunk", "last", levels=None, within=None),
    "flash_policy": Rounds("FLASH's check of a draft policy's chunk", "policy"),
    "flash_policy_fitted": Rounds("the fitted check of a draft policy's chunk", "policy", levels=None, within=None),
    "block": Rounds("FLASH's block alone, never checked: the control", "block", on_device=True, gate="never"),
    "unchecked": Rounds(
        "drafts unchecked, as many full rounds as FLASH, at random: the control",
        "block", on_device=True, full=True, gate="random", rate_of="flash",
    ),
    "unchecked_fitted": Rounds(
        "drafts unchecked, as many full rounds as fitted FLASH, at random: the control",
        "block", on_device=True, full=True, gate="random", rate_of="flash_fitted",
    ),
    "freqcache": Rounds("FreqCache: the tokens of smooth patches reused, moved with the picture", reuse=Reuse()),
    "freqcache_2": Rounds("FreqCache, and 2 steps", steps=2, reuse=Reuse()),
    "freqcache_still": Rounds("FreqCache without motion: tokens stay in place", reuse=Reuse(remaps=False)),
    "freqcache_all": Rounds(
        "every token of the overlap reused, edges and budget ignored", reuse=Reuse(least=1.0, most=1.0, refreshed=0.0)
    ),
    "freqcache_random": Rounds("FreqCache with as many tokens reused, any of them", reuse=Reuse(first="random")),
    "freqcache_oldest": Rounds(
        "FreqCache with as many tokens reused, those that were computed last", reuse=Reuse(first="oldest")
    ),
    "freqcache_changed": Rounds(
        "tokens of the patches that changed least reused, in place, as many", reuse=Reuse(remaps=False, first="changed")
    ),
    "freqcache_frozen": Rounds(
        "the cameras' tokens computed once in an episode: the control",
        reuse=Reuse(least=1.0, most=1.0, refreshed=0.0, remaps=False),
    ),
}  # fmt: skip


def load_rounds(name: str) -> Rounds:
    """The composition of this name.

    Raises:
        ConfigError: if there is none.
    """
    if name not in ROUNDS:
        raise unknown_name("way to come to a chunk", name, ROUNDS)
    return ROUNDS[name]
