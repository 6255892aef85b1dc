"""The control loop of a robot: observe, act, wait for the next tick. Missed ticks are not made up for.

The robot is stopped at the end, also after an error, before a suspension, and where its own code hangs.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, ObservationError, StallError
from specact.execution.seams import Seams
from specact.interrupts import Interrupts
from specact.observation import Observation
from specact.safety import Safety
from specact.types import Clock, Origin, StepRecord

T = TypeVar("T")


class Robot(Protocol):
    """Anything with sensors and actuators.

    Optional attributes:

    - ``stop()``, which :func:`run_loop` calls at its end instead of sending the stop action, and which a watchdog calls
      from its own thread where ``observe`` or ``act`` hangs;
    - ``concurrent``: True if ``act`` may be called by the watchdog's thread as well, which then sends the stop action;
    - ``roll_forward(observation, actions)``, which ``roll_forward`` execution needs: a model of the robot that predicts
      the observation after the actions ``[r, A]`` if nothing else moved;
    - ``action_range``: ``(low, high)``, two vectors ``[A]``, to which the actions of a policy alone are clipped.
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

    Attributes:
        record: of the last inference of a pair; None before the first of an episode, and for a policy alone.
        safety: what the robot does where policy or observations fail.
        origin: of the last action; None before the first of an episode.
        seam: whether the last action is the first of its chunk, or of what a late verdict made of it.
        starved_by: why there was no action to play in the last period; empty where there was one.
    """

    record: StepRecord | None
    safety: Safety
    seam: bool

    @property
    def starved_by(self) -> str: ...

    @property
    def origin(self) -> Origin | None: ...

    def reset(self, episode: int) -> None:
        """Starts an episode."""
        ...

    def act(self, observation: Observation) -> NDArray[np.float32] | None:
        """The action ``[A]`` to execute now, in the environment's units; None to send nothing.

        Raises:
            ObservationError: if the observation cannot be used.
        """
        ...

    def wait(self, seconds: float) -> bool:
        """If there is no action to play, waits for one; whether the next control step should start now."""
        ...


@dataclass(frozen=True)
class Tick:
    """One control period.

    Attributes:
        late_s: delay of its start [s].
        observe_s: time that the robot took to observe [s].
        stall_s: time that the policy took to choose the action, from the observation on [s].
        record: of the inference in it, or None if there was none.
        acted: False if the action was not sent because its observation had become too old.
        unusable: why the observation could not be used, or None. The fallback's action is sent then.
        held: whether no policy's action was sent, but the last or stop action or nothing.
        action: what was sent, ``[A]``, or None; ``seam`` and ``starved_by`` are as of :class:`Acting`.
    """

    late_s: float
    observe_s: float
    stall_s: float
    record: StepRecord | None
    acted: bool = True
    unusable: ObservationError | None = None
    held: bool = False
    action: NDArray[np.float32] | None = None
    seam: bool = False
    starved_by: str = ""


class Journal:
    """Statistics of a control loop with this period [s]; :meth:`note` records its ticks."""

    def __init__(self, period_s: float) -> None:
        self._period_s, self._late_s = period_s, 0.0
        self._counts, self._misses, self._unusable = Counter[str](), Counter[str](), Counter[str]()
        self._longest_s = dict.fromkeys(("lateness", "observation", "stall"), 0.0)
        self._inference_s, self._seams = recent_times(), Seams(period_s)

    def begin(self) -> None:
        """Begins an episode: its first action does not follow the last one's."""
        self._seams.reset()

    def note(self, tick: Tick) -> None:
        """Records one tick."""
        self._late_s += tick.late_s
        for name, seconds in zip(self._longest_s, (tick.late_s, tick.observe_s, tick.stall_s), strict=True):
            self._longest_s[name] = max(self._longest_s[name], seconds)
        self._counts.update(periods=1, too_old=not tick.acted, held=tick.held)
        self._unusable.update(() if tick.unusable is None else (tick.unusable.cause,))
        if tick.action is not None and not tick.held:
            self._seams.play(tick.action, tick.seam)
        if tick.record is not None:
            self._counts.update(inferences=1, sent=tick.record.decision.transmit)
            self._inference_s.append(tick.stall_s)
            if tick.record.miss is not None:
                self._misses[tick.record.miss] += 1

    def summary(self) -> dict[str, Any]:
        """Statistics of the control loop and of a pair's inferences, as plain values.

        Returns:
            ``periods`` with a tick; ``lost_periods``, because ticks started late; ``stood_still``, the share of both
            without a policy's new action; ``longest_lateness_ms`` of a tick's start, ``longest_observation_ms`` of the
            robot and ``longest_stall_ms`` of the policy; ``unusable`` observations by cause; ``too_old``: actions too
            late to be sent; ``seams``, how far a policy's actions jump, see :class:`~specact.execution.seams.Seams`;
            ``inferences``; ``sent``, the share that asked the target; ``missed`` requests by cause; and
            ``inference_ms``, quantiles of the policy's time in a tick with an inference, of the last 100,000.
        """
        count, periods = self._counts["inferences"], self._counts["periods"]
        lost = int(self._late_s / self._period_s + 1e-9)  # a late tick shifts all later ones
        return {
            "periods": periods,
            "lost_periods": lost,
            "stood_still": (self._counts["held"] + lost) / (periods + lost) if periods else None,
            **{f"longest_{name}_ms": 1e3 * seconds for name, seconds in self._longest_s.items()},
            "unusable": dict(self._unusable),
            "too_old": self._counts["too_old"],
            "seams": self._seams.summary(),
            "inferences": count,
            "sent": self._counts["sent"] / count if count else None,
            "missed": dict(self._misses),
            "inference_ms": quantiles_ms(self._inference_s),
        }


def recent_times() -> deque[float]:
    """An empty queue of times that keeps the last 100,000: a robot may run for weeks."""
    return deque(maxlen=100_000)


def quantiles_ms(seconds: Collection[float]) -> dict[str, float | None]:
    """``p50``, ``p95`` and ``p99`` of times [s], in milliseconds; None for no times."""
    quantiles = (1e3 * np.quantile(list(seconds), (0.5, 0.95, 0.99))).tolist() if seconds else [None] * 3
    return dict(zip(("p50", "p95", "p99"), quantiles, strict=True))


def run_loop(
    robot: Robot,
    policy: Acting,
    period_s: float,
    clock: Clock,
    proceed: Callable[[], bool],
    note: Callable[[Tick], None],
) -> None:
    """Runs until ``proceed`` returns False; then, or after an error, stops the robot by ``stop()`` or the stop action.

    An unusable first observation ends the loop; later see :meth:`~specact.safety.Safety.hold`. An action that is too
    old is not sent; the next tick starts at once, and its action is sent in any case. Where the robot's own code hangs,
    a watchdog stops it (StallError). In the main thread SIGINT, SIGTERM, SIGHUP and SIGQUIT end the loop with
    :class:`~specact.interrupts.Interrupted`; SIGTSTP stops the robot before the process is suspended, and afterwards
    the policy infers anew, or the loop ends if it was the robot's own ``stop()``. ``note`` is called after every tick.

    Raises:
        ConfigError, ObservationError, StallError, Interrupted: if the period is not positive, and for the above.
    """
    if not period_s > 0.0:
        raise ConfigError(f"a control period must be positive, got {period_s} s")
    safety, outdated = policy.safety, False
    still = safety.stop_action
    with Interrupts(suspends=True) as interrupts, _Watchdog(robot, safety, interrupts) as watchdog:

        def goes_on() -> bool:
            # A signal also ends the loop if the robot's own code swallowed its exception.
            if interrupts.suspended:
                _suspend(robot, safety, interrupts)
            watchdog.check()
            return interrupts.received is None and proceed()

        try:
            safety.attach(robot)
            planned = due = clock.now()
            while goes_on():
                tick = _tick(watchdog, policy, clock, planned, outdated)
                if tick is None:
                    break
                note(tick)
                outdated = not tick.acted
                planned = due = due + period_s
                now = clock.now()
                if now > due or outdated:
                    # Late: the next tick is due now; missed ticks are not made up for.
                    due = now
                elif policy.wait(due - now):
                    planned = due = clock.now()
                else:
                    clock.sleep(max(0.0, due - clock.now()))
        except BaseException as error:
            interrupts.held = True
            stop_after(error, robot, still)
            raise
        interrupts.held = True
        stop(robot, still)
    interrupts.raise_received()


def _tick(watchdog: _Watchdog, policy: Acting, clock: Clock, planned: float, forced: bool) -> Tick | None:
    """One tick, whose action is sent in any case if it is forced; None if the robot has stopped and nothing is sent."""
    robot, safety = watchdog.robot, policy.safety
    began, before = clock.now(), policy.record
    unusable, observed, sent = None, began, None
    try:
        observation = watchdog.call("observe", robot.observe)
        observed = clock.now()
        action = policy.act(observation)
    except ObservationError as error:
        unusable, action = error, safety.hold(error)
    stall = clock.now() - observed
    if safety.stopped and action is None:
        return None
    outdated = not (unusable or safety.stopped or safety.outage or forced) and safety.expired
    if outdated:
        safety.withdraw()
    elif action is not None:
        sent = np.array(action)  # robots may convert theirs in place
        watchdog.call("act", robot.act, action)
    after = policy.record
    # A late verdict changes the record of an inference that was noted before.
    new = None if before is not None and after is not None and before.address == after.address else after
    drafted = after is not None and not safety.overrides and safety.fallback.on_miss == "execute_draft"
    held = outdated or action is None or (policy.origin is Origin.FALLBACK and not drafted)
    return Tick(
        late_s=began - planned, observe_s=observed - began, stall_s=stall, record=new, acted=not outdated,
        unusable=unusable, held=held, action=sent, seam=policy.seam, starved_by=policy.starved_by,
    )  # fmt: skip


def stop(robot: Robot, stop_action: NDArray[np.float32] | None) -> None:
    """Stops a robot by its own ``stop()``, or otherwise by the stop action ``[A]`` if there is one.

    If ``stop()`` fails, the stop action is sent before its error is raised.
    """
    stopped = False
    try:
        if callable(method := getattr(robot, "stop", None)):
            method()
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


def _suspend(robot: Robot, safety: Safety, interrupts: Interrupts) -> None:
    """Stops the robot, suspends the process, and when it continues has the policy infer anew."""
    stop(robot, safety.stop_action)
    interrupts.suspend()
    safety.expire()
    if callable(getattr(robot, "stop", None)):
        # Nobody knows whether it may be moved after its own stop().
        interrupts.received = interrupts.received or signal.SIGTSTP


class _Watchdog:
    """Stops a robot whose call does not return in time, from a thread, and interrupts the main thread."""

    def __init__(self, robot: Robot, safety: Safety, interrupts: Interrupts) -> None:
        self.robot, self._interrupts = robot, interrupts
        self._still = safety.stop_action if getattr(robot, "concurrent", False) else None
        self._stall_s = safety.fallback.max_stall_ms / 1e3
        self._call: tuple[str, float] | None = None
        self._error: StallError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="specact watchdog", daemon=True)

    def __enter__(self) -> _Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join(self._stall_s)

    def call(self, name: str, method: Callable[..., T], *arguments: Any) -> T:
        """Calls a method of the robot; raises StallError if it took too long."""
        self._call = name, time.monotonic()
        try:
            result = method(*arguments)
        finally:
            self._call = None
        self.check()
        return result

    def check(self) -> None:
        """Raises the error of a call that took too long."""
        if self._error is not None:
            raise self._error

    def _watch(self) -> None:
        while not self._closing.wait(self._stall_s / 8):
            call = self._call
            if call is not None and time.monotonic() - call[1] > self._stall_s:
                self._error = StallError(
                    f"the robot's {call[0]}() has not returned within {self._stall_s:g} s, and the robot was stopped; "
                    "see whether its devices answer"
                )
                stop_after(self._error, self.robot, self._still)
                self._interrupts.throw(self._error)
                return
