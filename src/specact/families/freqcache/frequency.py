"""Which tokens may be reused between two frames: motion, edge energy and a budget, from their spectra.

FreqCache (arXiv 2604.24391) names these steps but publishes no equations, constants or code; the forms here are our
own. Frames are float64 ``[H, W]``, see :func:`luma`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.float64]
Spectrum = NDArray[np.complex128]
_EPSILON = 1e-12


@dataclass(frozen=True)
class Motion:
    """Motion of the image from one frame to the next.

    Attributes:
        rows, columns: shift downwards and to the right [pixels].
        confidence: ratio of the highest to the second highest peak of the phase correlation, at least 1; direct
            neighbours of the peak are excluded, because subpixel motion spreads it over them.
    """

    rows: int
    columns: int
    confidence: float


NO_MOTION = Motion(0, 0, np.inf)


def luma(frame: NDArray[np.uint8]) -> Plane:
    """The mean of the colours, ``[H, W]``, of a frame ``[H, W, 3]``."""
    return np.asarray(frame.mean(axis=-1))


def spectrum(frame: Plane) -> Spectrum:
    """The real Fourier transform without its zero frequency (mean brightness), ``[H, W // 2 + 1]``."""
    found = np.fft.rfft2(frame)
    found[0, 0] = 0.0
    return found


def phase_correlation(before: Spectrum, now: Spectrum, shape: tuple[int, ...]) -> Motion:
    """``C = F2 conj(F1) / |F2 conj(F1)|``; the motion is the position of the maximum of C's inverse transform.

    A circular shift by whole pixels is found exactly, up to half of the image's size. Between uniform frames there is
    no motion, with confidence 1.

    Args:
        before, now: spectra of two frames, see :func:`spectrum`.
        shape: of the frames [pixels], at least 4 x 4.
    """
    cross = now * before.conj()
    size = np.abs(cross)
    if not size.max() > _EPSILON:
        return Motion(0, 0, 1.0)
    surface = np.fft.irfft2(cross / np.maximum(size, _EPSILON * size.max()), s=shape)
    height, width = surface.shape
    row, column = divmod(int(surface.argmax()), width)
    peak = surface[row, column]
    around = np.ix_([(row + step) % height for step in (-1, 0, 1)], [(column + step) % width for step in (-1, 0, 1)])
    surface[around] = -np.inf
    second = max(float(surface.max()), _EPSILON)
    return Motion(
        (row + height // 2) % height - height // 2,
        (column + width // 2) % width - width // 2,
        max(1.0, float(peak) / second),
    )


def source_patches(motion: Motion, patch: tuple[int, int], grid: tuple[int, int]) -> NDArray[np.int64]:
    """For each patch the patch of the previous frame that shows the same; -1 if that was outside the frame.

    Args:
        motion: is rounded to whole patches.
        patch: height and width of a patch [pixels].
        grid: rows R and columns C of patches.

    Returns:
        Indices ``[R C]``, row by row.
    """
    down, right = round(motion.rows / patch[0]), round(motion.columns / patch[1])
    row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    row, column = row - down, column - right
    inside = (row >= 0) & (row < grid[0]) & (column >= 0) & (column < grid[1])
    return np.where(inside, row * grid[1] + column, -1)


def patches_of(frame: Plane, grid: tuple[int, int]) -> Plane:
    """The patches ``[R C, h, w]`` of a frame whose sides are multiples of the grid's."""
    height, width = frame.shape[0] // grid[0], frame.shape[1] // grid[1]
    apart = frame.reshape(grid[0], height, grid[1], width).swapaxes(1, 2)
    return apart.reshape(-1, height, width)


def edge_energy(patches: Plane) -> Plane:
    """``e = sum_{|u| > u_c} |DCT_u|^2 / sum_u |DCT_u|^2`` of each patch, ``[P]``; u_c is half the Nyquist frequency."""
    height, width = patches.shape[1:]
    power = np.square(_cosines(height) @ patches @ _cosines(width).T)
    # In units of the Nyquist frequency, which is at the number of pixels.
    far = np.hypot(np.arange(height)[:, None] / height, np.arange(width) / width) > 0.5
    return np.asarray((power * far).sum(axis=(1, 2)) / np.maximum(power.sum(axis=(1, 2)), _EPSILON))


def spectral_entropy(found: Spectrum) -> float:
    """``-sum_u p_u log p_u / log(bins)`` with ``p_u = |F_u|^2 / sum |F|^2``, in [0, 1], of a :func:`spectrum`."""
    power = np.square(found.real) + np.square(found.imag)
    total = power.sum()
    if not total > _EPSILON:
        return 0.0
    share = power[power > 0.0] / total
    return float(-(share * np.log(share)).sum() / np.log(power.size - 1))


def reuse_budget(entropy: float, least: float, most: float) -> float:
    """``B = B_min + (B_max - B_min) (1 - H)``: the share of tokens that may be reused."""
    return least + (most - least) * (1.0 - entropy)


def reused(earlier: NDArray[np.int64], rank: Plane, budget: float, refreshed: float) -> NDArray[np.bool_]:
    """Which of P patches reuse a token, bool ``[P]``: the lowest-ranked ones in the overlap, within the budget.

    Args:
        earlier: see :func:`source_patches`.
        rank: ``[P]``, such as :func:`edge_energy`; the highest are recomputed first.
        budget: share of all patches that may be reused, in [0, 1].
        refreshed: q, share of all patches that is always recomputed, the highest-ranked ones, in [0, 1].
    """
    count = len(rank)
    order = np.argsort(rank, kind="stable")
    allowed = np.zeros(count, np.bool_)
    allowed[order[: count - round(refreshed * count)]] = True
    allowed &= earlier >= 0
    kept = order[allowed[order]][: round(budget * count)]
    mask = np.zeros(count, np.bool_)
    mask[kept] = True
    return mask


@cache
def _cosines(size: int) -> Plane:
    """The orthonormal DCT-II, ``[size, size]``."""
    step = np.arange(size)
    found = np.sqrt(2.0 / size) * np.cos(np.pi * np.outer(step, step + 0.5) / size)
    found[0] /= np.sqrt(2.0)
    return np.asarray(found)
