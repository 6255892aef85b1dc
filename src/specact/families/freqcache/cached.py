"""A flow policy's parts that keep the prefix cache of one robot, and compute only a part of it again."""

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
        cameras: whose tokens may be; empty for all of them.
        least, most: of the budget, the share of a camera's tokens that may be reused.
        refreshed: q, the share of a camera's tokens that is computed again in any case.
        confidence: of the motion; below it all of a camera's tokens are computed again.
        remaps: whether tokens move with the picture; else the picture is taken to stand still.
        first: which tokens are computed again first: those with the most energy at high frequencies, those whose
            patch changed most, those that were computed longest ago, or any.

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
    """What became of one camera's tokens.

    Attributes:
        motion: of the picture.
        mask: ``[P]``, the tokens that were reused.
    """

    motion: Motion
    mask: NDArray[np.bool_]


@dataclass(frozen=True)
class _Frame:
    luma: Plane

    @classmethod
    def of(cls, seen: NDArray[np.uint8]) -> _Frame:
        """The newest of some frames ``[T, H, W, 3]``, or the only one ``[H, W, 3]``."""
        return cls(luma(seen if seen.ndim == 3 else seen[-1]))

    @cached_property
    def spectrum(self) -> Spectrum:
        return spectrum(self.luma)


class FreqCached:
    """See :class:`~specact.families.chunks.flow.FlowParts`; the cache is that of one robot, from window to window.

    It belongs where the robot is known, on the device or in its process: a server answers many robots and keeps nothing
    of them. Tokens that are no camera's are computed again every time, and those of a camera that are reused keep the
    keys and values that they had when they were last computed, with the place that they had then.

    Args:
        networks: of the policy.
        made: for it.
        how: which tokens are reused.
        seed: of a random choice.

    Attributes:
        last: of the last cache, what became of each camera's tokens; empty where all of it was computed.

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
        """Of the cameras' tokens, those that were reused in the last cache."""
        masks = [found.mask for found in self.last.values()]
        return float(np.concatenate(masks).mean()) if masks else 0.0

    def reset(self) -> None:
        """Forgets the robot: an episode begins."""
        self._frames: dict[str, _Frame] = {}
        self._cache: Array | None = None
        # Of each place, how often its token was reused since it was computed.
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
    """The cache ``[1, L, 2, heads, N, W / heads]`` with some places reused.

    Args:
        refresh: of the policy.
        tokens: ``[1, N, W]``, all of the window's.
        sources: ``[N]``: of each place the one whose keys and values it takes over; -1 to compute them again.
        cache: the old cache.
    """
    (again,) = np.nonzero(sources < 0)
    count = len(sources)
    if not len(again):
        return np.ascontiguousarray(cache[..., sources, :])
    from_where = sources.copy()
    from_where[again] = count + np.arange(len(again))
    return refresh.cache(np.ascontiguousarray(tokens[:, again]), from_where, cache)
