"""Gates as plain values: what a calibration stores, a manifest records and a worker process receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from specact.errors import BundleError, ConfigError, unknown_name
from specact.families.codes.bundle import Bundle
from specact.families.codes.head import HEAD, head_fingerprint, load_head
from specact.families.codes.spec import CodePolicy
from specact.gates.baseline import Always, Never, Random
from specact.gates.deviation import ActionDeviation, Reading, Source
from specact.gates.gate import Gate
from specact.gates.learned import Learned
from specact.gates.oracle import Oracle
from specact.gates.uncertainty import Kind, Uncertainty

# The gates that need a threshold, and so a calibration.
CALIBRATED = ("deviation", "uncertainty", "learned", "learned_action", "oracle", "oracle_action")


@dataclass(frozen=True)
class GateChoices:
    """Settings that the papers do not specify; the bundle's own if not given.

    Attributes:
        reading: of the action deviation, see docs/choices.md; euclidean if the bundle recommends none.
        alpha: weight of the newest action in the average; 0.5 if the bundle recommends none.
        source: which actions feed the average, executed or draft; executed if the bundle recommends none.
        uncertainty: kind of uncertainty, see docs/choices.md; disagreement if the bundle recommends none.
        max_skips: most inferences skipped in a row, or unlimited. As an option it applies to the deviation and to the
            learned gates, in a recipe to the deviation alone; unlimited if the bundle recommends none.
        learned_max_skips: the same for the learned gates alone; max_skips as an option overrides it.

    Raises:
        ConfigError: for a value that is not allowed.
    """

    reading: Reading | None = None
    alpha: float | None = None
    source: Source | None = None
    uncertainty: Kind | None = None
    max_skips: int | Literal["unlimited"] | None = None
    learned_max_skips: int | Literal["unlimited"] | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("reading", Reading), ("source", Source), ("uncertainty", Kind)):
            chosen = getattr(self, name)
            if chosen is not None and chosen not in get_args(allowed):
                raise unknown_name(f"value of the gate choice {name!r}", str(chosen), get_args(allowed))
        # A recipe's table comes here as it was read, so that the types are not certain.
        alpha: Any = self.alpha
        limits: dict[str, Any] = {"max_skips": self.max_skips, "learned_max_skips": self.learned_max_skips}
        if alpha is not None and not (isinstance(alpha, int | float) and 0.0 < alpha <= 1.0):
            raise ConfigError(f"alpha must be a number above 0 and at most 1, got {alpha!r}")
        for name, limit in limits.items():
            if limit not in (None, "unlimited") and not (type(limit) is int and limit >= 0):
                raise ConfigError(f'{name} must be an integer of at least 0, or "unlimited", got {limit!r}')

    def over(self, recommended: Mapping[str, Any]) -> GateChoices:
        """These choices, filled up with what a bundle recommends.

        Raises:
            ConfigError: for a recommendation of an unknown name, or a value that is not allowed.
        """
        names = {field.name for field in fields(self)}
        for name in recommended:
            if name not in names:
                raise unknown_name("gate choice", name, names)
        return replace(GateChoices(**recommended), **{k: v for k, v in vars(self).items() if v is not None})

    def settings(self, gate: str, bundle: Bundle) -> GateSettings:
        """Settings of a gate that still needs its threshold; what is not chosen is as the bundle recommends.

        Raises:
            ConfigError: for an unknown gate, or a learned one that the bundle does not have.
        """
        choices = self.over(bundle.recommended_gates)
        options: dict[str, dict[str, Any]] = {
            "never": {},
            "always": {},
            "random": {},
            "deviation": {
                "reading": choices.reading or "euclidean",
                "alpha": 0.5 if choices.alpha is None else choices.alpha,
                "source": choices.source or "executed",
            },
            "uncertainty": {"kind": choices.uncertainty or "disagreement"},
            "learned": {"on": "rejection"},
            "learned_action": {"on": "action_change"},
            "oracle": {"on": "rejection"},
            "oracle_action": {"on": "action_change"},
        }
        if gate not in options:
            raise unknown_name("gate", gate, options)
        if gate.startswith("learned"):
            options[gate]["weights"] = head_fingerprint(bundle)
        # A limit that helps the deviation can lower the success of a learned gate, so each has its own recommendation.
        learned = choices.learned_max_skips if self.max_skips is None else self.max_skips
        limit = {"deviation": choices.max_skips, "learned": learned, "learned_action": learned}.get(gate)
        return GateSettings(
            gate, max_skips=None if limit == "unlimited" else limit, options=tuple(options[gate].items())
        )


BUNDLES_OWN = GateChoices()


@dataclass(frozen=True)
class GateSettings:
    """A gate in plain values: what crosses process borders and goes into manifests.

    Attributes:
        name: ``never``, ``always``, ``random`` or one of :data:`CALIBRATED`.
        threshold: for ``random`` the probability of transmission.
        tie_probability: see :class:`~specact.gates.gate.Gate`.
        max_skips: likewise.
        options: the gate's own, by name.
    """

    name: str
    threshold: float = 0.0
    tie_probability: float = 0.0
    max_skips: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def lowest_rate(self) -> float:
        """The transmission rate, in [0, 1], that the limit on skips makes by itself."""
        return 0.0 if self.max_skips is None else 1.0 / (self.max_skips + 1)

    def check_rate(self, rate: float) -> None:
        """Refuses a transmission rate that the limit on skips does not allow.

        Raises:
            ConfigError: for a rate below :attr:`lowest_rate`.
        """
        if rate < self.lowest_rate:
            raise ConfigError(
                f"with at most {self.max_skips} skips in a row at least {self.lowest_rate:.2f} of the inferences are "
                f"transmitted, so that the gate {self.name!r} cannot hold a rate of {rate:g}; allow longer runs with "
                "--max-skips N or --max-skips unlimited"
            )

    def without_threshold(self) -> GateSettings:
        """What was asked for, before calibration found the threshold."""
        return replace(self, threshold=0.0, tie_probability=0.0)

    def build(self, bundle: Bundle, target: CodePolicy | None = None) -> Gate:
        """A fresh gate for one robot.

        Args:
            bundle: the pair it was calibrated for.
            target: what an oracle asks, instead of the bundle's target.

        Raises:
            BundleError: if the bundle's learned gate is not the one that was calibrated.
            ConfigError: if the bundle has no learned gate.
        """
        if self.name == "never":
            return Never()
        if self.name == "always":
            return Always()
        if self.name == "random":
            return Random(self.threshold, max_skips=self.max_skips, **dict(self.options))
        if self.name not in CALIBRATED:
            raise unknown_name("gate", self.name, ["never", "always", "random", *CALIBRATED])
        options = dict(self.options)
        limits: dict[str, Any] = {"tie_probability": self.tie_probability, "max_skips": self.max_skips}
        if self.name == "deviation":
            return ActionDeviation(self.threshold, **options, **limits)
        if self.name == "uncertainty":
            return Uncertainty(self.threshold, **options, **limits)
        limits["tokenizer"] = bundle.tokenizer
        if self.name.startswith("learned"):
            head, weights = load_head(bundle), options.pop("weights")
            if head.fingerprint != weights:
                raise BundleError(
                    f"{bundle.path / HEAD} has fingerprint {head.fingerprint}, but the gate was calibrated for "
                    f"{weights}; calibrate again with: specact calibrate --bundle {bundle.path} --gate learned"
                )
            return Learned(self.threshold, head=head, **options, **limits)
        return Oracle(self.threshold, target=bundle.target if target is None else target, **options, **limits)
