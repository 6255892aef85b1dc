"""A chunk policy on a robot: its actions are played as an execution says while the next chunk is inferred."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specact.clock import Clock, RealClock
from specact.errors import ConfigError, ObservationError, unknown_name
from specact.execution.history import RollForward, SampledHistory
from specact.execution.schedule import Schedule
from specact.execution.strategy import Execution
from specact.fallback import EXECUTE_DRAFT, Fallback
from specact.observation import Observation
from specact.rng import StepAddress
from specact.robot.inference import Finished, Inference
from specact.robot.loop import quantiles_ms
from specact.types import Miss, OffloadTimes, Origin, StepRecord

Idle = Literal["hold_last", "stop_action", "nothing"]


class ChunkRunner:
    """Chooses a robot's actions for :func:`~specact.robot.loop.run_loop`; it never waits for the policy.

    A control step without an action to play is idle. So the robot stands still while it thinks, in ``synchronous``
    execution, and wherever a chunk comes too late.

    Args:
        inference: of the policy.
        execution: how its chunks are played.
        period_s: control period [s]; the policy's own if not given.
        roll_forward: a model of the robot, which ``roll_forward`` execution needs: what the robot would see after the
            actions ``[r, A]``, given an observation.
        idle: what is sent in an idle control step: the last action again, the fallback's stop action, or nothing, for a
            robot that holds by itself. Before the first action the last one is the stop action, or nothing where nobody
            has said which that is.
        fallback: ``stop`` stops the robot at the first inference that comes to nothing, and ``max_consecutive_misses``
            after more than so many; control steps without a usable observation count as well. Otherwise what is left of
            the chunk is played on.
        deadline_s: an inference that takes longer is a miss, and what it gives is not used [s].
        max_chunk_age_s: what is left of a chunk is dropped once its observation is older than this [s].
        seed, robot: address of the random streams.
        clock: what the time is read from.

    Attributes:
        counts: ``inferences`` that ended in a chunk, ``chunks`` of which an action was played, ``idle`` control steps,
            and misses by cause, since it was made.
        stopped: whether the fallback stopped the robot; every action is the stop action then, until :meth:`reset`.
        ended: the inference that ended last, in a chunk or a miss; None before the first of an episode.
        record: None; a policy without a draft and a gate has no step records.

    Raises:
        ConfigError: if policy, execution and robot do not go together, or a number is out of range.
    """

    record: StepRecord | None = None

    def __init__(
        self,
        inference: Inference,
        execution: Execution,
        *,
        period_s: float | None = None,
        roll_forward: RollForward | None = None,
        idle: Idle = "hold_last",
        fallback: Fallback = EXECUTE_DRAFT,
        deadline_s: float = math.inf,
        max_chunk_age_s: float = math.inf,
        seed: int = 0,
        robot: int = 0,
        clock: Clock | None = None,
    ) -> None:
        source, still = inference.source, fallback.stop_action
        spec = source.spec
        execution.check(source, rolls_forward=roll_forward is not None)
        if idle not in get_args(Idle):
            raise unknown_name("way to idle", idle, get_args(Idle))
        if idle == "stop_action" and still is None:
            raise ConfigError(
                "to idle with the stop action, the fallback needs a stop_action [A]: the action that makes this robot "
                "stand still"
            )
        if still is not None and (np.shape(still) != (spec.actions,) or not np.isfinite(still).all()):
            raise ConfigError(f"a stop action of this robot must be {spec.actions} finite numbers, got {still}")
        if not deadline_s > 0.0 or not max_chunk_age_s > 0.0:
            raise ConfigError(f"deadline_s and max_chunk_age_s must be above 0, got {deadline_s} and {max_chunk_age_s}")
        self.clock = RealClock() if clock is None else clock
        self.counts: Counter[str] = Counter()
        self._latencies: list[float] = []
        self._ages: list[float] = []
        self._inference, self._fallback, self._still, self._idle = inference, fallback, still, idle
        self._deadline_s, self._max_chunk_age_s = deadline_s, max_chunk_age_s
        period_s = 1.0 / spec.rate_hz if period_s is None else period_s
        self._schedule = Schedule(execution, period_s, (spec.chunk, spec.actions))
        model = roll_forward if execution.kind == "roll_forward" else None
        self._history = SampledHistory(spec.observation, period_s, model)
        self._address = StepAddress(seed, robot, 0, 0)
        self.reset(episode=0)

    def reset(self, episode: int) -> None:
        """Starts an episode; its number is part of the random streams' address."""
        self._address = self._address._replace(episode=episode, step=0)
        self._schedule.reset()
        self._history.reset()
        # Of the inference whose answer is of use, and since when the one under way has had time.
        self._expected: StepAddress | None = None
        self._since_s = self._seen_s = self.clock.now()
        # In a row: inferences that came to nothing, and control steps without a usable observation.
        self._misses = self._unseen = 0
        self._last: NDArray[np.float32] | None = None
        self._idling = self.stopped = False
        self.ended: Finished | None = None

    @property
    def stop_action(self) -> NDArray[np.float32] | None:
        """What makes this robot stand still, ``[A]``, or None if nobody said."""
        return None if self._still is None else np.array(self._still, np.float32)

    @property
    def origin(self) -> Origin | None:
        """Where the action chosen last comes from: the policy, which is the target, or the rule for idle steps."""
        if self._last is None and not self._idling and not self.stopped:
            return None
        return Origin.FALLBACK if self._idling or self.stopped or self._unseen else Origin.REPLACED

    @property
    def expired(self) -> bool:
        """Whether the action chosen last is of a chunk whose observation is older than ``max_chunk_age_s``."""
        return not self._idling and self.clock.now() - self._seen_s > self._max_chunk_age_s

    def act(self, observation: Observation) -> NDArray[np.float32] | None:
        """One control step: the action ``[A]`` to execute now, in the environment's units; None to send nothing.

        Args:
            observation: a mapping with every array that the policy needs, or one array, taken as ``state``.

        Raises:
            ObservationError: if the observation cannot be used. No action is returned then.
        """
        now, schedule = self.clock.now(), self._schedule
        self._history.sample(now, observation)
        self._unseen = 0
        self._collect()
        schedule.drop_older(now - self._max_chunk_age_s)
        schedule.advance(now)
        if not self.stopped and schedule.wants and not self._inference.busy:
            self._begin(now)
            self._collect()
            schedule.advance(now)
        if self.stopped:
            return self.stop_action
        played = schedule.play()
        self._idling = played is None
        if played is None:
            self.counts["idle"] += 1
            if self._idle == "nothing":
                return None
            return self.stop_action if self._idle == "stop_action" or self._last is None else self._last
        if played.first:
            self.counts["chunks"] += 1
            self._ages.append(now - played.seen_s)
        self._last, self._seen_s = played.action, played.seen_s
        self._history.play(played.action)
        return played.action

    def act_unseeing(self, error: ObservationError) -> NDArray[np.float32] | None:
        """One control step whose observation cannot be used, instead of :meth:`act`: the last action is held.

        Args:
            error: why the observation cannot be used.

        Raises:
            ObservationError: ``error``, if no action of the episode has been chosen yet.
        """
        if self._last is None:
            raise error
        self._unseen += 1
        self._idling = False
        self._stop_if_due()
        return self.stop_action if self.stopped else self._last

    def wait(self, seconds: float) -> bool:
        """Where the robot is idle: waits for the chunk under way, for at most so long; returns whether it is there."""
        return self._idling and not self.stopped and self._inference.wait(seconds) and self._collect()

    def summary(self) -> dict[str, Any]:
        """What the inferences were like, as plain values.

        Returns:
            ``inferences``, ``chunks`` and ``idle``, see :attr:`counts`; ``misses`` by cause; ``inference_ms``,
            quantiles of an inference, the link included; and ``observation_age_ms``, the mean age of the observation
            when the first action of its chunk is played.
        """
        counted = ("inferences", "chunks", "idle")
        return {name: self.counts[name] for name in counted} | {
            "misses": {name: count for name, count in self.counts.items() if name not in counted},
            "inference_ms": quantiles_ms(self._latencies),
            "observation_age_ms": 1e3 * float(np.mean(self._ages)) if self._ages else None,
        }

    def _begin(self, now: float) -> None:
        schedule = self._schedule
        window, inpainting = self._history.window(schedule.ahead), schedule.inpainting
        self._expected, self._since_s = self._address, now
        self._inference.begin(window, self._address, inpainting)
        schedule.ask(now)
        self._address = self._address.following

    def _collect(self) -> bool:
        """Takes in an inference that has ended; returns whether it ended in a chunk that is of use."""
        found = self._inference.take()
        if found is None:
            waited_s = self.clock.now() - self._since_s
            if self._inference.busy and waited_s > self._deadline_s:
                self.ended = Finished(self._expected or self._address, Miss("deadline", OffloadTimes()), waited_s)
                self._since_s, self._expected = self.clock.now(), None
                self._miss("deadline")
            return False
        # Of an earlier episode, or after its deadline.
        if found.address != self._expected:
            return False
        self._expected, self.ended = None, found
        if isinstance(found.answer, Miss):
            self._miss(found.answer.cause)
            return False
        self._misses = 0
        self.counts["inferences"] += 1
        self._latencies.append(found.took_s)
        self._schedule.arrive(found.answer, found.took_s)
        return True

    def _miss(self, cause: str) -> None:
        self._schedule.miss()
        self.counts[cause] += 1
        self._misses += 1
        self._stop_if_due()

    def _stop_if_due(self) -> None:
        self.stopped = self.stopped or self._fallback.stops(self._misses + self._unseen)
