"""What a robot does where its policy, its target or its own sensors fail: the rule, and its state for every actor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, ObservationError
from specact.records import Positive, WholeNumber, check_fields
from specact.types import Chunk, Clock, Units

NOT_FINITE = "the policy's action is not finite for this observation; check its units and range"
OnMiss = Literal["execute_draft", "hold_last", "stop"]
Idle = Literal["hold_last", "stop_action", "nothing"]


@dataclass(frozen=True)
class Fallback:
    """The rule for misses: failed requests, control steps without a usable observation, and verdicts too late for all.

    Attributes:
        on_miss: what missed steps execute
        max_consecutive_misses: after more in a row the robot stops, until a reset
        stop_action: makes the robot stand still; needed to stop or hold it
        max_chunk_age_ms: greatest age of an executed action's observation [ms]
        max_stall_ms: the robot is stopped if observe or act takes longer
        max_consecutive_idle: more in a row without an action are an outage

    Raises:
        ConfigError: for a value that is not allowed, or if a required stop action is missing.
    """

    on_miss: OnMiss = "execute_draft"
    max_consecutive_misses: WholeNumber | None = None
    stop_action: tuple[float, ...] | None = None
    max_chunk_age_ms: Positive | None = None
    max_stall_ms: Positive = 2000.0
    max_consecutive_idle: WholeNumber | None = None

    def __post_init__(self) -> None:
        if self.stop_action is not None:
            # Arrays are accepted as well.
            object.__setattr__(self, "stop_action", tuple(np.asarray(self.stop_action, np.float64).ravel().tolist()))
        check_fields(self)
        if self.stop_action is None and (self.on_miss != "execute_draft" or self.max_consecutive_misses is not None):
            raise ConfigError(
                f"on_miss {self.on_miss!r} with max_consecutive_misses {self.max_consecutive_misses} can stop the "
                "robot, so it needs a stop_action [A]: the action that makes this robot stand still"
            )


EXECUTE_DRAFT = Fallback()


class Safety:
    """Counts misses, remembers the last action, and decides when a robot holds it, stands still or stops.

    An action whose observation is older than ``max_age_s`` [s] has ``expired``: it is held no longer, and its chunk is
    dropped. That is the fallback's age, or else ``usual_age_s``, which only a failure exceeds, where the robot can be
    stopped, by a stop action or its own ``stop``. The same time without a policy's action, or more periods in a row
    than the fallback's, is an ``outage``: the robot stands still, and resumes only with what it observed since then, at
    ``fresh_s`` [s] or later; ``outages`` counts them. Once ``stopped``, every action is the stop action, until a reset.

    Raises:
        ConfigError: if the stop action does not fit the units.
    """

    def __init__(self, fallback: Fallback, units: Units, clock: Clock, usual_age_s: float) -> None:
        self.fallback, self._units, self._clock, self._usual_age_s = fallback, units, clock, usual_age_s
        self._stop = None if self.stop_action is None else units.normalise(self.stop_action)
        self.outages = 0
        self.attach(None)
        self.reset()

    def attach(self, robot: Any) -> None:
        """Takes note of whether the robot has a method ``stop``."""
        self._robot_stops = callable(getattr(robot, "stop", None))
        stoppable = self._robot_stops or self._stop is not None
        limit_ms = self.fallback.max_chunk_age_ms
        self.max_age_s = limit_ms / 1e3 if limit_ms is not None else self._usual_age_s if stoppable else math.inf

    def reset(self) -> None:
        """Starts an episode."""
        self.stopped = self._outdated = False
        # Consecutive failed requests, and control steps in a row without a usable observation.
        self._misses = self._blind = 0
        # When the last inference observed, and that behind the policy's last action; when that was sent.
        self._seen_s = self._acted_s = self._sent_s = self._clock.now()
        # Periods in a row without a policy's action, whether they are too many, and when the last outage began.
        self._idle, self.outage, self.fresh_s = 0, False, -math.inf
        # The last two actions, in the policy's units.
        self._last: Chunk | None = None
        self._before_last = self._stop

    @property
    def stop_action(self) -> NDArray[np.float32] | None:
        """The action that makes this robot stand still, ``[A]``, new at each time, or None if unknown."""
        return None if self.fallback.stop_action is None else np.array(self.fallback.stop_action, np.float32)

    @property
    def overrides(self) -> bool:
        """Whether the last action was not the policy's."""
        return self.stopped or self._blind > 0

    @property
    def expired(self) -> bool:
        """Whether the observation behind the last action is too old."""
        return self._outdated or self._seen_s < self.fresh_s or self._clock.now() - self._seen_s > self.max_age_s

    def expire(self) -> None:
        """Declares all that was observed until now too old, as after a suspension."""
        self._outdated, self.fresh_s = True, self._clock.now()

    def see(self, at_s: float) -> None:
        """The next action is based on an observation made at this time [s]."""
        self._seen_s, self._outdated = at_s, False

    def rest(self, at_s: float, idle: Idle) -> NDArray[np.float32] | None:
        """What is sent where the policy has no action for a usable observation made at this time [s]; None: nothing."""
        self._blind = 0
        self.see(at_s)
        if self._last is not None:
            self._starve(at_s, at_s - self._sent_s > self.max_age_s)
            if self.outage or idle == "stop_action":
                return self.stand()
        return None if idle == "nothing" else self.stop_action if self._last is None else self.last

    def answered(self) -> None:
        """A request succeeded: the run of consecutive misses ends."""
        self._misses = 0

    def missed(self) -> None:
        """A request failed."""
        self._misses += 1
        self._stop_if_due()

    def instead(self, drafted: Chunk) -> Chunk:
        """The chunk to execute after a miss, ``[n, A]``; where the robot stops, the drafted one, unexecuted."""
        last = self._stop if self._last is None else self._last
        if self.stopped or self.fallback.on_miss == "execute_draft" or last is None:
            return drafted
        return np.broadcast_to(last, drafted.shape)

    def send(self, action: Chunk, held: bool = False) -> NDArray[np.float32]:
        """The action ``[A]`` in the environment's units and within the robot's range.

        One that is ``held`` after a miss is as old as the policy's last action; in an outage the stop action is sent.

        Raises:
            ObservationError: if it is not finite.
        """
        sent, now = self._units.to_environment(action), self._clock.now()
        if not all(map(math.isfinite, sent.tolist())):
            raise ObservationError(NOT_FINITE)
        self._blind = 0
        self._before_last, self._last = self._stop if self._last is None else self._last, action
        if held:
            self._starve(now, now - self._acted_s > self.max_age_s)
            return self.stop_action if self.outage and self.stop_action is not None else sent
        self._sent_s, self._acted_s, self._idle, self.outage = now, self._seen_s, 0, False
        return sent

    def withdraw(self) -> None:
        """The last action was not sent, and is not held later."""
        self._last = self._before_last

    def hold(self, error: ObservationError) -> NDArray[np.float32] | None:
        """The last action or, in an outage, :meth:`stand`; raises the error if the episode had no action yet."""
        if self._last is None:
            raise error
        self._blind += 1
        self._stop_if_due()
        now = self._clock.now()
        self._starve(now, self.expired or now - self._sent_s > self.max_age_s)
        stoppable = self._stop is not None or self._robot_stops
        return self.stand() if self.stopped or (self.outage and stoppable) else self.last

    def stand(self) -> NDArray[np.float32] | None:
        """The stop action, where the last action must not be held; without one, a robot with ``stop`` has to stop."""
        self.stopped |= self._stop is None and self._robot_stops
        return self.stop_action

    @property
    def last(self) -> NDArray[np.float32] | None:
        """The last action ``[A]``, in the environment's units; a copy, because robots may convert it in place."""
        return None if self._last is None else self._units.to_environment(self._last)

    def _starve(self, at_s: float, expired: bool) -> None:
        """Another period, of this time [s], is without a policy's action."""
        most = self.fallback.max_consecutive_idle
        self._idle += 1
        if not self.outage and (expired or (most is not None and self._idle > most)):
            self.outage, self.fresh_s = True, at_s
            self.outages += 1

    def _stop_if_due(self) -> None:
        most = self.fallback.max_consecutive_misses
        self.stopped |= self.fallback.on_miss == "stop" or (most is not None and self._misses + self._blind > most)
