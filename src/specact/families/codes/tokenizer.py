"""The frozen action tokenizer on the device: codes to actions by table look-up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.types import Codes


@dataclass(frozen=True)
class ActionTokenizer:
    """Decodes codes into action chunks; shared by draft and target, which is what makes their codes comparable.

    Attributes:
        table: the residual VQ's decoder over all code tuples, float32 ``[K ** G, n, A]``, normalised units.
        centre, scale: float32 ``[A]``; ``action = centre + scale * normalised``, demonstrations lie in [-1, 1].
        fingerprint: of the file it came from.
        codes: K.
    """

    table: NDArray[np.float32]
    centre: NDArray[np.float32]
    scale: NDArray[np.float32]
    fingerprint: str
    codes: int

    def decode(self, codes: Codes, offsets: NDArray[np.float32]) -> NDArray[np.float32]:
        """``decoder(codes) + sum_g offset_g(code_g)``: a normalised chunk ``[n, A]``.

        Offsets beyond what float32 holds give infinite numbers or NaN, which whoever acts on the chunk has to refuse.

        Args:
            codes: ``[G]``.
            offsets: ``[G, K, n, A]``.
        """
        chunk = self.base(codes)
        with np.errstate(over="ignore", invalid="ignore"):
            for book, code in enumerate(codes):
                chunk += offsets[book, code]
        return chunk

    def base(self, codes: Codes) -> NDArray[np.float32]:
        """``decoder(codes)`` without any offset, ``[n, A]``."""
        index = 0
        for code in codes:
            index = index * self.codes + int(code)
        chunk: NDArray[np.float32] = self.table[index].copy()
        return chunk

    def to_environment(self, normalised: NDArray[np.float32]) -> NDArray[np.float32]:
        """Actions ``[..., A]`` in the environment's units, never beyond the range that was demonstrated."""
        return np.minimum(np.maximum(normalised, -1.0), 1.0) * self.scale + self.centre

    def normalise(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """The inverse of :meth:`to_environment` for one action ``[A]``.

        Raises:
            ConfigError: if it has another size, is not finite, or lies beyond the range that was demonstrated.
        """
        low, high = self.centre - self.scale, self.centre + self.scale
        slack = 1e-5 * self.scale
        if np.shape(action) != low.shape or not ((action >= low - slack) & (action <= high + slack)).all():
            raise ConfigError(
                f"an action of this robot must have shape [{len(low)}] and lie between {low.tolist()} and "
                f"{high.tolist()}, got {action}"
            )
        return np.asarray((action - self.centre) / self.scale, dtype=np.float32)
