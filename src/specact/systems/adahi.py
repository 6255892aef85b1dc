"""ADAHI: a gate on the deviation of the drafted action before exact verification of action codes.

Draft q and target p are distributions over the codes z of a chunk, at one temperature (equation 2). On the device::

    z ~ q,   a_t = decode(z)                                    the drafted action
    m_t = alpha a_t + (1 - alpha) m_{t-1},   D_t = ||a_t - m||  equations 4, 5
    D_t > threshold:  ask the target,  else execute a_t

Where it is asked, each code is kept with probability ``min(1, p(z) / q(z))``, else drawn from ``norm(max(p - q, 0))``
(equations 7, 8; :mod:`specact.families.codes.sampling`), so that verified codes follow p exactly.

What we changed: the threshold is the quantile of D at the wanted rate rho. Equations 9 and 10 as written, ``rho = 1 -
F(r_th)`` and ``D_th = f^-1(r_th)``, miss rho; they are an option (:mod:`specact.lab.evaluation.calibrate`). The gate
works on the actions of any family; the form of equation 5 is missing from the available text, so that its readings are
options; the average is of executed actions, not of drafted ones, unless asked for; skips in a row may be limited.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specact.gates.gate import Gate
from specact.records import Count, PositiveShare, validated
from specact.types import Proposal

Reading = Literal["euclidean", "path_ratio", "disparity", "zscore", "jump"]
Source = Literal["executed", "draft"]

_EPSILON = 1e-6


class ActionDeviation(Gate):
    """Asks where ``D_t`` is large: the distance of the drafted action ``a_t`` from the average ``m`` of past ones.

    The average is updated once per control step, also between the inferences of a policy that executes chunks; of a
    chunk, the first action counts. Actions are normalised. Readings: ``euclidean`` ``||a - m||``; ``path_ratio`` that
    over the sum of the last ``path`` step lengths; ``disparity`` over ``||m|| + eps``; ``zscore`` with every dimension
    divided by its running standard deviation; ``jump`` ``||a - last action||``. ``alpha`` is the weight of the newest
    action, and ``source`` says which are averaged: the ``executed`` ones, or the ``draft``'s, as published. The
    distance is taken before ``a_t`` enters the average; after it, ``euclidean`` is ``1 - alpha`` times as large.
    """

    @validated
    def __init__(
        self,
        threshold: float,
        *,
        reading: Reading = "euclidean",
        alpha: PositiveShare = 0.5,
        source: Source = "executed",
        path: Count = 10,
        **limits: Any,
    ) -> None:
        super().__init__(threshold, **limits)
        self.reading, self.alpha, self.source, self.path = reading, alpha, source, path
        self.reset()

    def reset(self) -> None:
        super().reset()
        # Without an entry before the first action.
        self._mean = self._variance = self._last = np.zeros(0)
        self._steps: deque[float] = deque(maxlen=self.path)

    def on_action(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        action = (executed if self.source == "executed" else drafted).astype(np.float64)
        if not self._last.size:
            self._mean, self._variance, self._last = action, np.zeros_like(action), action
            return
        if self.reading == "path_ratio":
            self._steps.append(_length(action - self._last))
        self._last = action
        change = action - self._mean
        step = self.alpha * change
        self._mean = self._mean + step
        if self.reading == "zscore":
            self._variance = (1.0 - self.alpha) * (self._variance + step * change)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        if not self._last.size:
            return 0.0
        action = proposal.actions[0]
        if self.reading == "jump":
            return _length(action - self._last)
        away = action - self._mean
        if self.reading == "zscore":
            return _length(away / (np.sqrt(self._variance) + _EPSILON))
        if self.reading == "path_ratio":
            return _length(away) / (sum(self._steps) + _EPSILON)
        if self.reading == "disparity":
            return _length(away) / (_length(self._mean) + _EPSILON)
        return _length(away)


def _length(vector: NDArray[np.float64]) -> float:
    return math.sqrt(vector.dot(vector))
