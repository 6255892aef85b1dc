"""Two chunk policies for the ball, one arithmetic for a window alone and in a batch, to the last bit."""

from collections.abc import Sequence

import numpy as np

from specact.families.chunks.policy import Chunk
from specact.families.chunks.sources import Inputs, chunk_policy
from specact.observation import Field


@chunk_policy(observation={"state": (8,)}, chunk=6, actions=2, rate_hz=20.0, seeded=True)
def small(inputs: Inputs, rngs: Sequence[np.random.Generator]) -> Chunk:
    """Anywhere: it does not see the goal."""
    return np.asarray(
        np.stack([rng.uniform(-1.0, 1.0, (6, 2)) for rng in rngs]) + 0.01 * inputs["state"][:, -1, None, :2]
    )


@chunk_policy(
    observation={"state": Field((8,), history=3), "goal": Field((2,), history=0)}, chunk=4, actions=2, rate_hz=20.0,
    low=(-1.0, -1.0), high=(1.0, 1.0), seeded=True,
)  # fmt: skip
def large(inputs: Inputs, rngs: Sequence[np.random.Generator]) -> Chunk:
    """To the goal, with noise."""
    noise = np.stack([rng.normal(0.0, 0.05, (4, 2)) for rng in rngs])
    return np.asarray(inputs["goal"][:, None] - inputs["state"][:, 0, None, :2] + noise)
