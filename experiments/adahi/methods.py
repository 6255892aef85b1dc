"""ADAHI's ablations, beside the general methods that the package knows."""

from __future__ import annotations

from dataclasses import replace

from experiments.grid import by_name
from specact.lab.rollout.methods import CHANCE, Method
from specact.lab.rollout.methods import METHODS as GENERAL

_ADAHI, _ORACLE = GENERAL["adahi"], GENERAL["oracle"]
# In the order of the tables.
METHODS = by_name(
    *(GENERAL[name] for name in ("draft", "head_draft", "target", "target_on_device", "hybrid")),
    replace(GENERAL["random"], rivals=("plain_random",)),
    Method("plain_random", "random", "verified at random, at ADAHI's rate without forced steps", rate_of="adahi"),
    GENERAL["random_learned"],
    replace(
        GENERAL["random_learned"], name="head_random", proposes="head", rivals=(CHANCE,),
        about="the head as the draft, verified at random, at the learned gate's rate",
    ),
    replace(_ADAHI, rivals=("random", "hybrid", "gated_target", "head_draft")),
    Method("gated_target", "deviation", "ADAHI's gate, the target's own codes", "target"),
    GENERAL["uncertainty"],
    replace(GENERAL["learned"], rivals=(CHANCE, "head_draft", "head_random", "adahi", "hybrid")),
    GENERAL["learned_action"],
    _ORACLE,
    replace(
        _ORACLE, name="oracle_action", gate="oracle_action",
        about="verified where the action changes most; not deployable",
    ),
)  # fmt: skip
