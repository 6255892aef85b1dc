"""What two frames say about which tokens may be reused: motion, edges and a budget, by their spectra.

FreqCache (arXiv 2604.24391) names these steps; no equations, constants or code of it are public, so the forms here are
our own. Frames are float64 ``[H, W]``, see :func:`luma`.
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
    """How a picture moved from one frame to the next.

    Attributes:
        rows, columns: pixels that it moved down and to the right.
        confidence: the highest peak of the phase correlation over the second highest, at least 1; the peak's direct
            neighbours do not count, over which motion by part of a pixel spreads it.
    """

    rows: int
    columns: int
    confidence: float


NO_MOTION = Motion(0, 0, np.inf)


def luma(frame: NDArray[np.uint8]) -> Plane:
    """The mean of the colours, ``[H, W]``, of a frame ``[H, W, 3]``."""
    return np.asarray(frame.mean(axis=-1))


def spectrum(frame: Plane) -> Spectrum:
    """The half of the Fourier transform that tells the other, ``[H, W // 2 + 1]``, without brightness."""
    found = np.fft.rfft2(frame)
    found[0, 0] = 0.0
    return found


def phase_correlation(before: Spectrum, now: Spectrum, shape: tuple[int, ...]) -> Motion:
    """``C = F2 conj(F1) / |F2 conj(F1)|``; the motion is where the inverse transform of C is highest.

    Motion by whole pixels of a picture that repeats at its edges is found exactly, up to half of its size. What is
    alike everywhere moved nowhere, with confidence 1.

    Args:
        before, now: of two frames, see :func:`spectrum`.
        shape: of the frames, at least 4 x 4.
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
    """Of every place, which place of the frame before shows the same; -1 where that was outside.

    Args:
        motion: it is rounded to whole patches.
        patch: height and width of a patch [pixels].
        grid: rows R and columns C of patches.

    Returns:
        ``[R C]``, places row by row.
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
    """Which places reuse their token, ``[P]``: of those in the overlap the ones that rank lowest, as many as allowed.

    Args:
        earlier: see :func:`source_patches`.
        rank: ``[P]``, such as :func:`edge_energy`: what to compute again first.
        budget: share of all places that may be reused.
        refreshed: q, the share of all places that is computed again in any case, the highest of the rank.
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
