"""The frozen action tokenizer on the device: codes to actions by table look-up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specact.types import Codes
from specact.units import ActionUnits


@dataclass(frozen=True)
class ActionTokenizer(ActionUnits):
    """Decodes codes into action chunks; shared by draft and target, so that their codes are comparable.

    Attributes:
        centre, scale: see :class:`~specact.units.ActionUnits`.
        table: the residual VQ's decoder over all code tuples, float32 ``[K ** G, n, A]``, normalised units.
        fingerprint: of the file it came from.
        codes: K.
    """

    table: NDArray[np.float32]
    fingerprint: str
    codes: int

    @np.errstate(over="ignore", invalid="ignore")
    def decode(self, codes: Codes, offsets: NDArray[np.float32]) -> NDArray[np.float32]:
        """``decoder(codes) + sum_g offset_g(code_g)``: a normalised chunk ``[n, A]``.

        Offsets beyond float32 give infinite numbers or NaN; callers must refuse such a chunk.

        Args:
            codes: ``[G]``.
            offsets: ``[G, K, n, A]``.
        """
        chunk = self.base(codes)
        for book, code in enumerate(codes.tolist()):
            chunk += offsets[book, code]
        return chunk

    def base(self, codes: Codes) -> NDArray[np.float32]:
        """``decoder(codes)`` without any offset, ``[n, A]``."""
        index = 0
        for code in codes.tolist():
            index = index * self.codes + code
        chunk: NDArray[np.float32] = self.table[index].copy()
        return chunk
