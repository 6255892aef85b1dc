"""The control loop of a robot: observe, act, wait for the next tick. Missed ticks are not made up for.

The robot is stopped at the end, also after an error.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specact.clock import Clock
from specact.errors import ConfigError, ObservationError
from specact.interrupts import Interrupts
from specact.observation import Observation
from specact.types import Origin, StepRecord


class Robot(Protocol):
    """Anything with sensors and actuators.

    Optional methods: ``stop()``, without arguments, which :func:`run_loop` calls at its end instead of sending the stop
    action; and ``roll_forward(observation, actions)``, which ``roll_forward`` execution needs: a model of the robot
    that predicts the observation after the actions ``[r, A]`` if nothing else moved.
    """

    def observe(self) -> Observation:
        """The latest observation, see :meth:`~specact.policy.SpeculativePolicy.act`; never None."""
        ...

    def act(self, action: NDArray[np.float32]) -> Any:
        """Executes one action ``[A]``, in the environment's units."""
        ...


class Acting(Protocol):
    """Source of a control loop's actions.

    A :class:`~specact.policy.SpeculativePolicy` or a :class:`~specact.robot.chunks.ChunkRunner`.
    """

    record: StepRecord | None
    stopped: bool

    @property
    def stop_action(self) -> NDArray[np.float32] | None:
        """The action that makes this robot stand still, ``[A]``, or None if unknown."""
        ...

    @property
    def origin(self) -> Origin | None:
        """Origin of the last action; None before the first of an episode."""
        ...

    @property
    def expired(self) -> bool:
        """Whether the observation behind the last action is too old."""
        ...

    def reset(self, episode: int) -> None:
        """Starts an episode."""
        ...

    def act(self, observation: Observation) -> NDArray[np.float32] | None:
        """The action ``[A]`` to execute now, in the environment's units; None to send nothing.

        Raises:
            ObservationError: if the observation cannot be used.
        """
        ...

    def act_without_observation(self, error: ObservationError) -> NDArray[np.float32] | None:
        """As :meth:`act`, without a usable observation.

        Raises:
            ObservationError: ``error``, if no action of the episode has been chosen yet.
        """
        ...

    def withdraw(self) -> None:
        """The last action was not sent, and is not held later."""
        ...

    def wait(self, seconds: float) -> bool:
        """If there is no action to play, waits for one for at most ``seconds``.

        Returns:
            Whether the next control step should start now; False immediately if there is nothing to wait for.
        """
        ...


@dataclass(frozen=True)
class Tick:
    """One control period.

    Attributes:
        late_s: delay of its start [s].
        stall_s: time that the policy took to choose the action, from the observation on [s].
        record: of the inference in it, or None if there was none.
        acted: False if the action was not sent because its observation had become too old.
        unusable: why the observation could not be used, or None. The fallback's action is sent then.
    """

    late_s: float
    stall_s: float
    record: StepRecord | None
    acted: bool = True
    unusable: ObservationError | None = None


class Journal:
    """Statistics of a control loop; :meth:`note` records its ticks.

    Args:
        period_s: the control period [s].
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._ticks = self._inferences = self._transmitted = self._outdated = 0
        self._late_s = self._longest_late_s = self._longest_stall_s = 0.0
        self._inference_s = recent_times()
        self._misses: Counter[str] = Counter()
        self._unusable: Counter[str] = Counter()

    def note(self, tick: Tick) -> None:
        """Records one tick."""
        self._ticks += 1
        self._late_s += tick.late_s
        self._longest_late_s = max(self._longest_late_s, tick.late_s)
        self._longest_stall_s = max(self._longest_stall_s, tick.stall_s)
        self._outdated += not tick.acted
        if tick.unusable is not None:
            self._unusable[tick.unusable.cause] += 1
        if tick.record is not None:
            self._inferences += 1
            self._inference_s.append(tick.stall_s)
            self._transmitted += tick.record.decision.transmit
            if tick.record.miss is not None:
                self._misses[tick.record.miss] += 1

    def control(self) -> dict[str, Any]:
        """Statistics of the control loop, as plain values.

        Returns:
            ``ticks``; ``overruns``: control periods lost because ticks started late; ``longest_lateness_ms`` of a
            tick's start; ``longest_stall_ms`` of the policy; ``unusable``: ticks without a usable observation, by
            cause; and ``outdated``: ticks whose action was too late to be sent.
        """
        return {
            "ticks": self._ticks,
            # A late tick shifts all later ones.
            "overruns": int(self._late_s / self._period_s + 1e-9),
            "longest_lateness_ms": 1e3 * self._longest_late_s,
            "longest_stall_ms": 1e3 * self._longest_stall_s,
            "unusable": dict(self._unusable),
            "outdated": self._outdated,
        }

    def summary(self) -> dict[str, Any]:
        """:meth:`control`, and statistics of the inferences of a :class:`~specact.policy.SpeculativePolicy`.

        Returns:
            Also ``inferences``, ``transmission_rate``; ``misses`` by cause; and ``inference_ms``, quantiles of
            the policy's time in a tick with an inference, of the last 100,000.
        """
        count = self._inferences
        return self.control() | {
            "inferences": count,
            "transmission_rate": self._transmitted / count if count else None,
            "misses": dict(self._misses),
            "inference_ms": quantiles_ms(self._inference_s),
        }


def recent_times() -> deque[float]:
    """An empty queue of times that keeps the last 100,000: a robot may run for weeks."""
    return deque(maxlen=100_000)


def quantiles_ms(seconds: Collection[float]) -> dict[str, float | None]:
    """``p50``, ``p95`` and ``p99`` of times [s], in milliseconds; None for no times."""
    found = np.quantile(list(seconds), (0.5, 0.95, 0.99)).tolist() if seconds else (None, None, None)
    return {
        name: None if value is None else 1e3 * value for name, value in zip(("p50", "p95", "p99"), found, strict=True)
    }


def run_loop(
    robot: Robot,
    policy: Acting,
    period_s: float,
    clock: Clock,
    proceed: Callable[[], bool],
    note: Callable[[Tick], None],
) -> None:
    """Runs until ``proceed`` returns False; then, or after an error, stops the robot by ``stop()`` or the stop action.

    An unusable observation before the first action of the episode ends the loop; later the fallback applies, see
    :meth:`~specact.policy.SpeculativePolicy.act_without_observation`. An action whose observation has become older
    than the policy's ``max_chunk_age_s`` is not sent: the next tick starts immediately, and its action is sent in any
    case.

    In the main thread SIGINT, SIGTERM and SIGHUP end the loop with :class:`~specact.interrupts.Interrupted`; they are
    deferred while the robot is being stopped.

    Args:
        robot: the robot.
        policy: chooses the actions; reset by the caller.
        period_s: control period [s].
        clock: of the ticks.
        proceed: called before every tick; False ends the loop.
        note: called with every tick after it.

    Raises:
        ConfigError: if the period is not positive.
        ObservationError: if there is no usable observation before the first action.
        Interrupted: for a signal.
    """
    if not period_s > 0.0:
        raise ConfigError(f"a control period must be positive, got {period_s} s")
    with Interrupts() as interrupts:
        try:
            # A signal also ends the loop if the robot's own code swallowed its exception.
            _tick(robot, policy, period_s, clock, lambda: interrupts.received is None and proceed(), note)
        except BaseException as error:
            interrupts.held = True
            stop_after(error, robot, policy.stop_action)
            raise
        interrupts.held = True
        stop(robot, policy.stop_action)
    interrupts.raise_received()


def stop(robot: Robot, stop_action: NDArray[np.float32] | None) -> None:
    """Stops a robot by its own ``stop()``, or otherwise by the stop action ``[A]`` if there is one.

    If ``stop()`` fails, the stop action is sent before its error is raised.
    """
    stopped = False
    try:
        own = getattr(robot, "stop", None)
        if callable(own):
            own()
            stopped = True
    finally:
        if not stopped and stop_action is not None:
            robot.act(stop_action)


def stop_after(error: BaseException, robot: Robot, stop_action: NDArray[np.float32] | None) -> None:
    """As :func:`stop`, because of an error, which keeps a note if the robot cannot be stopped."""
    try:
        stop(robot, stop_action)
    except BaseException as second:  # noqa: BLE001 - the first error is raised
        error.add_note(f"the robot could not be stopped after this: {type(second).__name__}: {second}")


def _tick(
    robot: Robot,
    policy: Acting,
    period_s: float,
    clock: Clock,
    proceed: Callable[[], bool],
    note: Callable[[Tick], None],
) -> None:
    planned = due = clock.now()
    outdated = False
    while proceed():
        began, before = clock.now(), policy.record
        unusable, observed = None, began
        try:
            observation = robot.observe()
            # A camera that waits for its next frame is no time of the policy's.
            observed = clock.now()
            action = policy.act(observation)
        except ObservationError as error:
            unusable, action = error, policy.act_without_observation(error)
        stall = clock.now() - observed
        # At most one tick in a row, since late actions must be sent if every inference takes that long.
        outdated = unusable is None and not policy.stopped and not outdated and policy.expired
        if outdated:
            policy.withdraw()
        elif action is not None:
            robot.act(action)
        note(Tick(began - planned, stall, _inference(before, policy.record), not outdated, unusable))
        planned = due = due + period_s
        now = clock.now()
        if now > due or outdated:
            # Late: the next tick is due now; missed ticks are not made up for.
            due = now
        elif policy.wait(due - now):
            planned = due = clock.now()
        else:
            clock.sleep(max(0.0, due - clock.now()))


def _inference(before: StepRecord | None, after: StepRecord | None) -> StepRecord | None:
    """The record of an inference between two moments, or None if there was none; a late verdict changes a record."""
    if before is not None and after is not None and before.address == after.address:
        return None
    return after
