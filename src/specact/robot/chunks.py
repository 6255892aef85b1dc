"""A chunk policy on a robot: plays its actions according to an execution while the next chunk is inferred."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.errors import BundleError, ConfigError, MissError, ObservationError
from specact.execution.history import RollForward, SampledHistory
from specact.execution.schedule import Execution, Schedule
from specact.families.chunks.policy import Chunk, ChunkPolicy, ChunkSpec, Inpainting
from specact.observation import Observation, Window
from specact.pair import Pending
from specact.records import validated
from specact.rng import Role, StepAddress, StepStreams
from specact.robot.loop import quantiles_ms, recent_times
from specact.safety import EXECUTE_DRAFT, Fallback, Idle, Safety
from specact.types import CLOCK, NO_OFFLOAD, Clock, Miss, Origin, StepRecord, check_action

_SLOW_INFERENCE_S = 10.0  # without a deadline, for the usual age of a chunk
# No robot has larger actions; their squares and differences are finite in float32.
_LARGEST = np.array(1e15, np.float32)


class ActionRange:
    """A robot's range of actions ``[A]`` in the environment's units, for a policy whose actions have these as well.

    It is infinite where it is unknown. Anything but two vectors of one size, ``low`` below ``high``, is a ConfigError.
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
        """What both ranges allow; ConfigError if they have different sizes or nothing in common."""
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


class ChunkSource(Protocol):
    """Source of a robot's chunks: a policy in this process, or on a server; ``inpaints`` where it supports that."""

    @property
    def spec(self) -> ChunkSpec: ...
    @property
    def inpaints(self) -> bool: ...

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        """The chunk ``[H, A]`` for a window, finite and in the environment's units; blocks."""
        ...


class LocalSource:
    """A chunk policy in this process, with the same random streams as on a server.

    A chunk that is not finite is a miss of cause ``invalid``; one that does not match the spec raises BundleError.
    """

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy, self._streams = policy, StepStreams()
        self.spec, self.inpaints = policy.spec, policy.inpaints

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        try:
            chunk = self._policy.infer(window, self._streams(Role.VERIFY, address), inpainting)
        except ObservationError:
            return Miss("invalid", NO_OFFLOAD, sent=False)
        except MissError as error:
            return Miss.of(error, NO_OFFLOAD)
        shape = (self.spec.chunk, self.spec.actions)
        if np.shape(chunk) != shape:
            raise BundleError(f"the policy must answer with a chunk of shape {shape}, it gave {np.shape(chunk)}")
        return chunk if np.isfinite(chunk).all() else Miss("invalid", NO_OFFLOAD, sent=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """An inference that has ended: the address of its random stream, its chunk or a miss, and its latency [s]."""

    address: StepAddress
    answer: Chunk | Miss
    took_s: float


class Inference:
    """Inferences of a source for a control loop, one at a time.

    These block the loop, for simulated robots whose time stands still meanwhile; :class:`InferenceThread` does not.
    """

    def __init__(self, source: ChunkSource) -> None:
        self.source = source

    def begin(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> Pending[Finished]:
        """Begins one; only after the last one is done. Its result raises what the inference raised."""
        finished = self._infer(window, address, inpainting)
        return Pending(lambda: finished)

    def wait(self, seconds: float) -> bool:
        """Waits for the current inference, for at most ``seconds``; whether it is done."""
        return True

    def _infer(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> Finished:
        began = time.perf_counter()
        answer = self.source.ask(window, address, inpainting)
        return Finished(address, answer, time.perf_counter() - began)


class InferenceThread(Inference):
    """Inferences in a thread, which alone uses the source. Use it as a context manager, or call :meth:`close`."""

    def __init__(self, source: ChunkSource) -> None:
        super().__init__(source)
        self._current = futures.Future[Finished]()
        self._requests: SimpleQueue[tuple[futures.Future[Finished], Callable[[], Finished]] | None] = SimpleQueue()
        # A daemon: a policy that never answers must not block the process's exit.
        self._thread = threading.Thread(target=self._run, name="specact inference", daemon=True)
        self._thread.start()

    def __enter__(self) -> InferenceThread:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self, within_s: float = 5.0) -> None:
        """Ends the thread after the current inference; waits for at most ``within_s`` [s]."""
        self._requests.put(None)
        self._thread.join(within_s)

    def begin(self, window: Window, address: StepAddress, inpainting: Inpainting | None) -> Pending[Finished]:
        self._current = futures.Future()
        self._requests.put((self._current, partial(self._infer, window, address, inpainting)))
        return Pending(self._current.result, self._current.done)

    def wait(self, seconds: float) -> bool:
        return bool(futures.wait([self._current], seconds).done)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            future, infer = request
            try:
                future.set_result(infer())
            except Exception as error:  # noqa: BLE001 - raised again where the answer is taken
                future.set_exception(error)
            except BaseException as error:  # noqa: BLE001 - sys.exit would end the run as if it had succeeded
                future.set_exception(RuntimeError(f"the inference thread ended with {type(error).__name__}: {error}"))


class ChunkRunner:
    """Provides a robot's actions for :func:`~specact.robot.loop.run_loop`; it never blocks on the policy.

    A step without an action is idle: it sends the stop action, or until an outage the last one or nothing. Misses are
    failed inferences, and chunks too late for any of their actions, or older than an outage (``stale``); chunks far
    outside ``action_range`` fail. ``roll_forward`` is a model of the robot: the observation after the actions
    ``[r, A]``.

    Attributes:
        counts: successful ``inferences``, ``chunks`` played, ``idle`` steps, and misses by cause.
        starved, starved_by: idle steps by cause, the last miss since an action or else ``inference``; of this step.
        seam: whether the last action is the first of its chunk.
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
        self.starved: Counter[str] = Counter()
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
        self._started_s = self.clock.now()
        self._idling = self.seam = False
        self._why_idle = "inference"
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
        self._idling, self.seam = played is None, played is not None and played.first
        if played is None:
            self.counts["idle"] += 1
            self.starved[self._why_idle] += 1
            # The observation is usable: a robot's model may make of one that is usable another that is not.
            return safety.rest(now, self._idle)
        if played.first:
            safety.answered()
            self.counts["chunks"] += 1
            self._ages_s += now - played.seen_s
        self._why_idle = "inference"
        safety.see(played.seen_s)
        action = safety.send(played.action)
        self._history.play(action)
        return action

    @property
    def starved_by(self) -> str:
        """Why the last step was idle; empty where it was not."""
        return self._why_idle if self._idling else ""

    def wait(self, seconds: float) -> bool:
        """If idle, waits for the current inference for at most ``seconds``; returns whether a chunk has arrived."""
        idles = self._idling and not self.safety.stopped and self._request is not None
        return idles and self._inference.wait(seconds) and self._collect()

    def summary(self) -> dict[str, Any]:
        """Statistics of the inferences, as plain values.

        Returns:
            ``inferences``, ``chunks`` and ``idle``, see :attr:`counts`; ``starved``, these by cause; ``missed`` by
            cause; ``inference_ms``, quantiles of the latency of the last 100,000 inferences, the link included; and
            ``observation_age_ms``, the mean age of the observation when the first action of its chunk is played.
        """
        counted = ("inferences", "chunks", "idle")
        return {name: self.counts[name] for name in counted} | {
            "starved": dict(self.starved),
            "missed": {name: count for name, count in self.counts.items() if name not in counted},
            "inference_ms": quantiles_ms(self._latencies_s),
            "observation_age_ms": 1e3 * self._ages_s / self.counts["chunks"] if self.counts["chunks"] else None,
        }

    def _start_inference(self, now: float) -> None:
        schedule = self._schedule
        window = self._history.window(schedule.ahead)
        # What is held while the inference runs is committed, too.
        holds = self._idle == "hold_last" and not self.safety.outage
        inpainting = schedule.inpainting(self.safety.last if holds else None)
        self._expected, self._started_s = self._address, now
        self._request = self._inference.begin(window, self._address, inpainting)
        schedule.ask(now)
        self._address = self._address.following

    def _advance(self, now: float) -> None:
        """Plays on, and counts a chunk as a miss that is too late for any of its actions, or older than an outage."""
        dropped = self._schedule.drop_older(now - self.safety.max_age_s)
        if self._schedule.drop_older(self.safety.fresh_s):
            self._miss("stale")
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
        late = finished.took_s > self._deadline_s  # it may end between two control steps
        if not isinstance(answer, Miss) and (late or not self._range.is_near(answer)):
            answer = Miss("deadline" if late else "invalid", NO_OFFLOAD)
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
        self._why_idle = cause
        self.safety.missed()
