"""Random streams addressed by what they are for, so that results depend on neither order, batching nor side."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Role(IntEnum):
    """What a random stream decides. The numbers are part of every recorded result: never reuse or reorder them."""

    DRAFT = 0
    GATE = 1
    VERIFY = 2
    LINK = 3
    ENVIRONMENT = 4
    DATA = 5


def stream(seed: int, role: Role, *, robot: int = 0, episode: int = 0, step: int = 0) -> np.random.Generator:
    """The random stream of one decision.

    The address is the key and the upper counter words of a Philox 4x64 generator, so that two different addresses
    never overlap (each has 2^64 blocks of its own) and the same address always gives the same numbers.

    Args:
        seed, robot, episode, step: non-negative integers below 2^64.
        role: what is decided with it.
    """
    key = np.array([seed, role], dtype=np.uint64)
    counter = np.array([0, step, episode, robot], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@dataclass(frozen=True, slots=True)
class StepStreams:
    """The streams of one robot's step; call it with a role.

    Attributes:
        seed, robot, episode, step: the address, as for :func:`stream`.
    """

    seed: int
    robot: int
    episode: int
    step: int

    def __call__(self, role: Role) -> np.random.Generator:
        return stream(self.seed, role, robot=self.robot, episode=self.episode, step=self.step)
