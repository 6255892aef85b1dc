"""What a lever is pulled on, and what it is then: a driver and a way of execution."""

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
    """Makes networks that are cheaper than a bundle's own; a room with PyTorch and ONNX does that."""

    def tiers(self, static: bool) -> tuple[str, ...]:
        """Quantisation, from the mildest to the strongest."""
        ...

    def quantised(self, tier: str) -> Mapping[str, Path]:
        """The networks of a tier by part: ``target`` of a pair, or parts of a flow policy."""
        ...

    def windowed(self, window: int) -> Path:
        """The pair's target as a network that looks at so many observations."""
        ...

    def stages(self) -> Path:
        """The folder of the pair's target in stages."""
        ...


@dataclass(frozen=True)
class Subject:
    """What levers are pulled on.

    Attributes:
        bundle: a pair, or a flow policy alone.
        execute: n, actions played of a chunk.
        variants: makes cheaper networks of it.
        steps: Euler steps of a flow policy, wherever they are not the lever.
        decoding: with which a token policy or a flow policy was loaded as a pair.
    """

    bundle: FlowBundle | AnyPair
    execute: int
    variants: Variants
    steps: int = 10
    decoding: str = ""

    @property
    def driver(self) -> FlowDriver | CodesDriver:
        """The policy as it is: the flow, or the target of a pair of action codes."""
        bundle = self.bundle if isinstance(self.bundle, FlowBundle) else of_codes(self.bundle, "a policy alone")
        return driver_of(bundle, self.steps)


@dataclass(frozen=True)
class Setting:
    """A lever at one strength.

    Attributes:
        lever, strength: which.
        driver: drives the robot.
        execution: how a chunk policy's chunks are played; None for a pair.
        remote: whether a chunk policy is at the far end of the link.
    """

    lever: str
    strength: float
    driver: Driver
    execution: Execution | None
    remote: bool = False

    @property
    def label(self) -> str:
        """Lever and strength, in words."""
        return f"{self.lever} {self.strength:g}"
