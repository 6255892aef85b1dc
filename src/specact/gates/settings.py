"""Gates as plain values: what a calibration stores, a manifest records and a worker process receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from inspect import isabstract
from typing import Any, Literal, get_args

from specact.errors import ConfigError, SpecactError, unknown_name
from specact.families.codes.head import head_fingerprint
from specact.families.codes.spec import InfersCodes
from specact.families.load import AnyPair, of_codes
from specact.gates.deviation import Reading, Source
from specact.gates.gate import Gate
from specact.gates.uncertainty import Kind
from specact.plugins import is_plugin, load_object

GATES = {
    "never": "specact.gates.baseline:Never",
    "always": "specact.gates.baseline:Always",
    "random": "specact.gates.baseline:Random",
    "deviation": "specact.gates.deviation:ActionDeviation",
    "uncertainty": "specact.gates.uncertainty:Uncertainty",
    "learned": "specact.gates.rejection:Learned",
    "learned_action": "specact.gates.rejection:Learned",
    "oracle": "specact.gates.rejection:Oracle",
    "oracle_action": "specact.gates.rejection:Oracle",
}


def load_gate(name: str) -> type[Gate]:
    """The class of a gate: one of :data:`GATES`, or ``MODULE:GATE``, a subclass of :class:`~specact.gates.gate.Gate`.

    Raises:
        ConfigError: if there is none, or it cannot be imported.
    """
    kind: type[Gate]
    if is_plugin(name):
        kind = load_object(name, "subclass of specact.gates.Gate that implements score", _is_gate)
        return kind
    if name not in GATES:
        raise unknown_name("gate", name, GATES, plugins=True)
    module, _, attribute = GATES[name].partition(":")
    kind = getattr(import_module(module), attribute)
    return kind


def _is_gate(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, Gate) and not isabstract(found)


# The built-in gates that need a threshold, and so a calibration.
CALIBRATED = tuple(name for name in GATES if load_gate(name).calibrated)


@dataclass(frozen=True)
class GateChoices:
    """Settings that the papers do not specify; the bundle's own if not given.

    Attributes:
        reading: of the action deviation, see docs/choices.md; euclidean if the bundle recommends none.
        alpha: weight of the newest action in the average; 0.5 if the bundle recommends none.
        source: which actions feed the average, executed or draft; executed if the bundle recommends none.
        uncertainty: kind of uncertainty, see docs/choices.md; disagreement if the bundle recommends none.
        max_skips: most inferences skipped in a row, or unlimited. As an option it applies to the deviation, the
            learned gates and MODULE:GATE, in a recipe to the deviation alone; unlimited if the bundle recommends none.
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

    def settings(self, gate: str, bundle: AnyPair) -> GateSettings:
        """Settings of a gate that still needs its threshold; what is not chosen is as the bundle recommends.

        Raises:
            ConfigError: for an unknown gate, or a learned one that the bundle does not have.
        """
        choices = self.over(bundle.recommended_gates)
        family = load_gate(gate).family
        if family not in (None, bundle.codec.dialect.family):
            raise ConfigError(
                f"the gate {gate!r} reads what the family {family!r} knows of a draft, but {bundle.name} is of the "
                f"family {bundle.codec.dialect.family!r}; choose a gate that looks at actions alone, such as deviation"
            )
        options: dict[str, dict[str, Any]] = {
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
        if gate.startswith("learned"):
            options[gate]["weights"] = head_fingerprint(of_codes(bundle, f"the gate {gate!r}"))
        # A limit that helps the deviation can lower the success of a learned gate, so each has its own recommendation.
        learned = choices.learned_max_skips if self.max_skips is None else self.max_skips
        limit = {"deviation": choices.max_skips, "learned": learned, "learned_action": learned}.get(
            gate, self.max_skips if is_plugin(gate) else None
        )
        return GateSettings(
            gate, max_skips=None if limit == "unlimited" else limit, options=tuple(options.get(gate, {}).items())
        )


BUNDLES_OWN = GateChoices()


@dataclass(frozen=True)
class GateSettings:
    """A gate in plain values: what crosses process borders and goes into manifests.

    Attributes:
        name: one of :data:`GATES`, or ``MODULE:GATE``.
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

    def build(self, bundle: AnyPair, target: InfersCodes | None = None) -> Gate:
        """A fresh gate for one robot.

        Args:
            bundle: the pair it was calibrated for.
            target: what an oracle asks, instead of the bundle's target.

        Raises:
            BundleError: if the bundle's learned gate is not the one that was calibrated.
            ConfigError: if the bundle has no learned gate, or a gate of the user's own cannot be created.
        """
        options = {**dict(self.options), "tie_probability": self.tie_probability, "max_skips": self.max_skips}
        if self.name.startswith("oracle"):
            options["target"] = target
        kind = load_gate(self.name)
        if not is_plugin(self.name):
            return kind.for_pair(bundle, self.threshold, **options)
        try:
            return kind.for_pair(bundle, self.threshold, **options)
        except SpecactError:
            raise
        # Anything can go wrong in somebody else's class.
        except Exception as error:
            raise ConfigError(
                f"the gate {self.name!r} cannot be created: {type(error).__name__}: {error}; its constructor takes "
                "threshold and **limits and passes both on to Gate's, or it overrides for_pair"
            ) from error
