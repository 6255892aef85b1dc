"""Size and inference time of the networks that a method evaluates."""

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
        parameters: their number.
        ms: of one inference at batch 1, measured or accounted.
    """

    name: str
    parameters: int
    ms: float

    def __str__(self) -> str:
        return f"{self.name} {in_short(self.parameters)}, {self.ms:.2g} ms"


def networks_of(metrics: Mapping[str, Any]) -> list[Network]:
    """The networks that a method evaluates, from the ``cost`` of its metrics."""
    cost = metrics.get("cost", {})
    return [
        Network(part, cost[f"{part}_parameters"], cost[f"{part}_ms"])
        for part in PARTS
        if cost.get(f"{part}_parameters")
    ]


def all_networks(methods: Iterable[Mapping[str, Any]]) -> list[Network]:
    """The distinct networks of these methods, each from the first method that has it."""
    networks: dict[str, Network] = {}
    for network in (network for metrics in methods for network in networks_of(metrics)):
        networks.setdefault(network.name, network)
    return [networks[part] for part in PARTS if part in networks]


def in_short(parameters: int) -> str:
    """Three digits with a unit: 8.42 k, 119 k, 1.02 M."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if parameters >= 0.9995 * size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)
