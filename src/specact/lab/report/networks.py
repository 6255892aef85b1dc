"""How large the networks behind a method are, and how long they take: without that no two methods compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PARTS = ("draft", "head", "target")


@dataclass(frozen=True)
class Network:
    """One network of a method.

    Attributes:
        name: ``draft``, ``head`` or ``target``.
        parameters: how many.
        ms: of one inference at batch 1, as it was measured or accounted with.
    """

    name: str
    parameters: int
    ms: float

    def __str__(self) -> str:
        return f"{self.name} {in_short(self.parameters)}, {self.ms:.2g} ms"


def networks_of(metrics: Mapping[str, Any]) -> list[Network]:
    """The networks that a method evaluates, by the ``cost`` of its metrics; none where none was recorded."""
    cost = metrics.get("cost", {})
    return [
        Network(part, cost[f"{part}_parameters"], cost[f"{part}_ms"])
        for part in PARTS
        if cost.get(f"{part}_parameters")
    ]


def all_networks(methods: Iterable[Mapping[str, Any]]) -> list[Network]:
    """Every network of these methods once, as the first of them has it."""
    found: dict[str, Network] = {}
    for network in (network for metrics in methods for network in networks_of(metrics)):
        found.setdefault(network.name, network)
    return [found[part] for part in PARTS if part in found]


def in_short(parameters: int) -> str:
    """Three digits with a unit: 8.42 k, 119 k, 1.02 M."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if parameters >= 0.9995 * size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)
