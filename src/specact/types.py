"""The values that drafter, gate, verifier and policy exchange: plain dataclasses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, Literal, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from specact.observation import Window
from specact.rng import StepAddress

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Chunk = NDArray[np.float32]
"""Actions ``[n, A]``, one for each control step."""

T = TypeVar("T")

Cause = Literal["deadline", "disconnected", "overloaded", "expired", "refused", "invalid"]
"""Why the target could not be had, see :class:`Miss`."""


@dataclass_transform(frozen_default=True)
def value(kind: type[T]) -> type[T]:
    """A dataclass that is frozen for type checkers alone: a step makes a dozen, and freezing triples what one takes."""
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
    """The origins of ``count`` actions that all come from the same, ``[count]``; not to be written to."""
    origins = np.full(count, origin, np.uint8)
    origins.flags.writeable = False
    return origins


@value
class Proposal:
    """What the device knows when the gate decides.

    Attributes:
        window: the observations behind it; all that draft and target need.
        actions: the draft's action chunk, float32 ``[n, A]``, normalised.
        evidence: what the proposal's family knows besides, such as distributions and codes; gates and verifiers of
            other families do not look at it.
        origin: of the actions, where they are executed without verification.
    """

    window: Window
    actions: Chunk
    evidence: Any = None
    origin: Origin = Origin.DRAFTED


@value
class Decision:
    """What a gate decided, and on what ground.

    Attributes:
        transmit: whether the step goes to the target.
        score: the gate's score of this step.
        threshold: the score above which a step is transmitted.
        reason: ``score``, ``tie``, ``first`` (an episode's first step is always transmitted), ``max_skips``, or
            ``audit`` (it would have been skipped, and was transmitted by chance to learn what that would have cost).
    """

    transmit: bool
    score: float
    threshold: float
    reason: str


@value
class OffloadTimes:
    """What a device waited for when it asked the target, in seconds; stages that did not happen are 0.

    Where the request left ahead of the draft, each stage counts with the share of it that was still waited for.

    Attributes:
        encode: writing and reading messages, on both ends.
        network: on the link, both ways.
        queue: at the server, until the target was free.
        target: the target's inference, and on a server sampling where it does that.
    """

    encode: float = 0.0
    network: float = 0.0
    queue: float = 0.0
    target: float = 0.0

    @property
    def total(self) -> float:
        """All stages together [s]."""
        return self.encode + self.network + self.queue + self.target


@value
class Outcome:
    """What a verifier made of a proposal.

    Attributes:
        actions: the chunk to execute, float32 ``[n, A]``, normalised.
        origins: of each action, uint8 ``[n]``, see :class:`Origin`.
        verified, accepted: how many units (codes, tokens, actions) were verified, and how many of them accepted.
        times: what was waited for.
        evidence: what the family knows besides, such as the verdict on every code.
        kept: the probability that verification keeps all of the proposal that is executed; where the family has none,
            whether it did.
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
    """The target could not be had in time.

    Attributes:
        cause: ``deadline``: no reply in time; ``disconnected``: no connection when the step was due;
            ``overloaded``, ``expired``: the server had no room, or no time left, for it; ``refused``: the server
            answered with an error; ``invalid``: the reply was not one to act on, or decodes to no finite action.
        times: what was waited for.
        sent: whether a request left.
    """

    cause: Cause
    times: OffloadTimes
    sent: bool = True


@value
class StageTimes:
    """Where a step's time went, in seconds; stages that did not happen are 0.

    Attributes:
        draft: the draft's proposal.
        gate: the gate's decision.
        offload: asking the target.
        finish: what came after: verification's arithmetic on the device.
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
        proposal: what the draft offered.
        decision: what the gate made of it.
        sent_ahead: whether a request left before the draft was computed.
        outcome: the verifier's, or None if the step was skipped or missed.
        miss: why the target could not be had, or None. The fallback's action is executed then.
        actions: the chunk that was executed, float32 ``[n, A]``, normalised.
        origins: of each of its actions, uint8 ``[n]``, see :class:`Origin`.
        times: where the time went.
        unsent: whether the gate wanted a request that could not leave.
    """

    address: StepAddress
    proposal: Proposal
    decision: Decision
    sent_ahead: bool
    outcome: Outcome | None
    miss: Cause | None
    actions: Chunk
    origins: NDArray[np.uint8]
    times: StageTimes
    unsent: bool = False
