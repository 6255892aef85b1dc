"""A flow-matching chunk policy: noise in, a chunk of actions out, in a few Euler steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, ObservationError
from specact.families.chunks.flow_euler import integrate, integrate_guided
from specact.families.chunks.flow_networks import FlowNetworks
from specact.families.chunks.flow_units import FlowUnits
from specact.families.chunks.policy import ChunkSpec, Inpainting
from specact.observation import Window


class FlowPolicy:
    """See :class:`~specact.families.chunks.policy.ChunkPolicy`.

    The prefix is computed once per inference, the expert once per Euler step. With inpainting the steps are guided
    towards what the last chunk says (real-time chunking, Black et al. 2025).

    Args:
        networks, units, spec: the parts of one bundle.
        steps: Euler steps; fewer are faster, and a single one gives the mean of what was demonstrated.
        beta: largest weight of the guidance; 5 in the paper.

    Attributes:
        spec, networks, units, steps: as given.

    Raises:
        ConfigError: for a number out of range.
    """

    inpaints = True

    def __init__(
        self, networks: FlowNetworks, units: FlowUnits, spec: ChunkSpec, *, steps: int = 10, beta: float = 5.0
    ) -> None:
        if steps < 1 or not beta >= 0.0:
            raise ConfigError(f"a flow takes at least 1 step and a beta of at least 0, got {steps} and {beta}")
        self.networks, self.units, self.spec, self.steps = networks, units, spec, steps
        self._beta = beta

    def infer(
        self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None
    ) -> NDArray[np.float32]:
        """See :class:`~specact.families.chunks.policy.ChunkPolicy`.

        Raises:
            ConfigError: if ``inpainting`` is for chunks of another shape.
            ObservationError: if the chunk is not finite.
        """
        if inpainting is None:
            chunk = self.infer_batch([window], [rng])[0]
        else:
            x = self._inpainted(self._noise(rng), self.networks.cache([window]), inpainting)
            chunk = self._chunk(x)
        if not np.isfinite(chunk).all():
            raise ObservationError("the policy's action is not finite for this observation; check its units and range")
        return chunk

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> list[NDArray[np.float32]]:
        """See :class:`~specact.families.chunks.policy.ChunkPolicy`; not finite where an observation is beyond range."""
        cache, noise = self.networks.cache(windows), np.stack([self._noise(rng) for rng in rngs])
        times = np.empty(len(noise), np.float32)

        def velocity(x: NDArray[np.float32], time: float) -> NDArray[np.float32]:
            times.fill(time)
            found: NDArray[np.float32] = self.networks.velocity(x, times, cache)
            return found

        with np.errstate(over="ignore", invalid="ignore"):
            return list(self._chunk(integrate(velocity, noise, self.steps)))

    def _chunk(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Actions in the environment's units; NaN where ``x`` is not finite, which limiting the range would hide."""
        return np.where(np.isfinite(x), self.units.to_environment(x), np.float32(np.nan))

    def _noise(self, rng: np.random.Generator) -> NDArray[np.float32]:
        return rng.standard_normal((self.spec.chunk, self.spec.actions), dtype=np.float32)

    def _inpainted(
        self, noise: NDArray[np.float32], cache: NDArray[np.float32], inpainting: Inpainting
    ) -> NDArray[np.float32]:
        if inpainting.actions.shape != noise.shape:
            raise ConfigError(
                f"this policy's chunks have shape {noise.shape}, but the actions to inpaint have shape "
                f"{inpainting.actions.shape}"
            )
        weights = inpainting.weights[None].astype(np.float32)
        # Rows of weight 0 are ignored, whatever they hold: 0 times a NaN would not be 0.
        given = np.where(inpainting.weights[:, None] > 0.0, inpainting.actions, self.units.centre)
        wanted = self.units.to_flow(given)[None].astype(np.float32)

        def guide(x: NDArray[np.float32], time: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
            now = np.array([time], np.float32)
            velocity, pull = self.networks.guide(x[None], now, cache, wanted, weights)
            return velocity[0], pull[0]

        return integrate_guided(guide, noise, self.steps, self._beta)
