"""Inpainting between consecutive chunks: the soft mask of real-time chunking."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specact.families.chunks.policy import Inpainting


def soft_mask(certain: int, foreseen: int, chunk: int) -> NDArray[np.float32]:
    """Weights ``[H]`` of the old chunk's actions (arXiv 2506.07339, equation 5).

    ``w_i = 1`` for ``i < d``; ``w_i = c_i (e^{c_i} - 1) / (e - 1)`` with ``c_i = (R - i) / (R - d + 1)`` for
    ``d <= i < R``; 0 from there on.

    Args:
        certain: d, the delay: actions that will be executed before the new chunk arrives, 0 to R.
        foreseen: R, remaining actions of the old chunk, 0 to H.
        chunk: H.
    """
    row = np.arange(chunk)
    near = np.clip((foreseen - row) / (foreseen - certain + 1), 0.0, 1.0)
    fading = near * np.expm1(near) / np.expm1(1.0)
    return np.where(row < certain, 1.0, fading).astype(np.float32)


def inpainting_of(rest: NDArray[np.float32], certain: int, chunk: int) -> Inpainting:
    """The remaining actions of the old chunk as the inpainting target of the new chunk's first actions.

    Args:
        rest: all remaining actions of the old chunk, also those that would not be executed, ``[R, A]``.
        certain: number of them that will be executed before the new chunk arrives, 0 to R.
        chunk: H, at least R.
    """
    actions = np.zeros((chunk, rest.shape[1]), np.float32)
    actions[: len(rest)] = rest
    return Inpainting(actions, soft_mask(certain, len(rest), chunk))
