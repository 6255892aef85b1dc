"""The methods that are compared, each a composition of a gate and a verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specact.errors import unknown_name


@dataclass(frozen=True)
class Method:
    """A gate and a verifier under a name.

    Attributes:
        gate: name of its gate; methods that share it share its calibration.
        verifier: ``speculative`` or ``target`` (the target's own codes).
        about: one line for a table.
        waits_for_draft: whether the draft's time is part of the method's; the ungated target needs no draft.
    """

    gate: str
    verifier: Literal["speculative", "target"]
    about: str
    waits_for_draft: bool = True


METHODS = {
    "draft": Method("never", "speculative", "the draft alone"),
    "target": Method("always", "target", "every step from the target", waits_for_draft=False),
    "hybrid": Method("always", "speculative", "every step verified"),
    "random": Method("random", "speculative", "verified by chance, at ADAHI's rate"),
    "adahi": Method("deviation", "speculative", "verified where the action deviates"),
    "gated_target": Method("deviation", "target", "ADAHI's gate, the target's own codes"),
    "uncertainty": Method("uncertainty", "speculative", "verified where the draft is unsure (U-HLM)"),
    "learned": Method("learned", "speculative", "verified where a learned head expects rejection"),
    "learned_action": Method("learned_action", "speculative", "verified where a learned head expects another action"),
    "oracle": Method("oracle", "speculative", "verified where rejection is likeliest; not deployable"),
    "oracle_action": Method("oracle_action", "speculative", "verified where the action changes most; not deployable"),
}


def load_method(name: str) -> Method:
    """The method of this name.

    Raises:
        ConfigError: if there is none.
    """
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]
