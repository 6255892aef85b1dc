"""Units of actions: normalised within policies and verifiers, the environment's on the robot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError

# Arrays, because NumPy takes twice as long with Python numbers.
_LOWEST, _HIGHEST = np.array(-1.0, np.float32), np.array(1.0, np.float32)


@dataclass(frozen=True)
class ActionUnits:
    """``action = centre + scale * normalised``; demonstrated actions lie in [-1, 1].

    Attributes:
        centre, scale: float32 ``[A]``, in the environment's units; every scale is positive.
    """

    centre: NDArray[np.float32]
    scale: NDArray[np.float32]

    @classmethod
    def of_range(cls, low: NDArray[np.float32], high: NDArray[np.float32]) -> ActionUnits:
        """Units in which actions between ``low`` and ``high`` ``[A]`` lie in [-1, 1]."""
        return cls((low + high) / np.float32(2), np.maximum((high - low) / np.float32(2), np.float32(1e-6)))

    def to_environment(self, normalised: NDArray[np.float32]) -> NDArray[np.float32]:
        """Actions ``[..., A]`` in the environment's units, clipped to the demonstrated range."""
        return np.minimum(np.maximum(normalised, _LOWEST), _HIGHEST) * self.scale + self.centre

    def from_environment(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalised actions ``[..., A]``, without clipping."""
        normalised: NDArray[np.float32] = (actions - self.centre) / self.scale
        return normalised

    def normalise(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """:meth:`from_environment` for one user-given action ``[A]``, with checks.

        Raises:
            ConfigError: if it has another size, is not finite, or lies outside the demonstrated range.
        """
        low, high = self.centre - self.scale, self.centre + self.scale
        slack = 1e-5 * self.scale
        if np.shape(action) != low.shape or not ((action >= low - slack) & (action <= high + slack)).all():
            raise ConfigError(
                f"an action of this robot must have shape [{len(low)}] and lie between {low.tolist()} and "
                f"{high.tolist()}, got {action}"
            )
        return np.asarray((action - self.centre) / self.scale, dtype=np.float32)
