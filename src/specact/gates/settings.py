"""Gate settings as plain values, for calibrations, manifests and worker processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from inspect import Parameter, isabstract, signature
from typing import Any, Literal, get_args, get_origin, get_type_hints

from specact.errors import ConfigError, SpecactError, unknown_name
from specact.families.chunks.wire import FAMILY as CHUNKS
from specact.families.codes.spec import InfersCodes
from specact.families.head import head_fingerprint
from specact.families.load import AnyPair
from specact.gates.deviation import Reading, Source
from specact.gates.gate import Gate
from specact.gates.uncertainty import Kind
from specact.plugins import is_plugin, load_object

GATES = {
    "never": "specact.gates.baseline:Never",
    "always": "specact.gates.baseline:Always",
    "random": "specact.gates.baseline:Random",
    "periodic": "specact.gates.baseline:Periodic",
    "deviation": "specact.gates.deviation:ActionDeviation",
    "uncertainty": "specact.gates.uncertainty:Uncertainty",
    "learned": "specact.gates.rejection:Learned",
    "learned_action": "specact.gates.rejection:Learned",
    "verify_skip": "specact.gates.verify_skip:VerifySkip",
    "similarity": "specact.gates.verify_skip:Similarity",
    "oracle": "specact.gates.rejection:Oracle",
    "oracle_action": "specact.gates.rejection:Oracle",
}
# Gates of chunks, tokens and flows that share a name with a gate of action codes.
_CHUNK_GATES = {"learned": "specact.gates.distance:LearnedDistance"}


def load_gate(name: str, family: str | None = None) -> type[Gate]:
    """The class of a gate: one of :data:`GATES`, or ``MODULE:GATE``, a subclass of :class:`~specact.gates.gate.Gate`.

    Args:
        name: of the gate.
        family: of the pair; with None, the learned gate is that of action codes.

    Raises:
        ConfigError: if there is none, or it cannot be imported.
    """
    kind: type[Gate]
    if is_plugin(name):
        kind = load_object(name, "subclass of specact.gates.Gate that implements score", _is_gate)
        return kind
    if name not in GATES:
        raise unknown_name("gate", name, GATES, plugins=True)
    place = _CHUNK_GATES.get(name, GATES[name]) if family == CHUNKS else GATES[name]
    module, _, attribute = place.partition(":")
    kind = getattr(import_module(module), attribute)
    return kind


def gate_for(name: str, pair: AnyPair) -> type[Gate]:
    """The class of a gate for a pair.

    Raises:
        ConfigError: as :func:`load_gate`, or if the gate reads another family's evidence.
    """
    own = pair.codec.dialect.family
    kind = load_gate(name, own)
    if kind.family not in (None, own):
        raise ConfigError(
            f"the gate {name!r} reads what the family {kind.family!r} knows of a draft, but {pair.name} is of "
            f"the family {own!r}; choose a gate that looks at actions alone, such as deviation"
        )
    return kind


def _is_gate(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, Gate) and not isabstract(found)


# The gates whose head has to be trained first.
LEARNED = ("learned", "learned_action")
# They know the target before they decide: bounds of what a gate can reach.
ORACLES = ("oracle", "oracle_action")

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
        gate_options: of MODULE:GATE, each as NAME=VALUE: keywords of its constructor. No bundle recommends any.

    Raises:
        ConfigError: for a value that is not allowed.
    """

    reading: Reading | None = None
    alpha: float | None = None
    source: Source | None = None
    uncertainty: Kind | None = None
    max_skips: int | Literal["unlimited"] | None = None
    learned_max_skips: int | Literal["unlimited"] | None = None
    gate_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in (("reading", Reading), ("source", Source), ("uncertainty", Kind)):
            chosen = getattr(self, name)
            if chosen is not None and chosen not in get_args(allowed):
                raise unknown_name(f"value of the gate choice {name!r}", str(chosen), get_args(allowed))
        # Values from a recipe's table are not type-checked before.
        alpha: Any = self.alpha
        limits: dict[str, Any] = {"max_skips": self.max_skips, "learned_max_skips": self.learned_max_skips}
        if alpha is not None and not (isinstance(alpha, int | float) and 0.0 < alpha <= 1.0):
            raise ConfigError(f"alpha must be a number above 0 and at most 1, got {alpha!r}")
        for name, limit in limits.items():
            if limit not in (None, "unlimited") and not (type(limit) is int and limit >= 0):
                raise ConfigError(f'{name} must be an integer of at least 0, or "unlimited", got {limit!r}')

    def over(self, recommended: Mapping[str, Any]) -> GateChoices:
        """These choices, with a bundle's recommendations as defaults.

        Raises:
            ConfigError: for a recommendation of an unknown name, or a value that is not allowed.
        """
        names = {field.name for field in fields(self)} - {"gate_options"}
        for name in recommended:
            if name not in names:
                raise unknown_name("gate choice", name, names)
        return replace(GateChoices(**recommended), **{k: v for k, v in vars(self).items() if v is not None})

    def settings(self, gate: str, bundle: AnyPair) -> GateSettings:
        """Settings of a gate without its threshold, with the bundle's recommendations as defaults.

        Raises:
            ConfigError: for an unknown gate, an unknown option, or a learned gate that the bundle does not have.
        """
        choices = self.over(bundle.recommended_gates)
        kind = gate_for(gate, bundle)
        options: dict[str, dict[str, Any]] = {
            "deviation": {
                "reading": choices.reading or "euclidean",
                "alpha": 0.5 if choices.alpha is None else choices.alpha,
                "source": choices.source or "executed",
            },
            "uncertainty": {"kind": choices.uncertainty or "disagreement"},
            "learned": {} if bundle.codec.dialect.family == CHUNKS else {"on": "rejection"},
            "learned_action": {"on": "action_change"},
            "oracle": {"on": "rejection"},
            "oracle_action": {"on": "action_change"},
        }
        if gate in LEARNED:
            options[gate]["weights"] = head_fingerprint(bundle)
        if is_plugin(gate):
            options[gate] = dict(_read_options(gate, kind, self.gate_options))
        # A limit that helps the deviation can lower a learned gate's success rate, so recommendations are separate.
        learned = choices.learned_max_skips if self.max_skips is None else self.max_skips
        limit = {"deviation": choices.max_skips, "learned": learned, "learned_action": learned}.get(
            gate, self.max_skips if is_plugin(gate) else None
        )
        return GateSettings(
            gate, max_skips=None if limit == "unlimited" else limit, options=tuple(options.get(gate, {}).items())
        )


BUNDLE_DEFAULTS = GateChoices()


def _read_options(name: str, kind: type[Gate], given: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Options of a user-defined gate by name, converted to its constructor's annotated types."""
    there = _options_of(kind)
    for text in given:
        option, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"an option of a gate has the form NAME=VALUE, got {text!r}")
        if option not in there:
            has = f"it has {', '.join(sorted(there))}" if there else "its constructor has none of its own"
            raise ConfigError(
                f"the gate {name!r} has no option {option!r}; {has}. Its threshold is found by specact calibrate, and "
                "--max-skips limits its skips"
            )
        yield option, _read_value(f"the option {option!r} of the gate {name!r}", value, there[option])


def _options_of(kind: type[Gate]) -> dict[str, Any]:
    """Types by name of the parameters of a gate's constructor and ``for_pair`` that the base class does not have."""
    makers: list[Any] = [kind.for_pair, kind.__init__]
    every = {"self", "pair", "threshold", *signature(Gate.__init__).parameters}
    found: dict[str, Any] = {}
    for maker in makers:
        try:
            hints = get_type_hints(maker)
        except Exception:  # noqa: BLE001 - third-party annotations may not resolve
            hints = {}
        for parameter in signature(maker).parameters.values():
            if parameter.name not in every and parameter.kind in (
                Parameter.KEYWORD_ONLY,
                Parameter.POSITIONAL_OR_KEYWORD,
            ):
                found[parameter.name] = hints.get(parameter.name)
    return found


def _read_value(what: str, text: str, kind: Any) -> Any:
    """A JSON value or text, converted to ``kind`` where that is a Literal, int, float, bool or str."""
    if kind is str:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise unknown_name(f"value of {what}", str(value), [str(one) for one in get_args(kind)])
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif kind in (int, float, bool) and type(value) is not kind:
        raise ConfigError(f"{what} must be of type {kind.__name__}, got {text!r}")
    return value


@dataclass(frozen=True)
class GateSettings:
    """A gate as plain values, for other processes and manifests.

    Attributes:
        name: one of :data:`GATES`, or ``MODULE:GATE``.
        threshold: for ``random`` the probability of transmission.
        tie_probability: see :class:`~specact.gates.gate.Gate`.
        max_skips: see :class:`~specact.gates.gate.Gate`.
        options: parameters of the gate's class, by name.
    """

    name: str
    threshold: float = 0.0
    tie_probability: float = 0.0
    max_skips: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def lowest_rate(self) -> float:
        """The transmission rate, in [0, 1], that max_skips alone causes."""
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
        """The settings as requested, before calibration."""
        return replace(self, threshold=0.0, tie_probability=0.0)

    def build(self, bundle: AnyPair, target: InfersCodes | None = None) -> Gate:
        """A fresh gate for one robot.

        Args:
            bundle: the pair it was calibrated for.
            target: used by an oracle instead of the bundle's target.

        Raises:
            BundleError: if the bundle's learned gate is not the one that was calibrated.
            ConfigError: if the bundle has no learned gate, or a user-defined gate cannot be created.
        """
        options = {**dict(self.options), "tie_probability": self.tie_probability, "max_skips": self.max_skips}
        if self.name in ORACLES:
            options["target"] = target
        kind = gate_for(self.name, bundle)
        if not is_plugin(self.name):
            return kind.for_pair(bundle, self.threshold, **options)
        try:
            return kind.for_pair(bundle, self.threshold, **options)
        except SpecactError:
            raise
        # A third-party class can raise anything.
        except Exception as error:
            raise ConfigError(
                f"the gate {self.name!r} cannot be created: {type(error).__name__}: {error}; its constructor takes "
                "threshold and **limits and passes both on to Gate's, or it overrides for_pair"
            ) from error
