"""Every setting whose annotation states its range refuses what lies outside, and names itself."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import numpy as np
import pytest
from msgspec import inspect
from msgspec.structs import fields

import specact
from specact.errors import MissingExtraError, SpecactError
from specact.execution import Execution
from specact.gates import (
    ActionDeviation,
    Controller,
    DriftAlarm,
    LatencyBudget,
    LinkBudget,
    Never,
    Random,
    RateBudget,
    Uncertainty,
)
from specact.gates.audit import RunningMean, expected_true_skip
from specact.gates.gate import Gate, Periodic
from specact.links.link import LINKS
from specact.links.model import AddedDelay, LossyLink, MahimahiLink, SteadyLink, TraceLink
from specact.observation import Field, ObservationSpec
from specact.records import Record
from specact.systems.flash import FlashSettings
from specact.systems.freqcache import Reuse

# Constructors and functions that check their arguments, each with those that it needs. Parameters of Gate's own
# constructor are tried on one gate.
MADE: dict[Callable[..., Any], Mapping[str, Any]] = {
    ActionDeviation: {"threshold": 0.0},
    Uncertainty: {"threshold": 0.0},
    Random: {"rate": 0.5},
    Periodic: {},
    DriftAlarm: {"level": 0.5},
    RunningMean: {},
    expected_true_skip: {"rejections": [0.1], "rate": 0.5},
    RateBudget: {"rate": 0.5},
    LinkBudget: {"bytes_per_s": 1.0, "request_bytes": 1.0, "inferences_hz": 1.0},
    LatencyBudget: {"seconds": 1.0},
    Controller: {"inner": Never(), "budget": RateBudget(0.5)},
    Execution: {"kind": "append", "execute": 4},
    FlashSettings: {"execute": 4},
    Reuse: {},
    Field: {"shape": (2,)},
    SteadyLink: {"rtt_ms": 1.0, "jitter_ms": 0.0, "up_mbit_s": 1.0, "down_mbit_s": 1.0},
    LossyLink: {"link": LINKS["lan"], "loss": 0.1},
    AddedDelay: {"link": LINKS["lan"]},
    TraceLink: {"rtt_ms": np.ones(1)},
    MahimahiLink: {"up": np.ones(1), "down": np.ones(1)},
}
# Values of fields without a default that are no plain values.
GIVEN: dict[Any, Any] = {ObservationSpec: ObservationSpec({"state": Field((2,))}), np.ndarray: np.zeros(2, np.float32)}


def only(hint: Any) -> inspect.Type:
    """The type, or that of an optional value."""
    kind = inspect.type_info(hint)
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next(member for member in kinds if not isinstance(member, inspect.NoneType))


def outside(hint: Any) -> Iterator[Any]:
    """Values that an annotation does not allow."""
    if hint in (Any, type(None)):
        return
    kind = only(hint)
    if isinstance(kind, inspect.LiteralType):
        yield "no such value"
    if isinstance(kind, inspect.FloatType):
        yield from (math.nan, math.inf, "a text")
    if isinstance(kind, inspect.FloatType | inspect.IntType):
        yield from (bound for bound in (kind.gt, kind.lt) if bound is not None)
        yield from (bound + by for bound, by in ((kind.ge, -1), (kind.le, 1)) if bound is not None)


def inside(hint: Any) -> Any:
    """A value that an annotation allows."""
    if hint in GIVEN:
        return GIVEN[hint]
    kind = only(hint)
    if isinstance(kind, inspect.StructType | inspect.DataclassType):
        return smallest(kind.cls)
    if isinstance(kind, inspect.LiteralType):
        return kind.values[0]
    if isinstance(kind, inspect.FloatType | inspect.IntType):
        low, high = next((b for b in (kind.ge, kind.gt) if b is not None), 0), kind.le if kind.lt is None else kind.lt
        return low + 1 if high is None or low + 1 < high else (low + high) / 2
    if isinstance(kind, inspect.TupleType):
        return tuple(inside(item) for item in kind.item_types)
    empty = {inspect.StrType: "x", inspect.BoolType: True, inspect.DictType: {}, inspect.VarTupleType: (),
             inspect.ListType: [], inspect.AnyType: None}  # fmt: skip
    return empty[type(kind)]


def smallest(kind: Any) -> Any:
    """A record with the values that it needs."""
    hints = get_type_hints(kind, include_extras=True)
    return kind(**{field.name: inside(hints[field.name]) for field in fields(kind) if field.required})


def records() -> list[type[Record]]:
    """All records of the package."""
    for module in pkgutil.walk_packages(specact.__path__, "specact."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except (ModuleNotFoundError, MissingExtraError):
                continue  # of an extra that is not installed
    classes, left = [], [Record]
    while left:
        left += (kinds := left.pop().__subclasses__())
        classes += [kind for kind in kinds if kind.__module__.startswith("specact.")]
    return classes


def check(make: Callable[..., Any], hints: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    """Tries every value outside of every range; how many there were."""
    tried = 0
    for name, hint in hints.items():
        # A threshold may be infinite.
        for value in [math.nan] if name == "threshold" else outside(hint):
            with pytest.raises(SpecactError, match=name):
                make(**{**given, name: value})
            tried += 1
    return tried


@pytest.mark.parametrize("kind", records(), ids=lambda kind: kind.__name__)
def test_a_record_refuses_what_its_annotations_do_not_allow(kind: type[Record]) -> None:
    hints = get_type_hints(kind, include_extras=True)
    check(kind, hints, {field.name: inside(hints[field.name]) for field in fields(kind) if field.required})


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_what_is_made_with_a_value_outside_its_range_is_refused(make: Any) -> None:
    make(**MADE[make])
    constructed = isinstance(make, type) and not is_dataclass(make)
    hints = get_type_hints(make.__init__ if constructed else make, include_extras=True)
    if make is ActionDeviation:
        hints |= get_type_hints(Gate.__init__, include_extras=True)
    skipped = ("inner", "budget", "rejections", "return")
    assert check(make, {name: hint for name, hint in hints.items() if name not in skipped}, MADE[make])
