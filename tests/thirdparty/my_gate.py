"""A gate that is not specact's: how sharply the drafted action would bend the path of the last two."""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.gates import Gate
from specact.types import Proposal


class Bend(Gate):
    """Queries the target where the actions change direction."""

    def __init__(self, threshold: float, *, worst: bool = False, **limits: Any) -> None:
        super().__init__(threshold, **limits)
        self.worst = worst  # the dimension that changes most, instead of all of them
        self._last = deque[NDArray[np.float32]](maxlen=2)

    def reset(self) -> None:
        super().reset()
        self._last.clear()

    def on_action(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        self._last.append(executed)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        if len(self._last) < 2:
            return 0.0
        before, last = self._last
        change = proposal.actions[0] - 2.0 * last + before
        return float(np.abs(change).max() if self.worst else np.linalg.norm(change))
