"""A policy pair: a draft, a target, and their shared specification, as one value that a family fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specact.observation import ObservationSpec, Window
from specact.types import Proposal, StepRecord
from specact.units import ActionUnits
from specact.verification import Target, TargetPolicy, Verifier

if TYPE_CHECKING:
    from specact.wire.exchange import Exchange

A = TypeVar("A")


class Drafter(Protocol):
    """Proposes a chunk of actions; the small policy on the device."""

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The drafted chunk for one window, sampled with ``rng``."""
        ...


class Follower(Protocol):
    """What is told of everything that its robot executes: a gate, or a stateful drafter; one instance per robot."""

    def reset(self) -> None:
        """Forgets the episode."""
        ...

    def on_action(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        """Records the drafted and the executed action of a control step, both ``[A]``, normalised."""
        ...

    def on_inference(self, record: StepRecord) -> None:
        """Records an inference, once; a late verdict is not known yet."""
        ...

    def on_verified(self, record: StepRecord) -> None:
        """Records an inference whose verification has arrived, at once or late; after :meth:`on_inference`."""
        ...


@runtime_checkable
class FollowingDrafter(Drafter, Follower, Protocol):
    """A stateful :class:`Drafter`."""


@dataclass(frozen=True)
class PairSource:
    """What a user named; another process loads the same pair with it, see :func:`specact.load_pair`.

    Attributes:
        name_or_path: of the pair.
        draft, target, decoding: where not the pair's own.
    """

    name_or_path: str
    draft: str | None = None
    target: str | None = None
    decoding: str = ""

    @property
    def cli_args(self) -> str:
        """As arguments of a command."""
        options = {"draft": self.draft, "target": self.target, "decoding": self.decoding}
        return self.name_or_path + "".join(f" --{name} {value}" for name, value in options.items() if value)


UNNAMED = PairSource("")


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair(Generic[A]):
    """Draft and target of one robot; A is the type of the target's answers.

    Attributes:
        name: of the pair.
        observation: union of the observations that draft and target need; the device stores these.
        units: of the actions that drafter, gate and verifier exchange.
        execute: how many actions of a chunk are executed before the next inference.
        rate_hz: control rate [Hz].
        drafter: makes a drafter, a new one for each robot.
        target: the target in this process; raises BundleError where it is only on a server.
        verifier: makes a verifier, a new one for each robot, that asks a local or remote target.
        exchange: what crosses the wire between a device and a server of the target.
        overlap: how actions that several chunks predict for the same control step are combined.
        env: name of the environment that it was made for; empty if unknown.
        fingerprint: joint fingerprint of both policies; a calibration is valid for this fingerprint alone.
        path: the folder that contains its calibrations, or None.
        source: how another process loads it.
        recommended_gates: settings of gates, see :class:`~specact.gates.settings.GateChoices`.
        parts: the family's own dataclass, whose method ``pair`` made this pair.
    """

    name: str
    observation: ObservationSpec
    units: ActionUnits
    execute: int
    rate_hz: float
    drafter: Callable[[], Drafter]
    target: Callable[[], TargetPolicy[A]]
    verifier: Callable[[Target[A]], Verifier]
    exchange: Exchange[Any]
    overlap: Literal["drop", "average"] = "drop"
    env: str = ""
    fingerprint: str = ""
    path: Path | None = None
    source: PairSource = UNNAMED
    recommended_gates: Mapping[str, Any] = field(default_factory=dict)
    parts: Any = None

    def composed(self, **changes: Any) -> Pair[A]:
        """The pair with other values of some fields of its :attr:`parts`."""
        pair: Pair[A] = replace(self.parts, **changes).pair()
        return pair
