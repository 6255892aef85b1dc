"""How well a gate chose, by the exact rejection probabilities of the steps it met."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Of the gated loss, per step; below it an efficiency says nothing.
LEAST_GAIN = 0.01


def choice_efficiency(rejection: NDArray[np.float64], sent: NDArray[np.bool_]) -> float | None:
    """How well a gate chose among the steps it met: 0 is chance, 1 the least R(z) that as many skips can have.

    Unlike the gate efficiency it compares nobody else's states. None where there was no choice, or none that matters.

    Args:
        rejection: R(z) of every step, ``[N]``.
        sent: whether it was transmitted, ``[N]``.
    """
    skips = int((~sent).sum())
    chance = float(rejection.mean()) * skips
    best = float(np.sort(rejection)[:skips].sum())
    if chance - best < LEAST_GAIN * len(sent):
        return None
    return (chance - float(rejection[~sent].sum())) / (chance - best)
