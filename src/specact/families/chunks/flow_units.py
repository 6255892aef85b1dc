"""The units in which a flow works, and the way back to the environment's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class FlowUnits:
    """Demonstrated actions have mean 0 and variance 1 in the flow's units, as the noise has that it starts from.

    Attributes:
        centre, scale: float32 ``[A]``; ``action = centre + scale * x``.
        low, high: float32 ``[A]``: the range that was demonstrated, in the environment's units.
    """

    centre: NDArray[np.float32]
    scale: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]

    def to_environment(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Actions ``[..., A]`` in the environment's units, never beyond the range that was demonstrated."""
        return np.clip(self.centre + self.scale * x, self.low, self.high)

    def to_flow(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """Actions ``[..., A]`` in the flow's units."""
        return (action - self.centre) / self.scale
