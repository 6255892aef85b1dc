"""Spec-VLA, KERV and HeiSD, and each of their controls, as compositions of the same parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from specact.families.tokens.pair import Decoding
from specact.families.tokens.policy import BINS
from specact.families.tokens.speculative import Tokens
from specact.lab.rollout.methods import composed
from specact.observation import Window
from specact.systems.kerv import Kerv, KervDrafter
from specact.systems.tokens import DECODINGS


class OtherDrafter(KervDrafter):
    """The drafter of :class:`Other`."""

    def candidates(self, window: Window, rng: np.random.Generator) -> Tokens:
        policy, proposes = self.parts.policy, self.decoding.proposes
        if proposes == "random":
            return rng.integers(BINS, size=(1, policy.networks.length))
        if proposes == "perfect":
            return policy.decode([window])[0].tokens[None]
        return self.extrapolated("velocity")[None] if self.executed else super().candidates(window, rng)


@dataclass(frozen=True)
class Other(Kerv):
    """``random`` tokens, the target's own chunk (``perfect``: what any drafter can gain) or KERV's ``filter`` draft."""

    then: str = "none"
    bins: int = 0
    adapts: None = None
    tail: None = None
    drafts = OtherDrafter

    @property
    def learned(self) -> bool:
        return super().learned or self.proposes == "filter"


def varied(name: str, about: str, **changes: object) -> Decoding:
    """A decoding of the package with other values of some fields."""
    return replace(DECODINGS[name], about=about, **changes)  # type: ignore[arg-type]


LAST = Decoding("", "last", then="head", bins=9)
DEFINED: dict[str, Decoding] = {
    **DECODINGS,
    "strict_bigram": Decoding("a bigram table drafts, equal tokens are accepted", then="bigram"),
    "strict_draft": Decoding("the draft policy drafts, equal tokens are accepted", "draft"),
    **{f"specvla_{bins}": varied("specvla", f"Spec-VLA within {bins} bins", bins=bins) for bins in (5, 15, 20)},
    "specvla_uniform": varied("specvla", "Spec-VLA within 9 bins, the gripper too", uniform=True),
    "bigram": Decoding("a bigram table drafts, within 9 bins", then="bigram", bins=9),
    "filter": Other("a Kalman filter drafts, within 9 bins", "filter", bins=9),
    "random_tokens": Other("random tokens draft, within 9 bins", "random", bins=9),
    "perfect": Other("the target's own tokens draft: what is left beside the proposal is the best case", "perfect"),
    "kerv_printed": varied("kerv", "KERV with the tolerance's rule as printed", adapts="printed"),
    "kerv_fixed": varied("kerv", "KERV within 9 bins always", adapts=None, bins=9),
    "kerv_walk": varied("kerv", "KERV with a random walk's tail", tail="walk"),
    "kerv_chunk_tail": varied("kerv", "KERV whose tail fills the rest of the chunk, not of the action", tail_actions=4),
    "kerv_one": varied("kerv", "KERV, one action executed per inference, as in its paper", execute=1),
    "kerv_no_tail_one": varied("kerv_no_tail", "KERV's tolerance alone, one action executed per inference", execute=1),
    "heisd_fixed_no_switch_random": varied(
        "heisd_fixed_random", "the memory, verified at random at the rate of the pattern without a switch: the control",
        rate_of="heisd_fixed_no_switch",
    ),
    "last_random": replace(
        LAST, about="the last action instead of the memory, verified at random at the rate of HeiSD's released code: "
        "the control", gate="random", rate_of="heisd_fixed",
    ),
    "last_fixed": replace(
        LAST, about="the last action instead of the memory, two of three inferences not verified: the control",
        gate="periodic",
    ),
}  # fmt: skip
# In the order of the page, with their rivals.
RIVALS: dict[str, tuple[str, ...]] = {
    "ar": (), "strict": ("ar",), "strict_last": (), "strict_bigram": (), "strict_draft": (),
    "specvla": ("ar", "last", "specvla_uniform"), "specvla_5": (), "specvla_15": (), "specvla_20": (),
    "specvla_uniform": (), "specvla_device": (), "last": (), "bigram": (), "filter": (), "draft_9": (),
    "random_tokens": (), "perfect": (),
    "kerv": ("ar", "kerv_fixed", "kerv_no_tail", "kerv_last", "kerv_walk", "kerv_printed"),
    "kerv_printed": (), "kerv_fixed": (), "kerv_walk": (), "kerv_last": (), "kerv_no_tail": (),
    "kerv_chunk_tail": ("kerv", "kerv_no_tail", "ar"), "kerv_one": ("kerv_no_tail_one",), "kerv_no_tail_one": (),
    "heisd": ("ar",), "heisd_no_switch": (),
    "heisd_similar": ("ar", "heisd_similar_random", "heisd_fixed_no_switch"),
    "heisd_similar_random": (),
    "heisd_fixed": ("ar", "heisd_fixed_random", "last_random", "heisd_fixed_no_switch"),
    "heisd_fixed_random": (), "last_random": (),
    "heisd_fixed_no_switch": ("ar", "heisd_fixed_no_switch_random", "last_fixed", "draft_fixed"),
    "heisd_fixed_no_switch_random": (), "last_fixed": (), "draft_fixed": (), "retrieval": ("ar",),
}  # fmt: skip
METHODS = {name: composed(name, DEFINED[name], *rivals) for name, rivals in RIVALS.items()}
