"""Gates as plain values: what a calibration stores, a manifest records and a worker process receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from specact.errors import unknown_name
from specact.gates.baseline import Always, Never, Random
from specact.gates.deviation import ActionDeviation, Reading, Source
from specact.gates.gate import Gate
from specact.gates.oracle import Oracle
from specact.gates.uncertainty import Kind, Uncertainty
from specact.policies.policy import CodePolicy
from specact.policies.tokenizer import ActionTokenizer

# The gates that need a threshold, and so a calibration.
CALIBRATED = ("deviation", "uncertainty", "oracle", "oracle_action")


@dataclass(frozen=True)
class GateChoices:
    """The readings that the papers leave open, by name; what is not given is as the bundle recommends.

    Attributes:
        reading: of the action deviation, see :class:`~specact.gates.deviation.ActionDeviation`; euclidean where the
            bundle recommends none.
        alpha: weight of the newest action in the average; 0.5.
        source: which actions feed the average, executed or draft; executed.
        uncertainty: kind of uncertainty, see :class:`~specact.gates.uncertainty.Uncertainty`; temperature.
        max_skips: longest run of skipped inferences of the deviation gate; no limit.
    """

    reading: Reading | None = None
    alpha: float | None = None
    source: Source | None = None
    uncertainty: Kind | None = None
    max_skips: int | Literal["unlimited"] | None = None

    def over(self, recommended: Mapping[str, Any]) -> GateChoices:
        """These choices, filled up with what a bundle recommends.

        Raises:
            ConfigError: for a recommendation of an unknown name.
        """
        names = {field.name for field in fields(self)}
        for name in recommended:
            if name not in names:
                raise unknown_name("gate choice", name, names)
        return replace(GateChoices(**recommended), **{k: v for k, v in vars(self).items() if v is not None})

    def settings(self, gate: str) -> GateSettings:
        """Settings of a gate that still needs its threshold.

        Raises:
            ConfigError: for an unknown gate.
        """
        options: dict[str, dict[str, Any]] = {
            "never": {},
            "always": {},
            "random": {},
            "deviation": {
                "reading": self.reading or "euclidean",
                "alpha": 0.5 if self.alpha is None else self.alpha,
                "source": self.source or "executed",
            },
            "uncertainty": {"kind": self.uncertainty or "temperature"},
            "oracle": {"on": "rejection"},
            "oracle_action": {"on": "action_change"},
        }
        if gate not in options:
            raise unknown_name("gate", gate, options)
        limit = self.max_skips if gate == "deviation" and self.max_skips != "unlimited" else None
        return GateSettings(gate, max_skips=limit, options=tuple(options[gate].items()))


BUNDLES_OWN = GateChoices()


@dataclass(frozen=True)
class GateSettings:
    """A gate in plain values: what crosses process borders and goes into manifests.

    Attributes:
        name: ``never``, ``always``, ``random`` or one of :data:`CALIBRATED`.
        threshold: for ``random`` the rate.
        tie_probability: see :class:`~specact.gates.gate.Gate`.
        max_skips: likewise.
        options: the gate's own, by name.
    """

    name: str
    threshold: float = 0.0
    tie_probability: float = 0.0
    max_skips: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def without_threshold(self) -> GateSettings:
        """What was asked for, before calibration found the threshold."""
        return replace(self, threshold=0.0, tie_probability=0.0)

    def build(self, target: CodePolicy, tokenizer: ActionTokenizer) -> Gate:
        """A fresh gate for one robot."""
        if self.name == "never":
            return Never()
        if self.name == "always":
            return Always()
        if self.name == "random":
            return Random(self.threshold)
        if self.name not in CALIBRATED:
            raise unknown_name("gate", self.name, ["never", "always", "random", *CALIBRATED])
        options = dict(self.options)
        limits: dict[str, Any] = {"tie_probability": self.tie_probability, "max_skips": self.max_skips}
        if self.name == "deviation":
            return ActionDeviation(self.threshold, **options, **limits)
        if self.name == "uncertainty":
            return Uncertainty(self.threshold, **options, **limits)
        return Oracle(self.threshold, target=target, tokenizer=tokenizer, **options, **limits)
