"""Prediction of the gate's next decision before the draft is computed, so that the request can be prefetched."""

from __future__ import annotations

import math
from bisect import bisect

from specact.errors import ConfigError
from specact.gates.gate import Gate
from specact.types import Decision

# Bin edges of the last score divided by the threshold.
_RATIO_EDGES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0)
_LEARNING_RATE = 0.05


class PrefetchPredictor:
    """Predicts the transmission probability from the last score: an online estimate of the rate per bin of scores.

    Scores change slowly, so the last one predicts the next decision. Forced transmissions are known in advance and not
    counted. Initial rates are 3/4 above the threshold and 1/4 below it.

    Args:
        gate: whose decisions are predicted.
        limit: a request is prefetched if the predicted probability is above this, in [0, 1). Lower hides more of the
            draft's time and wastes more requests.

    Raises:
        ConfigError: for a limit outside its range.
    """

    def __init__(self, gate: Gate, limit: float = 0.5) -> None:
        if not 0.0 <= limit < 1.0:
            raise ConfigError(f"the limit of a prefetch predictor must lie in [0, 1), got {limit}")
        self._gate, self._limit = gate, limit
        self._rates = [0.25 if edge <= 1.0 else 0.75 for edge in (*_RATIO_EDGES, math.inf)]
        self.reset()

    def reset(self) -> None:
        """Starts an episode; the learned rates persist."""
        self._last: int | None = None

    def expects_transmission(self) -> bool:
        """Whether the gate will probably transmit the next step."""
        if self._gate.forced is not None:
            return True
        # Without a last score, the middle bin above the threshold is used.
        return self._rates[-3 if self._last is None else self._last] > self._limit

    def learn(self, decision: Decision) -> None:
        """Updates the rate of the last score's bin with the gate's decision."""
        if self._last is not None and not decision.forced:
            self._rates[self._last] += _LEARNING_RATE * (decision.transmit - self._rates[self._last])
        self._last = _bin_of(decision)


def _bin_of(decision: Decision) -> int:
    if 0.0 < decision.threshold < math.inf:
        return bisect(_RATIO_EDGES, decision.score / decision.threshold)
    return len(_RATIO_EDGES) if decision.transmit else 0
