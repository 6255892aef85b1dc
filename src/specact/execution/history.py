"""The observations that a window is made of where control steps are not always a period apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.observation import Observation, ObservationSpec, Window, read_observation

# What a robot would see after the actions ``[r, A]``, given what it sees; a model of the robot alone.
RollForward = Callable[[Mapping[str, Any], NDArray[np.float32]], Observation]


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    arrays: Mapping[str, NDArray[Any]]
    instruction: str | None
    seen: Mapping[str, Any] | None  # as it was given, where it may be rolled forward
    played: int  # actions played before it


class SampledHistory:
    """Observations by the time at which they were made.

    A window holds the newest observation and, of those before, the ones nearest to a whole number of periods ago: in a
    robot that never waits exactly those, as in training; after a wait at most half a period off.

    Args:
        spec: what is looked at.
        period_s: control period [s].
        roll_forward: a model of the robot, or None.
    """

    def __init__(self, spec: ObservationSpec, period_s: float, roll_forward: RollForward | None = None) -> None:
        self._spec, self._period_s, self._roll_forward = spec, period_s, roll_forward
        self.reset()

    def reset(self) -> None:
        """Forgets the episode."""
        self._samples: deque[_Sample] = deque()
        # The actions played since the oldest sample, and how many were played in all.
        self._actions: deque[NDArray[np.float32]] = deque()
        self._played = 0

    def sample(self, now: float, observation: Observation) -> None:
        """Keeps an observation made now [s], and forgets what no window will reach back to.

        Raises:
            ObservationError: if it cannot be used; nothing has changed then.
        """
        arrays, instruction = read_observation(observation, self._spec)
        seen = None
        if self._roll_forward is not None:
            # A model of the robot may need more than the policy does. A copy: robots may reuse their buffers.
            seen = deepcopy(dict(observation)) if isinstance(observation, Mapping) else arrays
        self._samples.append(_Sample(now, arrays, instruction, seen, self._played))
        while len(self._samples) > 1 and self._samples[1].at <= now - self._spec.history * self._period_s:
            self._samples.popleft()
        while self._played - len(self._actions) < self._samples[0].played:
            self._actions.popleft()

    def play(self, action: NDArray[np.float32]) -> None:
        """Notes that an action ``[A]`` runs from the newest observation on."""
        self._actions.append(action)
        self._played += 1

    def window(self, ahead: NDArray[np.float32] | None = None) -> Window:
        """The window that ends with the newest observation.

        Args:
            ahead: actions still to run, ``[r, A]``; the robot is then shown as it will be after them, in every
                observation of the window: each is rolled through the r actions that followed it, so that the robot
                does not seem to leap.

        Raises:
            ObservationError: if the model of the robot gives what cannot be used.
        """
        newest = self._samples[-1]
        moments = (newest.at - back * self._period_s for back in reversed(range(self._spec.history)))
        picked = [min(reversed(self._samples), key=lambda sample: abs(sample.at - at)) for at in moments]
        rows = [sample.arrays if ahead is None else self._rolled(sample, ahead) for sample in picked]
        arrays = {
            name: np.stack([row[name] for row in rows[-field.history :]]) if field.history else rows[-1][name]
            for name, field in self._spec.fields.items()
        }
        return Window(arrays, newest.instruction)

    def _rolled(self, sample: _Sample, ahead: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]:
        assert self._roll_forward is not None and sample.seen is not None, "Execution.check has seen to it"
        since = list(self._actions)[sample.played - (self._played - len(self._actions)) :]
        following = [*since, *ahead][: len(ahead)]
        if not following:
            return sample.arrays
        return read_observation(self._roll_forward(sample.seen, np.stack(following)), self._spec)[0]
