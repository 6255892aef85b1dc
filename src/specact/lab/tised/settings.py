"""The subject of a lever, and a setting of it: a driver and an execution mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specact.execution.strategy import Execution
from specact.families.chunks.bundle import FlowBundle
from specact.families.load import AnyPair, of_codes
from specact.lab.tised.drivers import CodesDriver, Driver, FlowDriver, driver_of


class Variants(Protocol):
    """Cheaper variants of a bundle's networks; implementations need PyTorch and ONNX.

    The paths are of files that need not exist yet: nothing is written before all settings of a sweep are checked.
    """

    def tiers(self, static: bool) -> tuple[str, ...]:
        """Tiers of quantisation, from the mildest to the strongest."""
        ...

    def quantised(self, tier: str) -> Mapping[str, Path]:
        """The networks of a tier by part: ``target`` of a pair, or parts of a flow policy."""
        ...

    def windowed(self, window: int) -> Path:
        """The pair's target with a shorter observation history."""
        ...

    def stages(self) -> Path:
        """The folder of the pair's target in stages."""
        ...

    @property
    def stage_count(self) -> int:
        """Number of stages of the pair's target."""
        ...


@dataclass(frozen=True)
class Subject:
    """What levers are applied to.

    Attributes:
        bundle: a pair, or a flow policy alone.
        execute: n, executed actions of a chunk.
        variants: cheaper variants of its networks.
        steps: Euler steps of a flow policy, where they are not the lever.
    """

    bundle: FlowBundle | AnyPair
    execute: int
    variants: Variants
    steps: int = 10

    @property
    def driver(self) -> FlowDriver | CodesDriver:
        """The policy as it is: the flow, or the target of a pair of action codes."""
        bundle = self.bundle if isinstance(self.bundle, FlowBundle) else of_codes(self.bundle, "a policy alone")
        return driver_of(bundle, self.steps)


@dataclass(frozen=True)
class Setting:
    """A lever at one strength.

    Attributes:
        lever, strength: name and strength of the lever.
        driver: the policy.
        execution: how a chunk policy's chunks are executed; None for a pair.
        remote: whether a chunk policy runs on the server.
    """

    lever: str
    strength: float
    driver: Driver
    execution: Execution | None
    remote: bool = False

    @property
    def label(self) -> str:
        """Lever and strength as text."""
        return f"{self.lever} {self.strength:g}"
