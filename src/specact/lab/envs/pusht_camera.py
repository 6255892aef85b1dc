"""PushT with a camera: frames and the agent's position besides the state, for policies without the state.

Physics, success and seeds are those of :mod:`specact.lab.envs.pusht`, so episodes of both are paired.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.lab.data.episodes import Episodes
from specact.lab.envs import pusht
from specact.lab.envs.task import Seen

REACH_PX = 180.0  # maximum distance of the agent from the block's centre, in scenes with both close to each other


def features(episodes: Episodes) -> Episodes:
    """Converts recorded PushT demonstrations, as :func:`specact.lab.envs.pusht.features`."""
    fitted = pusht.features(episodes)
    agent = pusht.position(fitted.numbers("state"))
    return replace(fitted, observation={**fitted.observation, "agent": agent})


def roll_forward(seen: Seen, actions: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """As :func:`specact.lab.envs.pusht.roll_forward`; the frame stays as it was."""
    rolled = pusht.roll_forward(seen, actions)
    return {**rolled, "agent": pusht.position(rolled["state"])}


def scenes(number: int, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Observations of random scenes: agent and block anywhere, half of them close to each other."""
    env = pusht.PushT(frames=True)
    seen = []
    for _ in range(number):
        agent, block = rng.uniform(15.0, 497.0, 2), rng.uniform(50.0, 462.0, 2)
        angle = rng.uniform(-math.pi, math.pi)
        if rng.random() < 0.5:
            distance, heading = rng.uniform(20.0, REACH_PX), rng.uniform(-math.pi, math.pi)
            agent = np.clip(block + distance * np.array([math.cos(heading), math.sin(heading)]), 15.0, 497.0)
        seen.append(env.reset(seed=0, options={"state": [*agent, *block, angle]})[0])
    env.close()
    return {name: np.stack([observation[name] for observation in seen]) for name in seen[0]}


TASK = replace(
    pusht.TASK,
    name="pusht-camera",
    make=partial(pusht.PushT, frames=True),
    features=features,
    roll_forward=roll_forward,
    scenes=scenes,
)
