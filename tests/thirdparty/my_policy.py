"""A policy that is not specact's: here a model of the trolley under a controller, in place of a large network."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.families.chunks.adapters import chunk_policy
from specact.observation import Field

CHUNK = 8


@chunk_policy(
    observation={"state": (4,), "goal": Field((2,), history=0)},
    chunk=CHUNK,
    actions=2,
    rate_hz=20.0,
    low=[-1.0, -1.0],
    high=[1.0, 1.0],
)
def policy(inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """From ``state [B, 1, 4]`` and ``goal [B, 2]`` to actions ``[B, 8, 2]``."""
    position, velocity = inputs["state"][:, -1, :2], inputs["state"][:, -1, 2:]
    actions = []
    for _ in range(CHUNK):
        actions.append(np.clip(4.0 * (inputs["goal"] - position) - 3.0 * velocity, -1.0, 1.0))
        velocity = 0.9 * velocity + 0.1 * actions[-1]
        position = position + 0.2 * velocity
    return np.stack(actions, axis=1)
