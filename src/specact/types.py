"""The values that drafter, gate, verifier and policy exchange, the units of their actions, and clocks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar, cast, dataclass_transform, get_args

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, MissError
from specact.observation import Window
from specact.rng import StepAddress

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Chunk = NDArray[np.float32]
"""Actions ``[n, A]``, one for each control step."""

T = TypeVar("T")

Cause = Literal["deadline", "disconnected", "held_back", "overloaded", "expired", "refused", "invalid"]
"""Why a target request failed, see :class:`Miss`."""


@dataclass_transform(frozen_default=True)
def value(kind: type[T]) -> type[T]:
    """A dataclass that only type checkers treat as frozen; freezing triples the time of its construction."""
    return dataclass(slots=True)(kind)


class Origin(IntEnum):
    """Where an executed action comes from. The numbers are part of recorded results: never reuse or reorder them."""

    DRAFTED = 0  # the draft's, not verified
    ACCEPTED = 1  # the draft's, accepted by the verifier
    REPLACED = 2  # the target's, where the draft was rejected or not asked
    COMPENSATED = 3  # extrapolated from executed actions
    RETRIEVED = 4  # from a memory, not verified
    FALLBACK = 5  # the rule for missed steps


@lru_cache(256)
def all_from(origin: Origin, count: int) -> NDArray[np.uint8]:
    """An array ``[count]`` filled with one origin; read-only."""
    origins = np.full(count, origin, np.uint8)
    origins.flags.writeable = False
    return origins


@value
class Proposal:
    """The draft's proposal for one inference, the gate's input.

    Attributes:
        window: the observations that draft and target need.
        actions: the draft's action chunk, float32 ``[n, A]``, normalised.
        evidence: data of its family, such as distributions and codes, that other families do not read.
        origin: of the actions if they are executed without verification.
    """

    window: Window
    actions: Chunk
    evidence: Any = None
    origin: Origin = Origin.DRAFTED


@value
class Decision:
    """A gate's decision to transmit a step or not, by a score above or below the threshold, and its reason.

    The reason is ``score``, ``tie``, ``first`` (of an episode), ``max_skips``, or ``audit`` (a step that would be
    skipped, transmitted at random to measure the cost of skipping).
    """

    transmit: bool
    score: float
    threshold: float
    reason: str


@value
class OffloadTimes:
    """Time that a device waited for the target, in seconds; stages that did not happen are 0.

    That is to serialise and parse at both ends, on the link both ways, in the server's queue until the target was free,
    and for the target's inference, with sampling where the server samples.
    """

    encode: float = 0.0
    network: float = 0.0
    queue: float = 0.0
    target: float = 0.0

    @property
    def total(self) -> float:
        """All stages together [s]."""
        return self.encode + self.network + self.queue + self.target


NO_OFFLOAD = OffloadTimes()


@value
class Outcome:
    """The result of a verification.

    Attributes:
        actions, origins: the chunk to execute, float32 ``[n, A]``, normalised; and of each action, uint8 ``[n]``.
        verified, accepted: how many units (codes, tokens, actions) were verified, and how many of them accepted.
        times: time that the device waited.
        evidence: data of the family, such as the verdict on every code.
        kept: the probability that verification accepts every executed unit of the proposal; 1 or 0, by what happened,
            in families that have no such probability.
    """

    actions: Chunk
    origins: NDArray[np.uint8]
    verified: int
    accepted: int
    times: OffloadTimes
    evidence: Any = None
    kept: float = math.nan


@value
class Miss:
    """A target request without a usable result.

    Attributes:
        cause: ``deadline``: no reply before it; ``disconnected``: no connection; ``held_back``: not sent, as the last
            three had no reply and nothing came since; ``overloaded``: the server's queue was full; ``expired``: the
            deadline passed in the queue; ``refused``: an error; ``invalid``: malformed, or no finite action.
        times: time that the device waited.
        sent: whether a request was sent.
    """

    cause: Cause
    times: OffloadTimes
    sent: bool = True

    @classmethod
    def of(cls, error: MissError, times: OffloadTimes) -> Miss:
        """The miss that a policy raised, whose server did not answer; ``invalid`` for a cause that does not exist."""
        return cls(cast(Cause, error.cause) if error.cause in get_args(Cause) else "invalid", times)


@value
class StageTimes:
    """A step's time by stage, in seconds: drafting, gating, waiting for the target, and verification on the device."""

    draft: float
    gate: float
    offload: OffloadTimes
    finish: float

    @property
    def total(self) -> float:
        """All stages together [s]."""
        return self.draft + self.gate + self.offload.total + self.finish


@value
class StepRecord:
    """One inference of a :class:`~specact.policy.SpeculativePolicy`.

    Attributes:
        address: which inference of which robot; a step is one inference, not one control period.
        proposal, decision: the draft's and the gate's.
        result: the verification's outcome, or a miss, on which the fallback's actions are executed; None if the step
            was skipped or the result is not there yet.
        actions, origins: the executed chunk, float32 ``[n, A]``, normalised; and of each action, uint8 ``[n]``.
        times: by stage.
    """

    address: StepAddress
    proposal: Proposal
    decision: Decision
    result: Outcome | Miss | None
    actions: Chunk
    origins: NDArray[np.uint8]
    times: StageTimes

    @property
    def outcome(self) -> Outcome | None:
        """Of the verification, or None if the step was skipped or missed."""
        return self.result if isinstance(self.result, Outcome) else None

    @property
    def miss(self) -> Cause | None:
        """Why the target request failed, or None."""
        return self.result.cause if isinstance(self.result, Miss) else None

    @property
    def unsent(self) -> bool:
        """Whether the gate chose to transmit but no request could be sent."""
        return isinstance(self.result, Miss) and not self.result.sent


# Arrays, because NumPy takes twice as long with Python numbers.
_LOWEST, _HIGHEST = np.array(-1.0, np.float32), np.array(1.0, np.float32)


class Units(Protocol):
    """How a policy's actions become the robot's, within its range."""

    def to_environment(self, actions: NDArray[np.float32], /) -> NDArray[np.float32]:
        """Actions ``[..., A]`` in the environment's units, clipped to the robot's range; a copy."""
        ...

    def normalise(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """One action ``[A]`` in the policy's units; ConfigError for one that is not finite or of the robot's range."""
        ...


@dataclass(frozen=True)
class ActionUnits:
    """``action = centre + scale * normalised``, float32 ``[A]``, scale > 0; demonstrated actions lie in [-1, 1]."""

    centre: NDArray[np.float32]
    scale: NDArray[np.float32]

    @classmethod
    def of_range(cls, low: NDArray[np.float32], high: NDArray[np.float32]) -> ActionUnits:
        """Units in which actions between ``low`` and ``high`` ``[A]`` lie in [-1, 1]."""
        return cls((low + high) / np.float32(2), np.maximum((high - low) / np.float32(2), np.float32(1e-6)))

    def to_environment(self, normalised: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.minimum(np.maximum(normalised, _LOWEST), _HIGHEST) * self.scale + self.centre

    def from_environment(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalised actions ``[..., A]``, without clipping."""
        normalised: NDArray[np.float32] = (actions - self.centre) / self.scale
        return normalised

    def normalise(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        slack = 1e-5 * self.scale
        check_action(action, self.centre - self.scale, self.centre + self.scale, slack)
        return np.asarray((action - self.centre) / self.scale, dtype=np.float32)


def check_action(
    action: NDArray[np.float32],
    low: NDArray[np.float32],
    high: NDArray[np.float32],
    slack: NDArray[np.float32] | float = 0.0,
) -> None:
    """Refuses a user-given action ``[A]`` that has another size, is not finite, or lies outside the range."""
    inside = np.shape(action) == low.shape and np.isfinite(action).all()
    if not inside or not ((action >= low - slack) & (action <= high + slack)).all():
        raise ConfigError(
            f"an action of this robot must have shape [{len(low)}] and lie between {low.tolist()} and "
            f"{high.tolist()}, got {action}"
        )


class Clock:
    """The machine's monotonic clock; a subclass is another one."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed time."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Waits for ``seconds`` (>= 0)."""
        time.sleep(seconds)


CLOCK = Clock()


class VirtualClock(Clock):
    """Advances by calls of :meth:`sleep` only, so that simulations and tests do not wait."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a sleep must be at least 0 s, got {seconds}")
        self._now += seconds
