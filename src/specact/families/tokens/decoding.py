"""Decodings of a chunk of tokens: each system, and each of its controls, is a composition of the same parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specact.errors import unknown_name
from specact.families.tokens.threshold import Rule

Proposes = Literal["nothing", "draft", "last", "filter", "retrieval", "head", "random", "perfect"]
Tail = Literal["velocity", "walk", "last"]


@dataclass(frozen=True)
class Decoding:
    """One composition.

    Attributes:
        about: one line for a table.
        proposes: candidates from the device: none, the chunk of a draft policy, the last executed action repeated, an
            extrapolation of executed actions, chunks retrieved from a memory of the target's own, a tree of Spec-VLA's
            head from the last verified chunk, random tokens, or the target's own chunk, which bounds what any drafter
            can gain.
        then: the target's own drafter if the device proposes nothing, or after its candidates were rejected: ``none``,
            ``bigram``, or ``head`` (Spec-VLA's).
        bins: tolerance of a token; the maximum if it adapts.
        least: the minimum if it adapts.
        adapts: KERV's rule for the tolerance; None leaves it fixed.
        total: tolerance of a group's sum, with HeiSD's acceptance by groups; None accepts every token by itself.
        uniform: whether the tolerance also applies to a gripper, as in Spec-VLA's paper.
        tail: KERV's compensation: the replacement of everything from the first rejected token on.
        plain_steps: minimum number of inferences without compensation between two with it.
        switches: whether retrieval proposes only when the robot moves fast and straight (HeiSD's kinematic metric).
        gate: decides which steps are verified.
        rate_of: for random controls: the decoding whose achieved rate is used.
    """

    about: str
    proposes: Proposes = "nothing"
    then: str = "none"
    bins: int = 0
    least: int = 5
    adapts: Rule | None = None
    total: int | None = None
    uniform: bool = False
    tail: Tail | None = None
    plain_steps: int = 4
    switches: bool = False
    gate: str = "always"
    rate_of: str | None = None

    @property
    def learned(self) -> bool:
        """Whether it needs drafters or filters fitted to the target."""
        return (
            self.then != "none"
            or self.proposes in ("filter", "retrieval", "head")
            or self.tail in ("velocity", "walk")
            or (self.bins > 0 and not self.uniform)
        )


def _kerv(about: str, tail: Tail | None = "velocity", adapts: Rule | None = "repaired", bins: int = 15) -> Decoding:
    return Decoding(about, then="head", bins=bins, adapts=adapts, tail=tail)


def _heisd(about: str, gate: str = "verify_skip", rate_of: str | None = None, switches: bool = True) -> Decoding:
    """Groups within 30 bins and tokens within 15; when the head drafts, Spec-VLA's 9 bins."""
    return Decoding(
        about, "retrieval", then="head", bins=15, total=30, switches=switches, gate=gate, rate_of=rate_of
    )  # fmt: skip


DECODINGS: dict[str, Decoding] = {
    "ar": Decoding("greedy decoding, token by token"),
    "strict": Decoding("a head drafts a tree, equal tokens are accepted: greedy decoding's tokens", then="head"),
    "strict_last": Decoding("the last action drafts, equal tokens are accepted", "last"),
    "strict_bigram": Decoding("a bigram table drafts, equal tokens are accepted", then="bigram"),
    "strict_draft": Decoding("the draft policy drafts, equal tokens are accepted", "draft"),
    "specvla": Decoding("Spec-VLA: a head drafts a tree, tokens within 9 bins are accepted", then="head", bins=9),
    "specvla_5": Decoding("Spec-VLA within 5 bins", then="head", bins=5),
    "specvla_15": Decoding("Spec-VLA within 15 bins", then="head", bins=15),
    "specvla_20": Decoding("Spec-VLA within 20 bins", then="head", bins=20),
    "specvla_uniform": Decoding("Spec-VLA within 9 bins, the gripper too", then="head", bins=9, uniform=True),
    "specvla_device": Decoding(
        "Spec-VLA with its head on the device, on the last verified feature; after its tree the server's own head",
        "head", then="head", bins=9,
    ),
    "last": Decoding("the last action drafts, within 9 bins", "last", bins=9),
    "bigram": Decoding("a bigram table drafts, within 9 bins", then="bigram", bins=9),
    "filter": Decoding("a Kalman filter drafts, within 9 bins", "filter", bins=9),
    "draft_9": Decoding("the draft policy drafts, within 9 bins", "draft", bins=9),
    "random_tokens": Decoding("random tokens draft, within 9 bins", "random", bins=9),
    "perfect": Decoding("the target's own tokens draft: what is left beside the proposal is the best case", "perfect"),
    "kerv": _kerv("KERV: Spec-VLA, a Kalman tail, a tolerance that adapts (the repaired rule)"),
    "kerv_printed": _kerv("KERV with the tolerance's rule as printed", adapts="printed"),
    "kerv_fixed": _kerv("KERV within 9 bins always", adapts=None, bins=9),
    "kerv_walk": _kerv("KERV with a random walk's tail", "walk"),
    "kerv_last": _kerv("KERV with the last action as the tail: the control", "last"),
    "kerv_no_tail": _kerv("KERV's tolerance alone", None),
    "heisd": _heisd("HeiSD: a memory or the head drafts, and verification is skipped where features are alike"),
    "heisd_verified": _heisd("HeiSD without unverified steps", "always"),
    "heisd_no_switch": _heisd("HeiSD without the kinematic switch", switches=False),
    "heisd_random": _heisd("HeiSD, verified at random at its rate: the control", "random", "heisd"),
    "last_random": Decoding(
        "the last action instead of the memory, verified at random at HeiSD's rate: the control",
        "last", then="head", bins=9, gate="random", rate_of="heisd",
    ),
    "heisd_similar": _heisd(
        "HeiSD, verified at the gates' rate, where features are least alike", "similarity", switches=False
    ),
    "heisd_similar_random": _heisd(
        "HeiSD, verified at random at that rate: the control", "random", "heisd_similar", switches=False
    ),
    "heisd_fixed": _heisd(
        "HeiSD as in its released code: two of three inferences not verified", "periodic", switches=False
    ),
    "heisd_fixed_random": _heisd(
        "HeiSD, verified at random at the fixed pattern's rate: the control", "random", "heisd_fixed", switches=False
    ),
    "last_fixed": Decoding(
        "the last action instead of the memory, two of three inferences not verified: the control",
        "last", then="head", bins=9, gate="periodic",
    ),
    "draft_fixed": Decoding(
        "a draft policy instead of the memory, two of three inferences not verified: the control",
        "draft", then="head", bins=9, gate="periodic",
    ),
    "retrieval": Decoding("the memory alone, never verified: the control", "retrieval", gate="never"),
}  # fmt: skip


def load_decoding(name: str) -> Decoding:
    """The decoding of this name.

    Raises:
        ConfigError: if there is none.
    """
    if name not in DECODINGS:
        raise unknown_name("decoding", name, DECODINGS)
    return DECODINGS[name]
