"""Random streams addressed by purpose, so that results do not depend on order, batching, or device and server."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import numpy as np


class Role(IntEnum):
    """Purpose of a random stream. The numbers are part of every recorded result: never reuse or reorder them."""

    DRAFT = 0
    GATE = 1
    VERIFY = 2
    LINK = 3
    ENVIRONMENT = 4
    DATA = 5


class StepAddress(NamedTuple):
    """Identifies an inference of a robot; with a :class:`Role` it addresses a random stream."""

    seed: int
    robot: int
    episode: int
    step: int

    @property
    def following(self) -> StepAddress:
        """Address of the next step."""
        return StepAddress(self.seed, self.robot, self.episode, self.step + 1)


def stream(seed: int, role: Role, *, robot: int = 0, episode: int = 0, step: int = 0) -> np.random.Generator:
    """The random stream of one decision.

    The address, integers in [0, 2^64), is the key and the upper counter words of a Philox 4x64 generator, so that
    different addresses never overlap (each has 2^64 blocks) and the same address always gives the same numbers.
    """
    key, counter = np.array([seed, role], np.uint64), np.array([0, step, episode, robot], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def streams(role: Role, addresses: Iterable[StepAddress]) -> list[np.random.Generator]:
    """The independent random streams of several steps, as for a batch."""
    return [stream(seed, role, robot=robot, episode=episode, step=step) for seed, robot, episode, step in addresses]


class StepStreams:
    """The streams of :func:`stream`, with one reused generator per role.

    Reseeding takes an eighth of the time of construction. A stream is valid until the next one of the same role.
    """

    def __init__(self) -> None:
        self._generators: dict[Role, np.random.Generator] = {}
        self._state = dict(np.random.Philox(0).state) | {"buffer": (0, 0, 0, 0)}

    def __call__(self, role: Role, address: StepAddress) -> np.random.Generator:
        seed, robot, episode, step = address
        generator = self._generators.get(role)
        if generator is None:
            generator = self._generators[role] = stream(seed, role)
        # As in a new Philox, the buffer is marked as used and there is no cached half word. Python integers take a
        # third of the time of arrays here.
        self._state["state"] = {"counter": (0, step, episode, robot), "key": (seed, role)}
        generator.bit_generator.state = self._state
        return generator
