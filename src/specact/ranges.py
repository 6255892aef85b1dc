"""Ranges of numeric settings, and their error message."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specact.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``.

    Attributes:
        low, high: the ends.
        open_low, open_high: whether that end is excluded.
    """

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        return low if self.high == math.inf else f"{low} and {'below' if self.open_high else 'at most'} {self.high:.7g}"


COUNT = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, open_low=True)
SHARE = Range(0, 1)
POSITIVE_SHARE = Range(0, 1, open_low=True)
BELOW_ONE = Range(0, 1, open_high=True)
INSIDE = Range(0, 1, open_low=True, open_high=True)
SEED = Range(0, 2**63, open_high=True)


def check_ranges(settings: object, allowed: dict[str, Range]) -> None:
    """Refuses a number that is out of range; None is allowed.

    Args:
        settings: a dataclass.
        allowed: the range of each attribute, by its name.

    Raises:
        ConfigError: if one lies outside its range or is not finite.
    """
    for name, numbers in allowed.items():
        value = getattr(settings, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} must be a finite number, got {value}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ConfigError(f"{name} has more digits than any number of use")
        if value is not None and value not in numbers:
            raise ConfigError(f"{name} must be {numbers}, got {value}")


# Of a window, vector, codebook or chunk, so that computed sizes do not overflow.
MOST = 1 << 20
# Allowed control rates [Hz].
RATES_HZ = Range(1e-3, 1e6)
