"""A critically damped servo: what a robot knows of how its own parts follow their commands."""

from __future__ import annotations

from math import exp

import numpy as np
from numpy.typing import NDArray


def follow(
    position: NDArray[np.float64],
    velocity: NDArray[np.float64],
    target: NDArray[np.float64],
    rate: float,
    seconds: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Position and velocity after the servo was held at a target: ``x'' = rate^2 (target - x) - 2 rate x'``, solved.

    Args:
        position, velocity, target: ``[D]``, in one unit of length, and that per second.
        rate: undamped natural frequency [rad/s], > 0.
        seconds: for how long, >= 0.
    """
    away = position - target
    push = velocity + rate * away
    decay = exp(-rate * seconds)
    return target + (away + push * seconds) * decay, (velocity - rate * push * seconds) * decay
