"""Random streams addressed by what they are for, so that results depend on neither order, batching nor side."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


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
    key, counter = _address(seed, role, robot, episode, step)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class StepStreams:
    """The streams of one robot, the same as :func:`stream` gives: call it with a role and an address.

    It keeps one generator per role and moves it from address to address, which takes an eighth of the time of making
    one. So a stream is good until the next one of the same role is asked for.

    Args:
        seed, robot: the address's fixed part.
    """

    def __init__(self, seed: int, robot: int) -> None:
        self._seed, self._robot = seed, robot
        self._generators: dict[Role, np.random.Generator] = {}
        self._state = dict(np.random.Philox(0).state)

    def __call__(self, role: Role, episode: int, step: int) -> np.random.Generator:
        generator = self._generators.get(role)
        if generator is None:
            generator = self._generators[role] = stream(self._seed, role, robot=self._robot)
        key, counter = _address(self._seed, role, self._robot, episode, step)
        # The buffer of a fresh Philox is marked as used up, and no half of a word is left over.
        generator.bit_generator.state = self._state | {"state": {"counter": counter, "key": key}}
        return generator


def _address(
    seed: int, role: Role, robot: int, episode: int, step: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    return np.array([seed, role], dtype=np.uint64), np.array([0, step, episode, robot], dtype=np.uint64)
