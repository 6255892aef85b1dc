"""What the numbers of a manifest may be."""

from __future__ import annotations

import sys

from specact.errors import BundleError
from specact.ranges import Range

# No window, vector, codebook or chunk is larger; what follows from them stays a number that a machine can hold.
MOST = 1 << 20
# Control rates [Hz]: what a machine can wait for.
RATES_HZ = Range(1e-3, 1e6)


def check_whole(name: str, value: object, least: int, most: int = MOST) -> None:
    """Refuses what is no whole number of this range.

    Raises:
        BundleError: for such a value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BundleError(
            f"a bundle's {name} must be a whole number from {least} to {most}, but its manifest says {value!r:.60}"
        )


def check_positive(name: str, value: object) -> None:
    """Refuses what is no positive finite number.

    Raises:
        BundleError: for such a value.
    """
    # A whole number of any length can be compared, but not converted.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0.0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise BundleError(f"a bundle's {name} must be positive and finite, but its manifest says {value!r:.60}")
