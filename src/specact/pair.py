"""The interfaces of a policy pair: a draft, a target, and their shared specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

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


class Pair(Protocol[A]):
    """Draft and target of one robot; A is the type of the target's answers."""

    @property
    def name(self) -> str:
        """Name of the pair."""
        ...

    @property
    def observation(self) -> ObservationSpec:
        """Union of the observations that draft and target need; the device stores these."""
        ...

    @property
    def units(self) -> ActionUnits:
        """Normalisation of the actions that drafter, gate and verifier exchange."""
        ...

    @property
    def execute(self) -> int:
        """How many actions of a chunk are executed before the next inference."""
        ...

    @property
    def overlap(self) -> Literal["drop", "average"]:
        """How actions that several chunks predict for the same control step are combined."""
        ...

    @property
    def rate_hz(self) -> float:
        """Control rate [Hz]."""
        ...

    @property
    def drafter(self) -> Drafter:
        """Proposes chunks with the draft."""
        ...

    @property
    def target(self) -> TargetPolicy[A]:
        """The target in this process.

        Raises:
            BundleError: where it is only on a server.
        """
        ...

    def verifier(self, target: Target[A]) -> Verifier:
        """Verifies proposals with the answers of a local or remote target."""
        ...

    @property
    def exchange(self) -> Exchange[A]:
        """What crosses the wire between a device and a server of the target."""
        ...


@dataclass(frozen=True)
class Named:
    """Draft, target and decoding as the user named them: with them another process loads the same pair.

    Attributes:
        draft, target, decoding: see :func:`~specact.families.load.load_pair`.
    """

    draft: str | None = None
    target: str | None = None
    decoding: str = ""

    @classmethod
    def of(cls, pair: LoadedPair[Any]) -> Named:
        """Those that a pair was loaded with; none for a family that has no attribute ``named``.

        Raises:
            ConfigError: for a decoding of the user's own, which has no name.
        """
        found = getattr(pair, "named", None)
        return found if isinstance(found, cls) else AS_STORED

    @property
    def words(self) -> str:
        """As options of a command, each after a space."""
        return "".join(f" --{name} {value}" for name, value in vars(self).items() if value)


AS_STORED = Named()


class LoadedPair(Pair[A], Protocol[A]):
    """A pair as :func:`~specact.families.load.load_pair` returns it."""

    @property
    def source(self) -> str:
        """The name or path by which another process loads it."""
        ...

    @property
    def env(self) -> str:
        """Name of the environment that it was made for; empty if unknown."""
        ...

    @property
    def fingerprint(self) -> str:
        """Joint fingerprint of both policies; a calibration is valid for this fingerprint alone."""
        ...

    @property
    def path(self) -> Path | None:
        """The folder that contains its calibrations, or None."""
        ...

    @property
    def recommended_gates(self) -> Mapping[str, Any]:
        """Recommended gate settings, see :class:`~specact.gates.settings.GateChoices`."""
        ...
