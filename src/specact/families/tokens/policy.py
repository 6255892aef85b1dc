"""An autoregressive policy of action tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, ObservationError
from specact.families.chunks.flow import FlowUnits
from specact.families.chunks.policy import Chunk, ChunkSpec, Inpainting
from specact.families.codes.sampling import softmax
from specact.families.tokens.bins import to_actions
from specact.families.tokens.network import Array, TokenNetworks, Tokens, causal
from specact.observation import Window
from specact.types import value


@value
class DecodedBatch:
    """Decoded chunks of B windows.

    Attributes:
        tokens: ``[B, T]``.
        finite: whether all logits were finite, ``[B]``.
        features: for each of the T tokens, the features ``[B, W]`` from which it was predicted.
        seen: the encoder's tokens of the windows, ``[B, N, W]``.
    """

    tokens: Tokens
    finite: NDArray[np.bool_]
    features: list[Array]
    seen: Array


class TokenPolicy:
    """See :class:`~specact.families.chunks.policy.ChunkPolicy`.

    A chunk is one token for every dimension of every action, in that order. Each is sampled given the previous ones,
    ``p(token | observation, previous tokens)``, with one decoder pass per token after the first.

    Args:
        networks, units, spec: the parts of one bundle.
        temperature: of the sampling softmax; 0 is greedy.

    Attributes:
        spec, networks, units, temperature: as given.

    Raises:
        ConfigError: for a temperature that is negative or not finite.
    """

    inpaints = False
    steady = True

    def __init__(self, networks: TokenNetworks, units: FlowUnits, spec: ChunkSpec, *, temperature: float = 0.0) -> None:
        if not 0.0 <= temperature < np.inf:
            raise ConfigError(f"a temperature must be at least 0 and finite, got {temperature}")
        self.networks, self.units, self.spec, self.temperature = networks, units, spec, temperature

    def infer(self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None) -> Chunk:
        """See :class:`~specact.families.chunks.policy.ChunkPolicy`.

        Raises:
            ConfigError: for an inpainting.
            ObservationError: if the chunk is not finite.
        """
        if inpainting is not None:
            raise ConfigError("a token policy cannot inpaint; choose another execution for it, or a flow policy")
        chunk = self.infer_batch([window], [rng])[0]
        if not np.isfinite(chunk).all():
            raise ObservationError("the policy's action is not finite for this observation; check its units and range")
        return chunk

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> list[Chunk]:
        """See :class:`~specact.families.chunks.policy.ChunkPolicy`; NaN for an observation that overflows."""
        with np.errstate(over="ignore", invalid="ignore"):
            tokens, finite = self.decode(windows, rngs)
        chunks = self.to_environment(tokens)
        return [chunk if fine else np.full_like(chunk, np.nan) for chunk, fine in zip(chunks, finite, strict=True)]

    def decode(
        self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]
    ) -> tuple[Tokens, NDArray[np.bool_]]:
        """The tokens of B windows ``[B, H * A]``, and whether all of their logits were finite ``[B]``."""
        found = self.write(windows, rngs)
        return found.tokens, found.finite

    def write(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> DecodedBatch:
        """As :meth:`decode`, with the features of target and encoder."""
        batch, networks = len(windows), self.networks
        seen = networks.tokens(windows)
        cache, reading = networks.prefill(seen)
        tokens, finite, features = np.zeros((batch, networks.length), np.int64), np.ones(batch, np.bool_), list[Array]()
        for place in range(networks.length):
            if place:
                places = np.full((batch, 1), place - 1)
                reading = networks.read(cache, tokens[:, place - 1 : place], places, causal(batch, 1))
                cache.keep(reading.entries)
            logits = reading.logits[:, -1]
            finite &= np.isfinite(logits).all(axis=-1)
            tokens[:, place] = self._sample(logits, rngs)
            features.append(reading.features[:, -1])
        return DecodedBatch(tokens, finite, features, seen)

    def to_environment(self, tokens: Tokens) -> list[Chunk]:
        """Chunks ``[H, A]`` in the environment's units, of tokens ``[B, H * A]``."""
        normalised = to_actions(tokens).reshape(len(tokens), self.spec.chunk, self.spec.actions)
        return list(self.units.to_environment(normalised))

    def _sample(self, logits: Array, rngs: Sequence[np.random.Generator]) -> Tokens:
        if self.temperature == 0.0:
            greedy: Tokens = np.argmax(logits, axis=-1)
            return greedy
        # Inverse-CDF sampling.
        above = np.cumsum(softmax(logits.astype(np.float64), self.temperature), axis=-1)
        drawn = np.array([rng.random() for rng in rngs])[:, None] * above[:, -1:]
        chosen: Tokens = np.minimum(np.count_nonzero(above <= drawn, axis=-1), logits.shape[-1] - 1)
        return chosen
