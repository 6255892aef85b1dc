"""The control loop of a robot: observe, act, wait for the next tick; it is never early and never catches up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specact.agent import SpeculativePolicy
from specact.clock import Clock
from specact.errors import ConfigError, ObservationError
from specact.policies.window import Observation
from specact.types import StepRecord


class Robot(Protocol):
    """Anything with sensors and actuators."""

    def observe(self) -> Observation:
        """What the policy looks at, see :meth:`~specact.agent.SpeculativePolicy.act`."""
        ...

    def act(self, action: NDArray[np.float32]) -> Any:
        """Executes one action ``[A]``, in the environment's units."""
        ...


@dataclass(frozen=True)
class Tick:
    """One control period.

    Attributes:
        late_s: how much later than planned it began [s].
        stall_s: how long the policy took to choose the action [s].
        record: of the inference in it, or None where the last chunk played on.
        acted: False where the observation could not be used and the robot was left alone.
    """

    late_s: float
    stall_s: float
    record: StepRecord | None
    acted: bool


class Journal:
    """What a control loop went through, in numbers; its :meth:`note` takes the ticks.

    Args:
        period_s: the control period [s].
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._stalls: list[float] = []
        self._inferences: list[float] = []
        self._transmitted = self._ahead = self._overruns = self._unusable = 0
        self._misses: Counter[str] = Counter()

    def note(self, tick: Tick) -> None:
        """Takes in one tick."""
        self._stalls.append(tick.stall_s)
        self._overruns += tick.stall_s > self._period_s
        self._unusable += not tick.acted
        if tick.record is not None:
            self._inferences.append(tick.stall_s)
            self._transmitted += tick.record.decision.transmit
            self._ahead += tick.record.sent_ahead
            if tick.record.miss is not None:
                self._misses[tick.record.miss] += 1

    def summary(self) -> dict[str, Any]:
        """All of it as plain values.

        Returns:
            ``ticks``, ``overruns`` (the policy took longer than a period), ``longest_stall_ms``, ``unusable`` (ticks
            without a usable observation), ``inferences``, ``transmission_rate``, ``sent_ahead``, ``misses`` by cause,
            and ``inference_ms``, quantiles of a tick that infers.
        """
        count = len(self._inferences)
        quantiles = np.quantile(self._inferences, (0.5, 0.95, 0.99)).tolist() if count else (None, None, None)
        return {
            "ticks": len(self._stalls),
            "overruns": self._overruns,
            "unusable": self._unusable,
            "longest_stall_ms": 1e3 * max(self._stalls, default=0.0),
            "inferences": count,
            "transmission_rate": self._transmitted / count if count else None,
            "sent_ahead": self._ahead / count if count else None,
            "misses": dict(self._misses),
            "inference_ms": {
                name: None if value is None else 1e3 * value
                for name, value in zip(("p50", "p95", "p99"), quantiles, strict=True)
            },
        }


def run_loop(
    robot: Robot,
    policy: SpeculativePolicy,
    period_s: float,
    clock: Clock,
    proceed: Callable[[], bool],
    note: Callable[[Tick], None],
) -> None:
    """Runs until ``proceed`` says no; an observation that cannot be used leaves the robot as it is for that tick.

    Args:
        robot: what is controlled.
        policy: chooses the actions; reset by the caller.
        period_s: control period [s].
        clock: what ticks.
        proceed: asked before every tick.
        note: told of every tick after it.

    Raises:
        ConfigError: if the period is not positive.
    """
    if not period_s > 0.0:
        raise ConfigError(f"a control period must be positive, got {period_s} s")
    planned = due = clock.now()
    while proceed():
        began = clock.now()
        inferring, acted = policy.wants_inference and not policy.stopped, True
        try:
            action = policy.act(robot.observe())
        except ObservationError:
            acted = False
        stall = clock.now() - began
        if acted:
            robot.act(action)
        note(Tick(began - planned, stall, policy.record if inferring and acted else None, acted))
        planned = due = due + period_s
        now = clock.now()
        if now > due:
            # Late: the next tick is due now; the ones that were missed are not made up for in a rush.
            due = now
        else:
            clock.sleep(due - now)
