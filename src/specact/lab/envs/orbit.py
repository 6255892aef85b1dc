"""A point on a circle: where the goal of the ball is, and how fast it moves."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, sin

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Orbit:
    """A circle around the origin, run through at constant speed.

    Attributes:
        radius: [m], > 0.
        angle: where it begins [rad].
        speed: along the circle [m/s]; positive is counter-clockwise, 0 stands still.
    """

    radius: float
    angle: float
    speed: float = 0.0

    def at(self, time_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Position [m] and velocity [m/s] after ``time_s`` seconds, both ``[2]``."""
        angle = self.angle + self.speed / self.radius * time_s
        outward = np.array([cos(angle), sin(angle)])
        return self.radius * outward, self.speed * np.array([-outward[1], outward[0]])
