"""Will the gate transmit the next step? Asked before the draft is computed, so that the request can leave ahead."""

from __future__ import annotations

import math
from bisect import bisect

from specact.errors import ConfigError
from specact.gates.gate import Gate
from specact.types import Decision

# Where the last score lay, as a multiple of the threshold.
_EDGES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0)
_MEMORY = 0.05


class PrefetchPredictor:
    """The share of transmitted steps among those that followed a score like the last one, learned as it goes.

    Scores are slow: what the gate did with a score tells much of what it does next. Steps that a gate is forced to
    transmit are known beforehand and not counted. Starts from 3/4 above the threshold and 1/4 below it.

    Args:
        gate: whose decisions are predicted.
        limit: a request leaves ahead if the predicted probability is above this, in [0, 1). Lower hides more of the
            draft's time and wastes more requests.

    Raises:
        ConfigError: for a limit outside its range.
    """

    def __init__(self, gate: Gate, limit: float = 0.5) -> None:
        if not 0.0 <= limit < 1.0:
            raise ConfigError(f"the limit of a prefetch predictor must lie in [0, 1), got {limit}")
        self._gate, self._limit = gate, limit
        self._shares = [0.25 if edge <= 1.0 else 0.75 for edge in (*_EDGES, math.inf)]
        self.reset()

    def reset(self) -> None:
        """Starts an episode; what was learned stays."""
        self._last: int | None = None

    def expects_transmission(self) -> bool:
        """Whether the gate will probably transmit the next step."""
        if self._gate.forced is not None:
            return True
        # Without a last score: as good as the middle of those above.
        return self._shares[-3 if self._last is None else self._last] > self._limit

    def learn(self, decision: Decision) -> None:
        """Learns from the gate's decision."""
        if self._last is not None and decision.reason not in ("first", "max_skips"):
            self._shares[self._last] += _MEMORY * (decision.transmit - self._shares[self._last])
        self._last = _place(decision)


def _place(decision: Decision) -> int:
    if 0.0 < decision.threshold < math.inf:
        return bisect(_EDGES, decision.score / decision.threshold)
    return len(_EDGES) if decision.transmit else 0
