"""Gates as plain values: what a calibration stores, a manifest records and a worker process receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specact.errors import unknown_name
from specact.gates.baseline import Always, Never, Random
from specact.gates.deviation import ActionDeviation
from specact.gates.gate import Gate
from specact.gates.oracle import Oracle
from specact.gates.uncertainty import Uncertainty
from specact.policies.policy import CodePolicy
from specact.policies.tokenizer import ActionTokenizer

# Settings of the gates that need a threshold; "deviation" is the reading chosen for ADAHI.
GATES: dict[str, dict[str, Any]] = {
    "deviation": {"reading": "euclidean", "alpha": 0.5, "source": "executed"},
    "uncertainty": {"kind": "temperature"},
    "oracle": {"on": "rejection"},
    "oracle_action": {"on": "action_change"},
}


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
        limits: dict[str, Any] = {"tie_probability": self.tie_probability, "max_skips": self.max_skips}
        if self.name == "deviation":
            return ActionDeviation(self.threshold, **options, **limits)
        if self.name == "uncertainty":
            return Uncertainty(self.threshold, **options, **limits)
        return Oracle(self.threshold, target=target, tokenizer=tokenizer, **options, **limits)
