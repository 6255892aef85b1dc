"""Drafters of action tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specact.types import value


@value
class Decided:
    """What a drafter knows.

    Attributes:
        tokens: those decided so far, int64 ``[n]``, n >= 1.
        features: what the target read each of them from, float32 ``[n, W]``.
    """

    tokens: NDArray[np.int64]
    features: NDArray[np.float32]
