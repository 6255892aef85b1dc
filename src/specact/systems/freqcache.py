"""FreqCache (arXiv 2604.24391): the prefix of a flow policy is recomputed only where the camera's image has changed.

In every inference the tokens of smooth patches keep the keys and values of the last prefix, moved with the image::

    F_t = FFT(w (x_t - mean x_t)),  w_rc = sin^2(pi (r + 1/2) / R) sin^2(pi (c + 1/2) / C)       Hann's window
    C = F_t conj(F_t-1) / |F_t conj(F_t-1)|,  (rows, columns) = argmax IFFT(C)       motion between two frames
    s_i = the patch of frame t-1 that patch i shows now, -1 outside of that frame    tokens move with the image
    e_i = sum_{|u| > u_c} |DCT(patch_i)_u|^2 / sum_u |DCT(patch_i)_u|^2              share of energy in edges
    H = -sum_u p_u log p_u / log(bins),  p_u = |X_u|^2 / sum |X|^2,  X = FFT(x_t)    entropy of the spectrum
    B = B_min + (B_max - B_min) (1 - H)                                              budget of reused tokens

Of the patches with s_i >= 0, except for the share q with the largest e, those with the smallest e are reused, up to the
share B. If the ratio of C's highest to its second peak is small, nothing is reused.

The paper names these steps, but publishes no equations, constants or code: the forms are ours. Without a window the
frame's borders, which do not move, outweigh a smooth picture. Frequencies with less than ``floor`` of the largest
|F_t conj(F_t-1)| count in proportion to it: there noise would decide. We changed: a prefix is
the policy's transformer over all tokens, those that are no camera's are recomputed every time. Reused keys and values
keep the position encoding of the time when they were computed, so that even a perfect motion estimate is inexact.
Controls, which move no tokens or choose them otherwise, are in experiments/freqcache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.network import CPU, Compute, Network
from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import Array, FlowBundle, FlowNetworks
from specact.families.chunks.sources import check_made_for
from specact.observation import Window
from specact.pair import Answer, Target
from specact.records import NotNegative, Share, check_fields
from specact.rng import StepAddress
from specact.systems.flash import FlashVerifier, RoundAnswer, Rounds
from specact.types import Outcome, Proposal

if TYPE_CHECKING:
    from specact.systems.flow import FlowParts

# Frames are float64 [H, W], their real Fourier transforms complex128 [H, W // 2 + 1].
Plane = NDArray[np.float64]
Spectrum = NDArray[np.complex128]
# The refresh's folder in that of the flow policy it was made for, and its files.
FREQCACHE = "freqcache"
REFRESH_PARTS = {"refresh": "refresh.onnx"}
_EPSILON, FLOOR = 1e-12, 1e-4


@dataclass(frozen=True)
class Motion:
    """The image's shift downwards and to the right from one frame to the next [pixels].

    The confidence is the ratio of the highest to the second highest peak of the phase correlation, at least 1; direct
    neighbours of the peak are excluded, because subpixel motion spreads it over them.
    """

    rows: int
    columns: int
    confidence: float


def luma(frame: NDArray[np.uint8]) -> Plane:
    """The mean of the colours, ``[H, W]``, of a frame ``[H, W, 3]``."""
    return np.asarray(frame.mean(axis=-1))


def windowed(frame: Plane) -> Plane:
    """A frame without its mean, fading to 0 at its borders by Hann's window."""
    height, width = ((np.sin(np.pi * (np.arange(size) + 0.5) / size) ** 2) for size in frame.shape)
    return np.asarray(height[:, None] * width * (frame - frame.mean()))


def spectrum(frame: Plane) -> Spectrum:
    """The real Fourier transform without its zero frequency (mean brightness), ``[H, W // 2 + 1]``."""
    transform = np.fft.rfft2(frame)
    transform[0, 0] = 0.0
    return transform


def phase_correlation(before: Spectrum, now: Spectrum, shape: tuple[int, ...], floor: float = FLOOR) -> Motion:
    """``C = F_t conj(F_t-1) / |F_t conj(F_t-1)|``; the motion is the position of the maximum of C's inverse transform.

    Spectra are those of :func:`windowed` frames, unless the picture repeats at its borders: then a shift by whole
    pixels is found exactly, up to half of the image's ``shape``, which is at least 4 x 4. Weaker frequencies than
    ``floor`` times the strongest count less. Between uniform frames there is no motion, with confidence 1.
    """
    cross = now * before.conj()
    size = np.abs(cross)
    if not size.max() > _EPSILON:
        return Motion(0, 0, 1.0)
    surface = np.fft.irfft2(cross / np.maximum(size, floor * size.max()), s=shape)
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
    """For each of R x C patches the previous frame's that shows the same, ``[R C]``; -1 if it was outside the frame.

    The motion is rounded to whole patches, of this height and width [pixels].
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


@cache
def _cosines(size: int) -> Plane:
    """The orthonormal DCT-II, ``[size, size]``."""
    step = np.arange(size)
    matrix = np.sqrt(2.0 / size) * np.cos(np.pi * np.outer(step, step + 0.5) / size)
    matrix[0] /= np.sqrt(2.0)
    return np.asarray(matrix)


def spectral_entropy(values: Spectrum) -> float:
    """``-sum_u p_u log p_u / log(bins)`` with ``p_u = |F_u|^2 / sum |F|^2``, in [0, 1], of a :func:`spectrum`."""
    power = np.square(values.real) + np.square(values.imag)
    total = power.sum()
    if not total > _EPSILON:
        return 0.0
    share = power[power > 0.0] / total
    return float(-(share * np.log(share)).sum() / np.log(power.size - 1))


def reuse_budget(entropy: float, least: float, most: float) -> float:
    """``B = B_min + (B_max - B_min) (1 - H)``: the share of tokens that may be reused."""
    return least + (most - least) * (1.0 - entropy)


def reused(sources: NDArray[np.int64], rank: Plane, budget: float, refreshed: float) -> NDArray[np.bool_]:
    """Which of P patches reuse a token, bool ``[P]``: the lowest-ranked ones in the overlap, within the budget.

    The overlap is where ``sources``, see :func:`source_patches`, is not -1. Of all patches the share ``budget`` may be
    reused, and the share ``refreshed``, q, with the highest rank never is.
    """
    count = len(rank)
    order = np.argsort(rank, kind="stable")[: count - round(refreshed * count)]
    mask = np.zeros(count, np.bool_)
    mask[order[sources[order] >= 0][: round(budget * count)]] = True
    return mask


@dataclass(frozen=True)
class Patches:
    """The tokens of one camera's frame, one for each patch, row by row; ``first`` is their index in the prefix."""

    first: int
    rows: int
    columns: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns


@dataclass(frozen=True)
class RefreshSpec:
    """The target that a refresh was made for: the fingerprint of its bundle, and its cameras' tokens, by name."""

    target: str
    cameras: Mapping[str, Patches]


@dataclass(frozen=True)
class RefreshBundle(Bundle[RefreshSpec]):
    """The network that recomputes the prefix for some tokens; the others keep keys and values of an earlier cache."""

    network: Network

    def refreshed(self, tokens: Array, sources: NDArray[np.int64], held: Array) -> Array:
        """The new cache ``[1, L, 2, heads, N, W / heads]`` from all tokens of the window ``[1, N, W]`` and the old one.

        ``sources`` are, for each position, the position of the old cache whose keys and values it reuses, or -1 to
        recompute them, int64 ``[N]``. In every layer the recomputed tokens attend to the whole new cache.
        """
        (recomputed,) = np.nonzero(sources < 0)
        if not len(recomputed):
            return np.ascontiguousarray(held[..., sources, :])
        # For the network, source N + k is the k-th of the recomputed tokens.
        rows = sources.copy()
        rows[recomputed] = len(sources) + np.arange(len(recomputed))
        return self.network.run({"tokens": tokens[:, recomputed], "sources": rows, "held": held})[0]


def load_refresh(path: Path, target: FlowBundle, *, compute: Compute = CPU) -> RefreshBundle:
    """The refresh of a target's prefix; BundleError if a part is missing or damaged, or was made for another target."""
    repair = "make it again with specact export --refresh"
    bundle = open_bundle(path, "freqcache", RefreshSpec, REFRESH_PARTS)
    check_made_for(bundle, target, bundle.spec.target, repair)
    whole = (1, *target.networks.cache([target.spec.observation.zeros()]).shape[1:])
    fields, tokens = target.spec.observation.fields, whole[4]
    for name, patches in bundle.spec.cameras.items():
        fits = name in fields and fields[name].is_image and fields[name].history <= 1
        grid = min(patches.grid) >= 1 and 0 <= patches.first <= tokens - patches.rows * patches.columns
        if not fits or not grid or fields[name].shape[0] % patches.rows or fields[name].shape[1] % patches.columns:
            raise BundleError(
                f"{path} says that {name} gives {patches} of {tokens} tokens, which {target.name} does not have; "
                f"{repair}"
            )
    inputs = {"tokens": (1, "tokens", whole[3] * whole[5]), "sources": (tokens,), "held": whole}
    network = Network(bundle.files["refresh"], inputs, {"cache": whole}, compute, repair=repair)
    return RefreshBundle(path, bundle.manifest, bundle.spec, bundle.files, network)


@dataclass(frozen=True)
class Reuse:
    """Which tokens are reused.

    Attributes:
        least, most: bounds of the budget, the share of a camera's tokens that may be reused, in [0, 1].
        refreshed: q, the share of a camera's tokens that is always recomputed, in [0, 1].
        confidence: minimum confidence of the motion estimate; below it all of a camera's tokens are recomputed. In
            smooth synthetic scenes no motion that was off by more than 2 pixels reached it.

    Raises:
        ConfigError: for a number out of range.
    """

    least: Share = 0.3
    most: Share = 0.7
    refreshed: Share = 0.2
    confidence: NotNegative = 1.5

    def __post_init__(self) -> None:
        check_fields(self)
        if self.least > self.most:
            raise ConfigError(f"least must be at most most, got {self.least} and {self.most}")


@dataclass(frozen=True)
class Frame:
    """A camera's frame: its :func:`luma`, and the :func:`spectrum` of that :func:`windowed`."""

    luma: Plane
    spectrum: Spectrum


class FreqCached:
    """The prefix cache of one robot, in its own process: a server answers many robots and keeps no state.

    Attributes:
        motions, masks: of the last cache, by camera: the motion estimate, and which of its P tokens were reused,
            ``[P]``; empty if all of it was computed.
    """

    def __init__(self, networks: FlowNetworks, refresh: RefreshBundle, reuse: Reuse) -> None:
        self._networks, self._refresh, self.reuse = networks, refresh, reuse
        self.reset()

    def reset(self) -> None:
        """Starts an episode with an empty cache."""
        self._frames: dict[str, Frame] = {}
        self._cache: Array | None = None
        self.motions: dict[str, Motion] = {}
        self.masks: dict[str, NDArray[np.bool_]] = {}

    def cache(self, window: Window, tokens: Array | None = None) -> Array:
        """The prefix cache of the robot's next window, given its tokens if they are computed already."""
        tokens = self._networks.tokens([window]) if tokens is None else tokens
        before, cameras = self._frames, self._refresh.spec.cameras
        self._frames = {name: _frame(window[name]) for name in cameras}
        if self._cache is None:
            self._cache = self._networks.cache([window], tokens)
            return self._cache
        sources, masks = np.full(tokens.shape[1], -1), {}
        self.motions = {name: self.motion(before[name], self._frames[name]) for name in cameras}
        for name, patches in cameras.items():
            moved, masks[name] = self._reusable(name, before[name], self._frames[name])
            sources[patches.first + np.arange(len(moved))] = np.where(masks[name], patches.first + moved, -1)
        self.masks = masks
        self._cache = self._refresh.refreshed(tokens, sources, self._cache)
        return self._cache

    def motion(self, before: Frame, now: Frame) -> Motion:
        """The motion estimate between two frames."""
        return phase_correlation(before.spectrum, now.spectrum, now.luma.shape)

    def rank(self, name: str, before: Frame, now: Frame, sources: NDArray[np.int64]) -> Plane:
        """Of each of a camera's patches; the highest are recomputed first, see :func:`reused`."""
        return edge_energy(patches_of(now.luma, self._refresh.spec.cameras[name].grid))

    def _reusable(self, name: str, before: Frame, now: Frame) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """For each patch its source in the last frame, and whether it is reused."""
        reuse, grid, shape = self.reuse, self._refresh.spec.cameras[name].grid, now.luma.shape
        motion = self.motions[name]
        sources = source_patches(motion, (shape[0] // grid[0], shape[1] // grid[1]), grid)
        if motion.confidence < reuse.confidence:
            return sources, np.zeros(len(sources), np.bool_)
        budget = reuse_budget(spectral_entropy(spectrum(now.luma)), reuse.least, reuse.most)
        return sources, reused(sources, self.rank(name, before, now, sources), budget, reuse.refreshed)


def _frame(seen: NDArray[np.uint8]) -> Frame:
    """Of ``[H, W, 3]``, or of the last of ``[T, H, W, 3]``."""
    plane = luma(seen.reshape(-1, *seen.shape[-3:])[-1])
    return Frame(plane, spectrum(windowed(plane)))


@dataclass(frozen=True)
class ReusingRounds(Rounds):
    """Full rounds on a :class:`FreqCached` prefix."""

    reuse: Reuse = Reuse()
    local: ClassVar[bool] = True

    def verifier(self, parts: FlowParts, target: Target[RoundAnswer]) -> ReusingVerifier:
        if parts.refresh is None:
            raise ConfigError(
                "these rounds compute a part of the prefix again, and this target has no network for that; make one: "
                "specact export --refresh"
            )
        return ReusingVerifier(target, parts, self.cached(parts.policy.networks, parts.refresh))

    def cached(self, networks: FlowNetworks, refresh: RefreshBundle) -> FreqCached:
        """A robot's prefix cache."""
        return FreqCached(networks, refresh, self.reuse)


class ReusingVerifier(FlashVerifier):
    """Computes the rounds of one robot on its prefix cache, which is empty at the start of an episode."""

    def __init__(self, target: Target[RoundAnswer], parts: FlowParts, cached: FreqCached) -> None:
        super().__init__(target, parts)
        self._cached = cached
        self._last: StepAddress | None = None

    def judge(self, answer: Answer[RoundAnswer], proposal: Proposal, address: StepAddress) -> Outcome:
        if self._last is None or address[:3] != self._last[:3] or address.step < self._last.step:
            self._cached.reset()
        self._last = address
        cache = self._cached.cache(answer.value.window)
        result = replace(answer.value, cache=cache).round(proposal.evidence)
        return replace(result, reused=self._cached.masks).outcome(self.parts, answer.times)
