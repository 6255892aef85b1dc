"""Limits of the numbers in a manifest."""

from __future__ import annotations

import sys

from specact.errors import BundleError
from specact.ranges import Range

# Maximum size of a window, vector, codebook or chunk, so that computed sizes do not overflow.
MOST = 1 << 20
# Allowed control rates [Hz].
RATES_HZ = Range(1e-3, 1e6)


def check_integer(name: str, value: object, least: int, most: int = MOST) -> None:
    """Refuses a value that is not an integer in this range.

    Raises:
        BundleError: for such a value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BundleError(
            f"a bundle's {name} must be a whole number from {least} to {most}, but its manifest says {value!r:.60}"
        )


def check_positive(name: str, value: object) -> None:
    """Refuses a value that is not a positive finite number.

    Raises:
        BundleError: for such a value.
    """
    # A huge integer can be compared, but not converted to float.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0.0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise BundleError(f"a bundle's {name} must be positive and finite, but its manifest says {value!r:.60}")
