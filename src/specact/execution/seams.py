"""How far a robot's commands jump where one chunk follows another."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray


class Seams:
    """Steps and jerk of the actions ``a_t [A]`` of a control loop with this period dt [s], at seams and elsewhere.

    The step at t is ``||a_t - a_{t-1}||``, the jerk ``||a_{t+1} - 3 a_t + 3 a_{t-1} - a_{t-2}|| / dt^3``; both are at a
    seam if ``a_t`` is the first action of its chunk. They are in the unit of actions, and NaN without any.

    Attributes:
        largest_step, jerk: the largest step and the mean jerk, at seams (True) and elsewhere (False).
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self.largest_step = {True: math.nan, False: math.nan}
        self.jerk = {True: math.nan, False: math.nan}
        self._jerks = {True: 0, False: 0}
        self.reset()

    def reset(self) -> None:
        """Begins an episode; what was found so far is kept."""
        self._last: deque[tuple[NDArray[np.float32], bool]] = deque(maxlen=4)

    def play(self, action: NDArray[np.float32], seam: bool) -> None:
        """Takes the next action, and whether it is the first of its chunk."""
        if self._last:
            step = float(np.linalg.norm(action - self._last[-1][0]))
            self.largest_step[seam] = np.fmax(step, self.largest_step[seam]).item()
        self._last.append((np.array(action), seam))
        if len(self._last) == 4:
            (first, _), (second, _), (third, at), (fourth, _) = self._last
            jerk = float(np.linalg.norm(fourth - 3.0 * third + 3.0 * second - first)) / self._period_s**3
            self._jerks[at] += 1
            mean = 0.0 if self._jerks[at] == 1 else self.jerk[at]
            self.jerk[at] = mean + (jerk - mean) / self._jerks[at]

    def summary(self) -> dict[str, float | None]:
        """As plain values: ``largest_step`` and ``jerk`` at seams, and both ``within`` chunks; None without any."""
        statistics = {
            f"{name}{end}": values[seam]
            for seam, end in ((True, ""), (False, "_within"))
            for name, values in (("largest_step", self.largest_step), ("jerk", self.jerk))
        }
        return {name: None if math.isnan(value) else value for name, value in statistics.items()}
