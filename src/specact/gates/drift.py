"""An alarm for a mean that has left its level, good for a robot's whole life."""

from __future__ import annotations

import numpy as np

from specact.errors import ConfigError

# Stakes as shares of the largest that cannot lose everything: small ones see small changes, large ones large ones soon.
_STAKES = np.array([0.05, 0.1, 0.2, 0.4, 0.7, 0.95])


class DriftAlarm:
    """Raised when the mean of values in [0, 1] has left ``[level - tolerance, level + tolerance]``.

    For each stake s and side, ``e_t`` is what a fair game pays for a bet that the mean is beyond that end of the
    interval: ``1 + s (x_t - m) / m`` above, ``1 + s (m - x_t) / (1 - m)`` below, with mean at most 1 while it is not.
    The evidence ``M_t = (M_{t-1} + 1) e_t`` (Shiryaev and Roberts) adds up the bets begun at every time, and the alarm
    is raised when its mean over stakes and sides reaches ``run_length``. So, for any distribution of the values of
    which each one's mean, given those before, stays within the interval (Shin, Ramdas and Rinaldo 2024,
    "E-detectors", arXiv 2203.03532, section 2):

    - the expected number of values until a false alarm is at least ``run_length``;
    - the probability of a false alarm within n values is at most ``n / run_length`` (Doob's inequality).

    An interval around the mean of n values that is looked at again and again has neither property.

    Args:
        level: of the mean, in [0, 1].
        tolerance: how far from it the mean may be; it has to cover the level's own error.
        run_length: mean number of values until a false alarm, at least.

    Attributes:
        raised: whether it was raised; it stays so.

    Raises:
        ConfigError: for a value outside its range.
    """

    def __init__(self, level: float, *, tolerance: float = 0.05, run_length: float = 20_000.0) -> None:
        if not 0.0 <= level <= 1.0 or not 0.0 < tolerance < 1.0 or not run_length >= 1.0:
            raise ConfigError(
                "level must lie in [0, 1], tolerance in (0, 1) and run_length at or above 1, "
                f"got {level}, {tolerance} and {run_length}"
            )
        self.level, self.tolerance, self.run_length = level, tolerance, run_length
        self.raised = False
        high, low = level + tolerance, level - tolerance
        # e = offset + slope * x; both sides in one array.
        self._slopes = np.concatenate([_STAKES / high, -_STAKES / (1.0 - low)])
        self._offsets = 1.0 - self._slopes * np.repeat([high, low], len(_STAKES))
        self._evidence = np.zeros(2 * len(_STAKES))

    def take(self, value: float) -> bool:
        """Adds a value in [0, 1]; True if this one raises the alarm."""
        if self.raised:
            return False
        self._evidence = (self._evidence + 1.0) * (self._offsets + self._slopes * value)
        self.raised = float(self._evidence.mean()) >= self.run_length
        return self.raised
