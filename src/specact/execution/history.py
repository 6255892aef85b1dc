"""Observation windows if control steps are not always one period apart."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.observation import Observation, ObservationSpec, Window, read_observation

# Predicts the observation after the actions ``[r, A]`` from the current one; a model of the robot alone.
RollForward = Callable[[Mapping[str, Any], NDArray[np.float32]], Observation]


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    arrays: Mapping[str, NDArray[Any]]
    instruction: str | None
    raw: Mapping[str, Any] | None  # input of roll_forward, if there is one
    played: int  # actions played before it


class SampledHistory:
    """Observations with their timestamps.

    A window holds the newest observation and the earlier ones nearest to a whole number of periods [s] before it:
    exactly those, as in training, if the robot never waits; at most half a period off after a wait.
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
        """Stores an observation with its timestamp [s], and drops those too old for any later window.

        Raises:
            ObservationError: if it cannot be used; the history is unchanged.
        """
        arrays, instruction = read_observation(observation, self._spec)
        raw = None
        if self._roll_forward is not None:
            # A model of the robot may need more than the policy does. A copy: robots may reuse their buffers.
            raw = deepcopy(dict(observation)) if isinstance(observation, Mapping) else arrays
        self._samples.append(_Sample(now, arrays, instruction, raw, self._played))
        while len(self._samples) > 1 and self._samples[1].at <= now - self._spec.history * self._period_s:
            self._samples.popleft()
        while self._played - len(self._actions) < self._samples[0].played:
            self._actions.popleft()

    def play(self, action: NDArray[np.float32]) -> None:
        """Records an action ``[A]`` that is executed after the newest observation."""
        self._actions.append(action)
        self._played += 1

    def window(self, ahead: NDArray[np.float32] | None = None) -> Window:
        """The window that ends with the newest observation.

        With pending actions ahead, ``[r, A]``, every observation of the window is rolled forward through the r actions
        that followed it, so that the window has no discontinuity.

        Raises:
            ObservationError: if the model of the robot returns an unusable observation.
        """
        samples = list(self._samples)
        newest, times = samples[-1], [sample.at for sample in samples]
        moments = (newest.at - back * self._period_s for back in reversed(range(self._spec.history)))
        picked = [samples[_nearest(times, at)] for at in moments]
        rows = [sample.arrays if ahead is None else self._rolled_forward(sample, ahead) for sample in picked]
        arrays = {
            name: np.stack([row[name] for row in rows[-field.history :]]) if field.history else rows[-1][name]
            for name, field in self._spec.fields.items()
        }
        return Window(arrays, newest.instruction)

    def _rolled_forward(self, sample: _Sample, ahead: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]:
        assert self._roll_forward is not None and sample.raw is not None, "ensured by Execution.check"
        since = list(self._actions)[sample.played - (self._played - len(self._actions)) :]
        following = [*since, *ahead][: len(ahead)]
        if not following:
            return sample.arrays
        return read_observation(self._roll_forward(sample.raw, np.stack(following)), self._spec)[0]


def _nearest(times: Sequence[float], at: float) -> int:
    """Index of the time nearest to ``at``, the last one of several; ``times`` ascend to ``at`` or beyond."""
    later = bisect_left(times, at)
    earlier, later = later - 1, bisect_right(times, times[later]) - 1
    return earlier if earlier >= 0 and at - times[earlier] < times[later] - at else later
