"""A chunk policy on a robot: plays its actions according to an execution while the next chunk is inferred."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError
from specact.execution.history import RollForward, SampledHistory
from specact.execution.schedule import Execution, Schedule
from specact.observation import Observation
from specact.pair import Pending
from specact.records import validated
from specact.rng import StepAddress
from specact.robot.inference import Finished, Inference
from specact.robot.loop import quantiles_ms, recent_times
from specact.safety import EXECUTE_DRAFT, Fallback, Safety
from specact.types import CLOCK, NO_OFFLOAD, Clock, Miss, Origin, StepRecord, check_action

Idle = Literal["hold_last", "stop_action", "nothing"]
_SLOW_INFERENCE_S = 10.0  # without a deadline, for the usual age of a chunk


# No robot has larger actions; their squares and differences are finite in float32.
_LARGEST = np.array(1e15, np.float32)


class ActionRange:
    """A robot's range of actions ``[A]`` in the environment's units, for a policy whose actions have these as well.

    It is infinite where it is unknown.

    Raises:
        ConfigError: if it is not two vectors of one size, the lower one below the other.
    """

    def __init__(self, low: ArrayLike, high: ArrayLike) -> None:
        self.low, self.high = np.asarray(low, np.float32), np.asarray(high, np.float32)
        if self.low.ndim != 1 or self.low.shape != self.high.shape or not (self.low < self.high).all():
            raise ConfigError(
                f"a range of actions is two vectors, the lower one below the other, got {self.low} and {self.high}"
            )
        with np.errstate(over="ignore"):
            width = self.high - self.low
            self._least = np.maximum(self.low - width, -_LARGEST)
            self._most = np.minimum(self.high + width, _LARGEST)

    @classmethod
    def unknown(cls, actions: int) -> ActionRange:
        """The range that allows every action ``[A]``."""
        return cls(np.full(actions, -np.inf), np.full(actions, np.inf))

    def narrowed(self, other: ActionRange) -> ActionRange:
        """What both ranges allow.

        Raises:
            ConfigError: if they have another size or nothing in common.
        """
        if self.low.shape != other.low.shape:
            raise ConfigError(f"the policy has actions of {len(self.low)} numbers, the robot of {len(other.low)}")
        return ActionRange(np.maximum(self.low, other.low), np.minimum(self.high, other.high))

    def is_near(self, actions: NDArray[np.float32]) -> bool:
        """Whether actions ``[..., A]`` exceed the range by no more than its own width; others are no answer."""
        return bool(((actions >= self._least) & (actions <= self._most)).all())

    def to_environment(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.minimum(np.maximum(actions, self.low), self.high)

    def normalise(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        check_action(action, self.low, self.high)
        return np.array(action, np.float32)


class ChunkRunner:
    """Provides a robot's actions for :func:`~specact.robot.loop.run_loop`; it never blocks on the policy.

    A step without an action is idle and sends the last one (at most until its maximum age), the stop action, or
    nothing. Misses are failed inferences, and chunks too late for any of their actions; chunks far outside
    ``action_range`` fail. ``roll_forward`` is a model of the robot: the observation after the actions ``[r, A]``.

    Attributes:
        counts: successful ``inferences``, ``chunks`` played, ``idle`` steps, and misses by cause.
        ended, safety: the last inference of the episode that has ended, and what the robot does on failures.
        record: None; a policy without a draft and a gate has no step records.
    """

    record: StepRecord | None = None

    @validated
    def __init__(
        self,
        inference: Inference,
        execution: Execution,
        *,
        period_s: float | None = None,
        roll_forward: RollForward | None = None,
        action_range: ActionRange | None = None,
        idle: Idle = "hold_last",
        fallback: Fallback = EXECUTE_DRAFT,
        deadline_s: float = math.inf,
        seed: int = 0,
        robot: int = 0,
        clock: Clock = CLOCK,
    ) -> None:
        spec = inference.source.spec
        execution.check(spec, inpaints=inference.source.inpaints, rolls_forward=roll_forward is not None)
        if idle == "stop_action" and fallback.stop_action is None:
            raise ConfigError("to idle with the stop action, the fallback needs a stop_action [A]")
        if not deadline_s > 0.0:
            raise ConfigError(f"deadline_s must be above 0, got {deadline_s}")
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self._latencies_s, self._ages_s = recent_times(), 0.0
        self._inference, self._idle, self._deadline_s = inference, idle, deadline_s
        self._range = ActionRange.unknown(spec.actions) if action_range is None else action_range
        period_s = 1.0 / spec.rate_hz if period_s is None else period_s
        slowest_s = max(min(deadline_s, _SLOW_INFERENCE_S), execution.overlap * period_s)
        usual_age_s = slowest_s + (execution.execute + 1) * period_s
        self.safety = Safety(fallback, self._range, self.clock, usual_age_s)
        self._schedule = Schedule(execution, period_s, (spec.chunk, spec.actions))
        model = roll_forward if execution.kind == "roll_forward" else None
        self._history = SampledHistory(spec.observation, period_s, model)
        self._address = StepAddress(seed, robot, 0, 0)
        # The current inference; one of the last episode goes on.
        self._request: Pending[Finished] | None = None
        self.reset(episode=0)

    def reset(self, episode: int) -> None:
        """Starts an episode; its number is part of the random streams' address."""
        self._address = self._address._replace(episode=episode, step=0)
        for part in (self.safety, self._schedule, self._history):
            part.reset()
        # Address of the inference whose result will be used, and start of the current one's deadline.
        self._expected: StepAddress | None = None
        self._started_s = self._played_s = self.clock.now()
        self._idling = False
        self.ended: Finished | None = None

    @property
    def origin(self) -> Origin | None:
        """Origin of the last action: the policy, which is the target, or the rule for idle steps."""
        if self._idling or self.safety.overrides:
            return Origin.FALLBACK
        return None if self.safety.last is None else Origin.REPLACED

    def act(self, observation: Observation) -> NDArray[np.float32] | None:
        """One control step: the action ``[A]`` to execute now, in the environment's units; None to send nothing.

        Args:
            observation: a mapping with every array that the policy needs, or one array, taken as ``state``.

        Raises:
            ObservationError: if the observation cannot be used.
        """
        now, schedule, safety = self.clock.now(), self._schedule, self.safety
        self._history.sample(now, observation)
        self._collect()
        self._advance(now)
        if not safety.stopped and schedule.wants and self._request is None:
            self._start_inference(now)
            self._collect()
            self._advance(now)
        if safety.stopped:
            return safety.stop_action
        played = schedule.play()
        self._idling = played is None
        if played is None:
            return self._idle_action(now)
        if played.first:
            safety.answered()
            self.counts["chunks"] += 1
            self._ages_s += now - played.seen_s
        self._played_s = now
        safety.see(played.seen_s)
        action = safety.send(played.action)
        self._history.play(action)
        return action

    def wait(self, seconds: float) -> bool:
        """If idle, waits for the current inference for at most ``seconds``; returns whether a chunk has arrived."""
        idles = self._idling and not self.safety.stopped and self._request is not None
        return idles and self._inference.wait(seconds) and self._collect()

    def summary(self) -> dict[str, Any]:
        """Statistics of the inferences, as plain values.

        Returns:
            ``inferences``, ``chunks`` and ``idle``, see :attr:`counts`; ``misses`` by cause; ``inference_ms``,
            quantiles of the latency of the last 100,000 inferences, the link included; and ``observation_age_ms``, the
            mean age of the observation when the first action of its chunk is played.
        """
        counted = ("inferences", "chunks", "idle")
        return {name: self.counts[name] for name in counted} | {
            "misses": {name: count for name, count in self.counts.items() if name not in counted},
            "inference_ms": quantiles_ms(self._latencies_s),
            "observation_age_ms": 1e3 * self._ages_s / self.counts["chunks"] if self.counts["chunks"] else None,
        }

    def _start_inference(self, now: float) -> None:
        schedule = self._schedule
        window, inpainting = self._history.window(schedule.ahead), schedule.inpainting
        self._expected, self._started_s = self._address, now
        self._request = self._inference.begin(window, self._address, inpainting)
        schedule.ask(now)
        self._address = self._address.following

    def _idle_action(self, now: float) -> NDArray[np.float32] | None:
        # The observation is usable: a robot's model may make of one that is usable another that is not.
        self.safety.rest(now)
        self.counts["idle"] += 1
        if self._idle == "nothing":
            return None
        holds = self._idle == "hold_last" and now - self._played_s <= self.safety.max_age_s
        last = self.safety.last if holds else None
        return self.safety.stop_action if last is None else last

    def _advance(self, now: float) -> None:
        """Plays on, and counts a chunk that arrived too late for any of its actions as a miss."""
        dropped = self._schedule.drop_older(now - self.safety.max_age_s)
        if self._schedule.advance(now) or dropped:
            self._miss("deadline")

    def _collect(self) -> bool:
        """Handles an inference that has ended or missed its deadline; whether it gave a usable chunk."""
        request = self._request
        if request is None:
            return False
        if not request.done():
            waited_s = self.clock.now() - self._started_s
            if waited_s > self._deadline_s:
                self.ended = Finished(self._expected or self._address, Miss("deadline", NO_OFFLOAD), waited_s)
                self._started_s, self._expected = self.clock.now(), None
                self._miss("deadline")
            return False
        self._request, finished = None, request.result()
        assert isinstance(finished, Finished), "misses are within"
        # Otherwise the result belongs to an earlier episode, or missed its deadline.
        if finished.address != self._expected:
            return False
        answer = finished.answer
        if not isinstance(answer, Miss) and not self._range.is_near(answer):
            answer = Miss("invalid", NO_OFFLOAD)
        self._expected, self.ended = None, Finished(finished.address, answer, finished.took_s)
        if isinstance(answer, Miss):
            self._miss(answer.cause)
            return False
        self.counts["inferences"] += 1
        self._latencies_s.append(finished.took_s)
        self._schedule.arrive(answer, finished.took_s)
        return True

    def _miss(self, cause: str) -> None:
        self._schedule.miss()
        self.counts[cause] += 1
        self.safety.missed()
