"""What the networks of a bundle are given at work: typical inputs for calibrating and comparing quantised variants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specact.families.chunks.bundle import FlowBundle
from specact.families.chunks.flow_euler import Chunk, integrate
from specact.families.codes.bundle import Bundle
from specact.lab.train.quantise import Feeds
from specact.observation import Window


def typical_inputs(bundle: Bundle | FlowBundle, windows: Sequence[Window], steps: int = 10) -> dict[str, list[Feeds]]:
    """Inputs of every network that can be quantised, by part and then by name, at batch 1.

    Args:
        bundle: a pair, or a flow policy.
        windows: observations, such as those of demonstrations.
        steps: Euler steps; each gives the expert's inputs once.
    """
    if isinstance(bundle, Bundle):
        return {
            "draft": [bundle.spec.draft.stack([window]) for window in windows],
            "target": [bundle.spec.target.stack([window]) for window in windows],
        }
    networks, spec, rng = bundle.networks, bundle.spec, np.random.default_rng(0)
    inputs: dict[str, list[Feeds]] = {"encoder": [], "prefix": [], "expert": []}
    for window in windows:
        inputs["encoder"].append(spec.observation.stack([window]))
        inputs["prefix"].append({"tokens": networks.tokens([window])})
        cache = networks.cache([window])

        def velocity(x: Chunk, time: float, cache: Chunk = cache) -> Chunk:
            chunks, times = x[None], np.array([time], np.float32)
            inputs["expert"].append({"chunk": chunks, "time": times, "cache": cache})
            found: Chunk = networks.velocity(chunks, times, cache)[0]
            return found

        integrate(velocity, rng.standard_normal((spec.chunk, spec.actions), dtype=np.float32), steps)
    return inputs
