"""What a policy on a robot is made of: a draft, a target, and what the two agree on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specact.observation import ObservationSpec, Window
from specact.types import Proposal, StepRecord
from specact.units import ActionUnits
from specact.verification import Target, TargetPolicy, Verifier
from specact.wire.dialect import Codec
from specact.wire.messages import Responder

A = TypeVar("A")


class Drafter(Protocol):
    """Proposes a chunk of actions; the small policy on the device."""

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The drafted chunk for one window; ``rng`` is what it draws from."""
        ...


@runtime_checkable
class FollowingDrafter(Drafter, Protocol):
    """A :class:`Drafter` that follows what its robot does; it belongs to this robot alone."""

    def reset(self) -> None:
        """Forgets the episode."""
        ...

    def update(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        """Learns which action was drafted and which was executed, both ``[A]``, normalised."""
        ...

    def learn(self, record: StepRecord) -> None:
        """Learns how an inference went; once more where its verification came late."""
        ...


class Pair(Protocol[A]):
    """Draft and target of one robot; A is what the target answers with."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def observation(self) -> ObservationSpec:
        """What the device keeps: all that draft or target need to see."""
        ...

    @property
    def units(self) -> ActionUnits:
        """Of the actions between drafter, gate and verifier."""
        ...

    @property
    def execute(self) -> int:
        """How many actions of a chunk are executed before the next inference."""
        ...

    @property
    def overlap(self) -> Literal["drop", "average"]:
        """What becomes of actions that several chunks predict for the same control step."""
        ...

    @property
    def rate_hz(self) -> float:
        """Control rate [Hz]."""
        ...

    @property
    def drafter(self) -> Drafter:
        """Of the draft."""
        ...

    @property
    def target(self) -> TargetPolicy[A]:
        """The target in this process.

        Raises:
            BundleError: where it is only on a server.
        """
        ...

    def verifier(self, target: Target[A]) -> Verifier:
        """Judges proposals by the answers of a target, wherever that runs."""
        ...

    @property
    def codec(self) -> Codec[A]:
        """The target's answers on the wire."""
        ...

    @property
    def responder(self) -> Responder:
        """What a server does with requests for the target.

        Raises:
            BundleError: as for :attr:`target`.
        """
        ...


class LoadedPair(Pair[A], Protocol[A]):
    """A pair as :func:`~specact.families.load.load_pair` gives it."""

    @property
    def source(self) -> str:
        """The name or path by which another process loads it."""
        ...

    @property
    def env(self) -> str:
        """Name of the environment that it was made for; empty where nobody said."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of both policies together: what a calibration has to have been made for."""
        ...

    @property
    def path(self) -> Path | None:
        """The folder that its calibrations are in; None where it has none."""
        ...

    @property
    def recommended_gates(self) -> Mapping[str, Any]:
        """Choices for the gates that serve it well, see :class:`~specact.gates.settings.GateChoices`."""
        ...
