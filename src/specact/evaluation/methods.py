"""The methods that are compared, each a composition of a gate and a verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specact.errors import unknown_name
from specact.gates import ActionDeviation, Always, Gate, Never, Oracle, Random, Uncertainty
from specact.policies.policy import CodePolicy
from specact.policies.tokenizer import ActionTokenizer



@dataclass(frozen=True)
class Method:
    """A gate and a verifier under a name.

    Attributes:
        gate: name of the gate's settings in :data:`GATES`; methods that share it share its calibration.
        verifier: ``speculative`` or ``target`` (the target's own codes).
        about: one line for a table.
    """

    gate: str
    verifier: Literal["speculative", "target"]
    about: str


METHODS = {
    "draft": Method("never", "speculative", "the draft alone"),
    "target": Method("always", "target", "every step from the target"),
    "hybrid": Method("always", "speculative", "every step verified"),
    "random": Method("random", "speculative", "verified by chance, at ADAHI's rate"),
    "adahi": Method("deviation", "speculative", "verified where the action deviates"),
    "gated_target": Method("deviation", "target", "ADAHI's gate, the target's own codes"),
    "uncertainty": Method("uncertainty", "speculative", "verified where the draft is unsure (U-HLM)"),
    "oracle": Method("oracle", "speculative", "verified where rejection is likeliest; not deployable"),
    "oracle_action": Method("oracle_action", "speculative", "verified where the action changes most; not deployable"),
}

# Settings of the gates that need a threshold; "deviation" is the reading chosen for ADAHI.
GATES: dict[str, dict[str, Any]] = {
    "deviation": {"reading": "euclidean", "alpha": 0.5, "source": "executed"},
    "uncertainty": {"kind": "temperature"},
    "oracle": {"on": "rejection"},
    "oracle_action": {"on": "action_change"},
}


def load_method(name: str) -> Method:
    """The method of this name.

    Raises:
        ConfigError: if there is none.
    """
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


@dataclass(frozen=True)
class GateSettings:
    """A gate in plain values: what crosses process borders and goes into manifests.

    Attributes:
        name: ``never``, ``always``, ``random`` or one of :data:`GATES`.
        threshold: for ``random`` the rate.
        tie_probability: see :class:`~specact.gates.gate.Gate`.
        max_skips: likewise.
        options: of the gate's own, replacing those of :data:`GATES`.
    """

    name: str
    threshold: float = 0.0
    tie_probability: float = 0.0
    max_skips: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def build(self, target: CodePolicy, tokenizer: ActionTokenizer) -> Gate:
        """A fresh gate for one robot."""
        if self.name == "never":
            return Never()
        if self.name == "always":
            return Always()
        if self.name == "random":
            return Random(self.threshold, max_skips=self.max_skips)
        if self.name not in GATES:
            raise unknown_name("gate", self.name, ["never", "always", "random", *GATES])
        options = GATES[self.name] | dict(self.options)
        limits = {"tie_probability": self.tie_probability, "max_skips": self.max_skips}
        if self.name == "deviation":
            return ActionDeviation(self.threshold, **options, **limits)
        if self.name == "uncertainty":
            return Uncertainty(self.threshold, **options, **limits)
        return Oracle(self.threshold, target=target, tokenizer=tokenizer, **options, **limits)
