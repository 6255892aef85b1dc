"""What a new chunk is told of the old one, so that it goes on from it: the soft mask of real-time chunking."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specact.families.chunks.policy import Inpainting


def soft_mask(certain: int, foreseen: int, chunk: int) -> NDArray[np.float32]:
    """Weights ``[H]`` of the old chunk's actions (arXiv 2506.07339, equation 5).

    ``w_i = 1`` for ``i < d``; ``w_i = c_i (e^{c_i} - 1) / (e - 1)`` with ``c_i = (R - i) / (R - d + 1)`` for
    ``d <= i < R``; 0 from there on.

    Args:
        certain: d, the actions that will have run when the new chunk arrives, 0 to R.
        foreseen: R, the actions that the old chunk still speaks of, 0 to H.
        chunk: H.
    """
    row = np.arange(chunk)
    near = np.clip((foreseen - row) / (foreseen - certain + 1), 0.0, 1.0)
    fading = near * np.expm1(near) / np.expm1(1.0)
    return np.where(row < certain, 1.0, fading).astype(np.float32)


def inpainting_of(rest: NDArray[np.float32], certain: int, chunk: int) -> Inpainting:
    """The old chunk's actions from now on as the first ones of the new chunk.

    Args:
        rest: those actions, to the old chunk's end, whether they were going to be played or not, ``[R, A]``.
        certain: actions of them that will have run when the new chunk arrives, 0 to R.
        chunk: H, at least R.
    """
    actions = np.zeros((chunk, rest.shape[1]), np.float32)
    actions[: len(rest)] = rest
    return Inpainting(actions, soft_mask(certain, len(rest), chunk))
