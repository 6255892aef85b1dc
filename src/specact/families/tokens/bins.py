"""Actions as tokens: 256 uniform bins in every dimension (RT-1, Brohan et al. 2022; OpenVLA, Kim et al. 2024).

Unlike there, the outermost bins are centred on -1 and 1, so that an action at its limit is represented exactly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BINS = 256
CENTRES: NDArray[np.float32] = np.linspace(-1.0, 1.0, BINS, dtype=np.float32)
CENTRES.flags.writeable = False


def to_tokens(actions: NDArray[np.float32]) -> NDArray[np.int64]:
    """The nearest bin of every number, 0 to 255; beyond [-1, 1] the outermost."""
    tokens: NDArray[np.int64] = np.rint((np.clip(actions, -1.0, 1.0) + 1.0) * ((BINS - 1) / 2)).astype(np.int64)
    return tokens


def to_actions(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """The centres of bins, float32 in [-1, 1]."""
    centres: NDArray[np.float32] = CENTRES[tokens]
    return centres
