"""A flow policy's networks with the prefix cache of one robot, of which only a part is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.families.chunks.flow import Array, FlowParts
from specact.families.freqcache.bundle import Patches, Refresh, RefreshBundle
from specact.families.freqcache.frequency import (
    NO_MOTION,
    Motion,
    Plane,
    Spectrum,
    edge_energy,
    luma,
    patches_of,
    phase_correlation,
    reuse_budget,
    reused,
    source_patches,
    spectral_entropy,
    spectrum,
)
from specact.observation import Window
from specact.ranges import NOT_NEGATIVE, SHARE, check_ranges
from specact.rng import Role, stream


@dataclass(frozen=True)
class Reuse:
    """Which tokens are reused.

    Attributes:
        cameras: names of the cameras whose tokens may be reused; empty for all.
        least, most: bounds of the budget, the share of a camera's tokens that may be reused, in [0, 1].
        refreshed: q, the share of a camera's tokens that is always recomputed, in [0, 1].
        confidence: minimum confidence of the motion estimate; below it all of a camera's tokens are recomputed.
        remaps: whether tokens move with the estimated motion; otherwise none is assumed.
        first: which tokens are recomputed first: those with the most energy at high frequencies (``edges``), those
            whose patch changed most, those that were computed longest ago, or random ones.

    Raises:
        ConfigError: for a number out of range.
    """

    cameras: tuple[str, ...] = ()
    least: float = 0.3
    most: float = 0.7
    refreshed: float = 0.2
    confidence: float = 1.5
    remaps: bool = True
    first: Literal["edges", "changed", "oldest", "random"] = "edges"

    def __post_init__(self) -> None:
        check_ranges(self, dict.fromkeys(("least", "most", "refreshed"), SHARE) | {"confidence": NOT_NEGATIVE})
        if self.least > self.most:
            raise ConfigError(f"least must be at most most, got {self.least} and {self.most}")


@dataclass(frozen=True)
class Reused:
    """The reused tokens of one camera.

    Attributes:
        motion: estimated motion of the image.
        mask: whether each of the P tokens was reused, ``[P]``.
    """

    motion: Motion
    mask: NDArray[np.bool_]


@dataclass(frozen=True)
class _Frame:
    luma: Plane

    @classmethod
    def of(cls, seen: NDArray[np.uint8]) -> _Frame:
        """The last of several frames ``[T, H, W, 3]``, or a single one ``[H, W, 3]``."""
        return cls(luma(seen if seen.ndim == 3 else seen[-1]))

    @cached_property
    def spectrum(self) -> Spectrum:
        return spectrum(self.luma)


class FreqCached:
    """See :class:`~specact.families.chunks.flow.FlowParts`; stateful, with the prefix cache of one robot.

    It runs in the robot's own process: a server answers many robots and keeps no state. Tokens that are not a camera's
    are recomputed every time. Reused tokens keep the keys and values of their last computation, with the position
    encoding of that time.

    Args:
        networks: of the policy.
        made: the refresh of the same policy.
        how: which tokens are reused.
        seed: of the random choice of tokens.

    Attributes:
        last: the reused tokens of the last cache, by camera; empty if all of it was computed.

    Raises:
        ConfigError: for a camera that the policy does not have.
    """

    def __init__(self, networks: FlowParts, made: RefreshBundle, how: Reuse, seed: int = 0) -> None:
        unknown = [name for name in how.cameras if name not in made.cameras]
        if unknown:
            raise ConfigError(f"this policy has no camera {', '.join(unknown)}; it has {', '.join(made.cameras)}")
        self._networks, self._refresh, self._reuse, self._seed = networks, made.refresh, how, seed
        self._cameras = {name: made.cameras[name] for name in how.cameras or made.cameras}
        self.reset()

    @property
    def share(self) -> float:
        """Share of the cameras' tokens that were reused in the last cache, in [0, 1]."""
        masks = [found.mask for found in self.last.values()]
        return float(np.concatenate(masks).mean()) if masks else 0.0

    def reset(self) -> None:
        """Starts an episode with an empty cache."""
        self._frames: dict[str, _Frame] = {}
        self._cache: Array | None = None
        # How often the token at each position was reused since it was computed.
        self._ages = {name: np.zeros(patches.rows * patches.columns) for name, patches in self._cameras.items()}
        self._rng = stream(self._seed, Role.VERIFY)
        self.last: dict[str, Reused] = {}

    def tokens(self, windows: Sequence[Window]) -> Array:
        """See :class:`~specact.families.chunks.flow.FlowParts`."""
        return self._networks.tokens(windows)

    def cache(self, windows: Sequence[Window], tokens: Array | None = None) -> Array:
        """See :class:`~specact.families.chunks.flow.FlowParts`; of the robot's next window.

        Raises:
            ConfigError: for more than one window.
        """
        if len(windows) != 1:
            raise ConfigError(f"the cache is that of one robot, got {len(windows)} windows; use the policy's own parts")
        read = self._networks.tokens(windows) if tokens is None else tokens
        frames = {name: _Frame.of(windows[0][name]) for name in self._cameras}
        old, before = self._cache, self._frames
        self._frames, self.last, ages = frames, {}, self._ages
        self._ages = dict(ages)
        if old is None:
            self._cache = self._networks.cache(windows, read)
            return self._cache
        sources = np.full(read.shape[1], -1)
        for name, patches in self._cameras.items():
            found, earlier = self._reusable(before[name], frames[name], patches, ages[name])
            self.last[name] = found
            self._ages[name] = np.where(found.mask, ages[name][earlier] + 1.0, 0.0)
            places = patches.first + np.arange(len(earlier))
            sources[places] = np.where(found.mask, patches.first + earlier, -1)
        self._cache = refreshed(self._refresh, read, sources, old)
        return self._cache

    def velocity(self, chunks: Array, times: Array, cache: Array) -> Array:
        """See :class:`~specact.families.chunks.flow.FlowParts`."""
        return self._networks.velocity(chunks, times, cache)

    def guide(self, chunk: Array, time: Array, cache: Array, wanted: Array, weights: Array) -> tuple[Array, Array]:
        """See :class:`~specact.families.chunks.flow.FlowParts`."""
        return self._networks.guide(chunk, time, cache, wanted, weights)

    def _reusable(self, before: _Frame, now: _Frame, patches: Patches, ages: Plane) -> tuple[Reused, NDArray[np.int64]]:
        how, grid, shape = self._reuse, patches.grid, now.luma.shape
        size = shape[0] // grid[0], shape[1] // grid[1]
        motion = phase_correlation(before.spectrum, now.spectrum, shape) if how.remaps else NO_MOTION
        earlier = source_patches(motion, size, grid)
        if motion.confidence < how.confidence:
            return Reused(motion, np.zeros(len(earlier), np.bool_)), earlier
        budget = how.most
        if how.least < how.most:
            budget = reuse_budget(spectral_entropy(now.spectrum), how.least, how.most)
        rank = ages[earlier] if how.first == "oldest" else self._rank(before.luma, now.luma, earlier, grid)
        return Reused(motion, reused(earlier, rank, budget, how.refreshed)), earlier

    def _rank(self, before: Plane, now: Plane, earlier: NDArray[np.int64], grid: tuple[int, int]) -> Plane:
        if self._reuse.first == "random":
            return self._rng.random(len(earlier))
        there = patches_of(now, grid)
        if self._reuse.first == "edges":
            return edge_energy(there)
        return np.asarray(np.abs(there - patches_of(before, grid)[earlier]).mean(axis=(1, 2)))


def refreshed(refresh: Refresh, tokens: Array, sources: NDArray[np.int64], cache: Array) -> Array:
    """The cache ``[1, L, 2, heads, N, W / heads]`` with some positions reused.

    Args:
        refresh: of the policy.
        tokens: all tokens of the window, ``[1, N, W]``.
        sources: for each position, the position of the old cache whose keys and values it reuses; -1 to recompute
            them, ``[N]``.
        cache: the old cache.
    """
    (recomputed,) = np.nonzero(sources < 0)
    if not len(recomputed):
        return np.ascontiguousarray(cache[..., sources, :])
    rows = sources.copy()
    rows[recomputed] = len(sources) + np.arange(len(recomputed))
    return refresh.cache(np.ascontiguousarray(tokens[:, recomputed]), rows, cache)
