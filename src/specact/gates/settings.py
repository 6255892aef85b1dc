"""Gates by name, and their parameters as plain values for files and worker processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import Parameter, isabstract, signature
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import msgspec

from specact.errors import ConfigError, SpecactError, unknown_name
from specact.families.codes.policy import InfersCodes
from specact.gates.gate import Blind, Gate
from specact.gates.learned import head_fingerprint
from specact.imports import is_plugin, load_object
from specact.pair import Pair
from specact.records import WholeNumber, read_record

GATES = {
    "never": "specact.gates.gate:Never",
    "always": "specact.gates.gate:Always",
    "random": "specact.gates.gate:Random",
    "periodic": "specact.gates.gate:Periodic",
    "adahi": "specact.systems.adahi:ActionDeviation",
    "uncertainty": "specact.gates.codes:Uncertainty",
    "learned": "specact.gates.learned:Learned",
    "learned_action": "specact.gates.learned:Learned",
    "verify_skip": "specact.systems.heisd:VerifySkip",
    "fixed_skip": "specact.systems.heisd:FixedSkip",
    "similarity": "specact.systems.heisd:Similarity",
    "staleness": "specact.systems.corrector:Staleness",
    "oracle": "specact.gates.codes:Oracle",
    "oracle_action": "specact.gates.codes:Oracle",
}
# What files of earlier versions call a gate.
OLD_NAMES = {"adahi": "deviation"}
# The built-in gates whose rate is their own; and those that need a threshold, and so a calibration.
UNRATED = ("never", "always", "periodic", "verify_skip", "fixed_skip")
CALIBRATED = tuple(name for name in GATES if name not in (*UNRATED, "random"))
# The gates whose head has to be trained first; and those that know the target before they decide: bounds of a gate.
LEARNED, ORACLES = ("learned", "learned_action"), ("oracle", "oracle_action")

# What a calibration states of a gate where nobody says otherwise.
DEFAULTS: dict[str, dict[str, Any]] = {
    "adahi": {"reading": "euclidean", "alpha": 0.5, "source": "executed"},
    "uncertainty": {"kind": "disagreement"},
    **{name: {"on": "action_change" if name.endswith("action") else "rejection"} for name in (*LEARNED, *ORACLES)},
}
# Keys of the ``gates`` table of recipes and manifests. A limit that helps the deviation can lower a learned gate's
# success rate, so it has one of its own.
_TABLE = {
    "reading": ["adahi.reading"],
    "alpha": ["adahi.alpha"],
    "source": ["adahi.source"],
    "uncertainty": ["uncertainty.kind"],
    "max_skips": ["adahi.max_skips"],
    "learned_max_skips": [f"{name}.max_skips" for name in LEARNED],
}
# Parameters of every gate, which are no options.
_EVERY = {"self", "pair", "threshold", *signature(Gate.__init__).parameters}


def load_gate(name: str, family: str | None = None) -> type[Gate]:
    """The class of a gate: one of :data:`GATES`, or ``MODULE:GATE``, a subclass of :class:`~specact.gates.gate.Gate`.

    The learned gate depends on the family of the pair; with None it is that of action codes.

    Raises:
        ConfigError: if there is none, it cannot be imported, or it reads another family's evidence.
    """

    def is_gate(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, Gate) and not isabstract(value)

    if name in OLD_NAMES.values():
        raise ConfigError(f"the gate {name!r} is now called {GateSettings(name).name}")
    if is_plugin(name):
        kind: type[Gate] = load_object(name, "subclass of specact.gates.Gate that implements score", is_gate)
    elif name not in GATES:
        raise unknown_name("gate", name, GATES, plugins=True)
    else:
        place = "specact.gates.learned:LearnedDistance" if (name, family) == ("learned", "chunks") else GATES[name]
        module, _, attribute = place.partition(":")
        kind = getattr(import_module(module), attribute)
    if None not in (family, kind.family) and kind.family != family:
        raise ConfigError(
            f"the gate {name!r} reads what the family {kind.family!r} knows of a draft, but this pair is of the family "
            f"{family!r}; choose a gate that looks at actions alone, such as adahi"
        )
    return kind


def parameters_of(kind: type[Gate]) -> type[msgspec.Struct]:
    """The parameters of a gate as a record: plain keywords of its constructors and ``for_pair``; ``max_skips``."""
    fields: dict[str, tuple[str, Any, Any]] = {}
    makes: list[Any] = [kind.for_pair, *(base.__init__ for base in kind.mro() if issubclass(base, Gate))]
    for make in makes:
        try:
            hints = get_type_hints(make, include_extras=True)
        except Exception:  # noqa: BLE001 - third-party annotations may not resolve
            hints = {}
        for name, parameter in signature(make).parameters.items():
            hint, named = hints.get(name, Any), parameter.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
            plain = hint in (Any, int, float, bool, str) or get_origin(hint) in (Literal, Annotated)
            if named and plain and name not in _EVERY:
                fields[name] = name, hint, None
    if not issubclass(kind, Blind):
        fields["max_skips"] = "max_skips", WholeNumber | Literal["unlimited"] | None, None
    return msgspec.defstruct(kind.__name__, list(fields.values()), forbid_unknown_fields=True)


def check_options(options: Sequence[str], gates: Iterable[str], family: str | None = None) -> None:
    """Refuses options that none of the gates has for a family of pairs, see :func:`load_gate`.

    Raises:
        ConfigError: for such an option.
    """
    known = {name: set(parameters_of(load_gate(name, family)).__struct_fields__) for name in gates}
    for option in options:
        owner, _, name = _split(option)[0].rpartition(".")
        names = set().union(*(names for gate, names in known.items() if owner in ("", gate)))
        if name not in names:
            raise unknown_name(f"parameter of {owner or ', '.join(known)}", name, names)


def table_entries(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The ``gates`` table of a recipe or manifest: GATE.NAME and value of each parameter.

    Raises:
        ConfigError: for a key or value that is not allowed.
    """
    for key in table:
        if key not in _TABLE:
            raise unknown_name("recommended parameter of gates", key, _TABLE)
    entries = [(path, value) for key, value in table.items() for path in _TABLE[key]]
    for path, value in entries:
        gate = path.partition(".")[0]
        _read(gate, load_gate(gate), [(path, value)])
    return entries


def _split(option: str) -> tuple[str, str]:
    path, separator, text = option.partition("=")
    if not separator:
        raise ConfigError(f"a parameter of a gate has the form NAME=VALUE or GATE.NAME=VALUE, got {option!r}")
    return path, text


def _read(gate: str, kind: type[Gate], entries: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Those of the parameters that concern a gate, with its types; texts are read as JSON where it wants no text."""
    record, values = parameters_of(kind), dict[str, Any]()
    hints = get_type_hints(record)
    for path, value in entries:
        owner, _, name = path.rpartition(".")
        if owner == gate or (not owner and (is_plugin(gate) or name in hints)):
            values[name] = value
            if isinstance(value, str) and hints.get(name) is not str:
                with suppress(ValueError):
                    values[name] = json.loads(value)
    parameters = read_record(values, record, f"the gate {gate!r}")
    return {name: getattr(parameters, name) for name in values}


@dataclass(frozen=True)
class GateSettings:
    """A gate as plain values, for other processes and files.

    Attributes:
        name: one of :data:`GATES`, or ``MODULE:GATE``.
        threshold: for ``random`` the probability of transmission.
        tie_probability, max_skips: see :class:`~specact.gates.gate.Gate`.
        options: other parameters of the gate's class, by name.
    """

    name: str
    threshold: float = 0.0
    tie_probability: float = 0.0
    max_skips: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        now = {old: name for name, old in OLD_NAMES.items()}
        object.__setattr__(self, "name", now.get(self.name, self.name))

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
                "--gate-options max_skips=N or max_skips=unlimited"
            )

    def without_threshold(self) -> GateSettings:
        """The settings as requested, before calibration."""
        return replace(self, threshold=0.0, tie_probability=0.0)

    def build(self, pair: Pair[Any], target: InfersCodes | None = None) -> Gate:
        """A fresh gate for one robot with the pair it was calibrated for; an oracle asks ``target`` if it is given.

        Raises:
            BundleError: if the pair's learned gate is not the one that was calibrated.
            ConfigError: if the pair has no learned gate, or a user-defined gate cannot be created.
        """
        options = {**dict(self.options), "tie_probability": self.tie_probability, "max_skips": self.max_skips}
        if self.name in ORACLES:
            options["target"] = target
        kind = load_gate(self.name, pair.exchange.contract.family)
        try:
            return kind.for_pair(pair, self.threshold, **options)
        except SpecactError:
            raise
        except Exception as error:  # a third-party class can raise anything
            if not is_plugin(self.name):
                raise
            raise ConfigError(
                f"the gate {self.name!r} cannot be created: {type(error).__name__}: {error}; its constructor takes "
                "threshold and **limits and passes both on to Gate's, or it overrides for_pair"
            ) from error


def gate_settings(gate: str, pair: Pair[Any], options: Sequence[str] = ()) -> GateSettings:
    """Settings of a gate without its threshold; parameters that are not given are the pair's recommendation.

    An option is NAME=VALUE, or GATE.NAME=VALUE for one of several gates. Without a gate's name it applies to
    MODULE:GATE, and to the built-in gates that have it.

    Raises:
        ConfigError: for an unknown gate, an unknown parameter, or a learned gate that the pair does not have.
    """
    kind = load_gate(gate, pair.exchange.contract.family)
    known = parameters_of(kind).__struct_fields__
    values = {name: value for name, value in DEFAULTS.get(gate, {}).items() if name in known}
    values |= _read(gate, kind, table_entries(pair.recommended_gates))
    if gate in LEARNED:
        values["weights"] = head_fingerprint(pair)
    values |= _read(gate, kind, map(_split, options))
    limit = values.pop("max_skips", None)
    return GateSettings(gate, max_skips=None if limit == "unlimited" else limit, options=tuple(values.items()))
