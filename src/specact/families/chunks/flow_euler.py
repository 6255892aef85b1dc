"""From noise to data along a velocity field, with and without the pull of actions already decided.

Time runs from 0, noise, to 1, data, on the straight paths ``x_t = (1 - t) x_0 + t x_1`` with velocity ``x_1 - x_0``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Chunk = NDArray[np.float32]
Velocity = Callable[[Chunk, float], Chunk]
Guide = Callable[[Chunk, float], tuple[Chunk, Chunk]]


def integrate(velocity: Velocity, noise: Chunk, steps: int) -> Chunk:
    """``x <- x + v(x, t) / n`` at ``t = 0, 1 / n, ..., (n - 1) / n``.

    Args:
        velocity: from chunks ``[..., H, A]`` and t to the velocity there, of the same shape.
        noise: standard normal, ``[..., H, A]``.
        steps: n, at least 1.
    """
    x = noise
    for step in range(steps):
        x = x + velocity(x, step / steps) / np.float32(steps)
    return x


def integrate_guided(guide: Guide, noise: Chunk, steps: int, beta: float) -> Chunk:
    """The same with ``v + w(t) g`` for v, where g pulls the expected outcome towards what is wanted.

    ``g = (Y - x^_1)^T diag(W) dx^_1/dx_t`` with ``x^_1 = x_t + (1 - t) v(x_t, t)`` (Black et al. 2025,
    "Real-time execution of action chunking flow policies", equations 2 to 4; after Pokle et al. 2024).

    Args:
        guide: from a chunk ``[H, A]`` and t to v and g there, both ``[H, A]``.
        noise, steps: as for :func:`integrate`.
        beta: the largest w.
    """
    x = noise
    for step in range(steps):
        time = step / steps
        velocity, pull = guide(x, time)
        velocity = velocity + np.float32(guidance_weight(time, beta)) * pull
        x = x + velocity / np.float32(steps)
    return x


def guidance_weight(time: float, beta: float) -> float:
    """``w(t) = min(beta, (1 - t) / (t r_t^2))`` with ``r_t^2 = (1 - t)^2 / (t^2 + (1 - t)^2)``.

    Without the limit it would be infinite at both ends, where few steps cannot follow it.
    """
    rest = 1.0 - time
    unlimited = time * rest
    return beta if unlimited <= 0.0 else min(beta, (time**2 + rest**2) / unlimited)
