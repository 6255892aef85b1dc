"""A policy of action codes as a chunk policy: samples codes and decodes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.families.chunks.policy import ChunkSpec, Inpainting
from specact.families.codes.sampling import sample_codes
from specact.families.codes.spec import CodePolicy, PolicySpec
from specact.families.codes.tokenizer import ActionTokenizer
from specact.observation import ObservationSpec, Window


class CodeChunks:
    """A VQ-BeT as a :class:`~specact.families.chunks.policy.ChunkPolicy`.

    Given the generator that a pair's policy draws the codes from, the chunk is the one that it executes.

    Args:
        policy: draft or target of a bundle.
        tokenizer: of the same bundle.
        spec: of the same bundle.
        observation: spec of this policy.
    """

    inpaints = False
    steady = True

    def __init__(
        self, policy: CodePolicy, tokenizer: ActionTokenizer, spec: PolicySpec, observation: ObservationSpec
    ) -> None:
        self._policy, self._tokenizer = policy, tokenizer
        self.spec = ChunkSpec(observation, spec.chunk, spec.actions, spec.rate_hz)

    def infer(
        self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None
    ) -> NDArray[np.float32]:
        """See :class:`~specact.families.chunks.policy.ChunkPolicy`."""
        if inpainting is not None:
            raise ConfigError(
                "a policy of action codes cannot inpaint; choose another execution for it, or a flow policy"
            )
        return self.infer_batch([window], [rng])[0]

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> list[NDArray[np.float32]]:
        """See :class:`~specact.families.chunks.policy.ChunkPolicy`."""
        chunks = []
        for distribution, rng in zip(self._policy.infer_batch(windows), rngs, strict=True):
            codes = sample_codes(distribution, rng)
            chunks.append(self._tokenizer.to_environment(self._tokenizer.decode(codes, distribution.offsets)))
        return chunks
