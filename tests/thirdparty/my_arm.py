"""A robot that is not specact's: here the trolley again, in place of motors and encoders."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Arm:
    """Without arguments: it finds its port and its goal by itself."""

    def __init__(self) -> None:
        self.position, self.velocity = np.array([0.5, 0.5]), np.zeros(2)
        self.goal = np.zeros(2)

    def observe(self) -> dict[str, Any]:
        return {"state": np.concatenate([self.position, self.velocity]), "goal": self.goal}

    def act(self, action: NDArray[np.float32]) -> None:
        self.velocity = 0.9 * self.velocity + 0.1 * action
        self.position = self.position + 0.2 * self.velocity

    def stop(self) -> None:
        self.velocity = np.zeros(2)


class SeeingArm(Arm):
    """The same with a camera, 24 pixels high and wide."""

    def observe(self) -> dict[str, Any]:
        return super().observe() | {"image.front": np.zeros((24, 24, 3), np.uint8)}
