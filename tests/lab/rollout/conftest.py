"""A world whose commands are kept, and a link that takes no time."""

import numpy as np
from numpy.typing import NDArray

from specact.lab.envs.ball import BallEnv


class TapedBall(BallEnv):
    """The ball environment; it remembers every command since its reset."""

    def reset(self, **options):  # type: ignore[no-untyped-def]
        self.commands: list[NDArray[np.float32]] = []
        return super().reset(**options)

    def command(self, action: NDArray[np.float32]) -> None:
        self.commands.append(np.array(action))
        super().command(action)


class Instant:
    """A link on which nothing takes any time; the preset ``loopback`` has a rate, and so its nanoseconds."""

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        return 0.0

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        return 0.0
