"""Two chunk policies of which it is known where they differ: by the first two numbers of the state."""

from collections.abc import Sequence

import numpy as np

from specact.families.chunks.policy import Chunk
from specact.families.chunks.sources import Inputs, chunk_policy

LOW, HIGH = (-1.0, -1.0), (1.0, 1.0)


@chunk_policy(
    observation={"state": (8,)}, chunk=4, actions=2, rate_hz=20.0, seeded=True, fingerprint="small", low=LOW, high=HIGH
)
def small(inputs: Inputs, rngs: Sequence[np.random.Generator]) -> Chunk:
    """Stands still, nearly."""
    return np.stack([rng.normal(0.0, 0.01, (4, 2)) for rng in rngs]).astype(np.float32)


@chunk_policy(observation={"state": (8,)}, chunk=4, actions=2, rate_hz=20.0, fingerprint="large", low=LOW, high=HIGH)
def large(inputs: Inputs) -> Chunk:
    """Goes back to the middle."""
    return np.repeat(-0.5 * inputs["state"][:, -1:, :2], 4, axis=1).astype(np.float32)
