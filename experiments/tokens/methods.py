"""Spec-VLA, KERV and HeiSD, and each of their controls, as compositions of the same parts."""

from __future__ import annotations

from dataclasses import replace

from experiments.grid import by_name
from specact.families.tokens.pair import Decoding
from specact.lab.rollout.methods import composed
from specact.systems.heisd import Heisd
from specact.systems.kerv import Kerv
from specact.systems.tokens import DECODINGS

SPECVLA = Decoding("Spec-VLA: a head drafts a tree, tokens within 9 bins are accepted", then="head", bins=9)
KERV = Kerv("KERV: Spec-VLA, a Kalman tail, a tolerance that adapts (the repaired rule)")
HEISD = Heisd("HeiSD: a memory or the head drafts, and verification is skipped where features are alike")
# The memory or the filter alone.
RETRIEVAL = Heisd(
    "the memory alone, never verified: the control", then="none", bins=0, total=None, switches=False, gate="never"
)
FILTER = Kerv("a Kalman filter drafts, within 9 bins", "filter", then="none", bins=9, adapts=None, tail=None)
MEMORY = replace(HEISD, switches=False)
LAST = Decoding("", "last", then="head", bins=9)
FIXED = "{} instead of the memory, two of three inferences not verified: the control"

METHODS = by_name(
    composed("ar", Decoding("greedy decoding, token by token")),
    composed(
        "strict",
        Decoding("a head drafts a tree, equal tokens are accepted: greedy decoding's tokens", then="head"),
        "ar",
    ),
    composed("strict_last", Decoding("the last action drafts, equal tokens are accepted", "last")),
    composed("strict_bigram", Decoding("a bigram table drafts, equal tokens are accepted", then="bigram")),
    composed("strict_draft", Decoding("the draft policy drafts, equal tokens are accepted", "draft")),
    composed("specvla", SPECVLA, "ar", "last", "specvla_uniform"),
    *(
        composed(f"specvla_{bins}", replace(SPECVLA, about=f"Spec-VLA within {bins} bins", bins=bins))
        for bins in (5, 15, 20)
    ),
    composed("specvla_uniform", replace(SPECVLA, about="Spec-VLA within 9 bins, the gripper too", uniform=True)),
    composed("specvla_device", DECODINGS["specvla_device"]),
    composed("last", Decoding("the last action drafts, within 9 bins", "last", bins=9)),
    composed("bigram", Decoding("a bigram table drafts, within 9 bins", then="bigram", bins=9)),
    composed("filter", FILTER),
    composed("draft_9", Decoding("the draft policy drafts, within 9 bins", "draft", bins=9)),
    composed("random_tokens", Decoding("random tokens draft, within 9 bins", "random", bins=9)),
    composed(
        "perfect",
        Decoding("the target's own tokens draft: what is left beside the proposal is the best case", "perfect"),
    ),
    composed("kerv", KERV, "ar", "kerv_fixed", "kerv_no_tail", "kerv_last", "kerv_walk"),
    composed("kerv_printed", replace(KERV, about="KERV with the tolerance's rule as printed", adapts="printed")),
    composed("kerv_fixed", replace(KERV, about="KERV within 9 bins always", adapts=None, bins=9)),
    composed("kerv_walk", replace(KERV, about="KERV with a random walk's tail", tail="walk")),
    composed("kerv_last", replace(KERV, about="KERV with the last action as the tail: the control", tail="last")),
    composed("kerv_no_tail", replace(KERV, about="KERV's tolerance alone", tail=None)),
    composed("heisd", HEISD, "ar", "heisd_random"),
    composed("heisd_verified", replace(HEISD, about="HeiSD without unverified steps", gate="always")),
    composed("heisd_no_switch", replace(MEMORY, about="HeiSD without the kinematic switch")),
    composed(
        "heisd_random",
        replace(HEISD, about="HeiSD, verified at random at its rate: the control", gate="random", rate_of="heisd"),
    ),
    composed(
        "last_random",
        replace(
            LAST, about="the last action instead of the memory, verified at random at HeiSD's rate: the control",
            gate="random", rate_of="heisd",
        ),
    ),
    composed(
        "heisd_similar",
        replace(MEMORY, about="HeiSD, verified at the gates' rate, where features are least alike", gate="similarity"),
        "ar", "heisd_similar_random", "heisd_fixed",
    ),
    composed(
        "heisd_similar_random",
        replace(
            MEMORY, about="HeiSD, verified at random at that rate: the control", gate="random", rate_of="heisd_similar"
        ),
    ),
    composed(
        "heisd_fixed",
        replace(
            MEMORY, about="HeiSD as in its released code: two of three inferences not verified", gate="periodic"
        ),
        "ar", "heisd_fixed_random", "last_fixed", "draft_fixed",
    ),
    composed(
        "heisd_fixed_random",
        replace(
            MEMORY, about="HeiSD, verified at random at the fixed pattern's rate: the control", gate="random",
            rate_of="heisd_fixed",
        ),
    ),
    composed("last_fixed", replace(LAST, about=FIXED.format("the last action"), gate="periodic")),
    composed("draft_fixed", replace(LAST, about=FIXED.format("a draft policy"), proposes="draft", gate="periodic")),
    composed("retrieval", RETRIEVAL, "ar"),
)  # fmt: skip
