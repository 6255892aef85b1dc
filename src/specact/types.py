"""The values that drafter, gate, verifier and policy exchange: plain dataclasses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, Literal, TypeVar, cast, dataclass_transform, get_args

import numpy as np
from numpy.typing import NDArray

from specact.errors import MissError
from specact.observation import Window
from specact.rng import StepAddress

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Chunk = NDArray[np.float32]
"""Actions ``[n, A]``, one for each control step."""

T = TypeVar("T")

Cause = Literal["deadline", "disconnected", "overloaded", "expired", "refused", "invalid"]
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
        evidence: data of the proposal's family, such as distributions and codes; gates and verifiers of other families
            do not read it.
        origin: of the actions if they are executed without verification.
    """

    window: Window
    actions: Chunk
    evidence: Any = None
    origin: Origin = Origin.DRAFTED


@value
class Decision:
    """A gate's decision and its reason.

    Attributes:
        transmit: whether the step is sent to the target.
        score: the gate's score of this step.
        threshold: the score above which a step is transmitted.
        reason: ``score``, ``tie``, ``first`` (an episode's first step is always transmitted), ``max_skips``, or
            ``audit`` (a step that would be skipped, transmitted at random to measure the cost of skipping).
    """

    transmit: bool
    score: float
    threshold: float
    reason: str

    @property
    def forced(self) -> bool:
        """Whether it was transmitted regardless of its score."""
        return self.reason in ("first", "max_skips")


@value
class OffloadTimes:
    """Time that a device waited for the target, by stage, in seconds; stages that did not happen are 0.

    Attributes:
        encode: serialisation and parsing, at both ends.
        network: on the link, both ways.
        queue: at the server, until the target was free.
        target: the target's inference, including sampling where the server samples.
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
        actions: the chunk to execute, float32 ``[n, A]``, normalised.
        origins: of each action, uint8 ``[n]``, see :class:`Origin`.
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
        cause: ``deadline``: no reply before the deadline; ``disconnected``: no connection when the step was due;
            ``overloaded``: the server's queue was full; ``expired``: the deadline passed in the queue; ``refused``: the
            server replied with an error; ``invalid``: the reply was malformed, or decodes to no finite action.
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
    """A step's time by stage, in seconds; stages that did not happen are 0.

    Attributes:
        draft: the draft's proposal.
        gate: the gate's decision.
        offload: waiting for the target.
        finish: the rest: verification on the device.
    """

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
        proposal: the draft's.
        decision: the gate's.
        result: the verification's outcome, or a miss; None if the step was skipped or the result is not there yet. On a
            miss the fallback's actions are executed.
        actions: the chunk that was executed, float32 ``[n, A]``, normalised.
        origins: of each of its actions, uint8 ``[n]``, see :class:`Origin`.
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
        """The verification's outcome, or None if the step was skipped or missed."""
        return self.result if isinstance(self.result, Outcome) else None

    @property
    def miss(self) -> Cause | None:
        """Why the target request failed, or None."""
        return self.result.cause if isinstance(self.result, Miss) else None

    @property
    def unsent(self) -> bool:
        """Whether the gate chose to transmit but no request could be sent."""
        return isinstance(self.result, Miss) and not self.result.sent
