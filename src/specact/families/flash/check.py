"""FLASH's check of a drafted chunk by the flow itself, without denoising it (Realtime-VLA FLASH, arXiv 2605.13778).

A drafted chunk is mixed with noise, the expert says in one pass where it would lead, and the drafted actions are
accepted up to the first that is too far from there. The check measures whether the flow leads back to the draft, which
is not whether the draft is right: with little noise, an expert that is smooth accepts anything. How far that goes for
a policy is to be measured, see docs/flash.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Check:
    """How drafted actions are checked.

    Attributes:
        levels: shares of noise s in (0, 1]; the flow's time is 1 - s. All of them are asked in one batch.
        within: delta, root mean square over the dimensions in the flow's units, in which demonstrated actions have
            variance 1; 0 accepts none.
        guarded: whether a change of a gripper ends what is accepted.

    Raises:
        ConfigError: for a number out of range.
    """

    levels: tuple[float, ...] = (0.1, 0.05)
    within: float = 0.15
    guarded: bool = True

    def __post_init__(self) -> None:
        if not self.levels or not all(0.0 < level <= 1.0 for level in self.levels):
            raise ConfigError(f"levels must be one or more shares of noise above 0 and at most 1, got {self.levels}")
        if not self.within >= 0.0:
            raise ConfigError(f"within must be at least 0, got {self.within}")


def noised(drafted: Array, noise: Array, levels: Array) -> Array:
    """``x_s = s eps + (1 - s) x``, ``[K, H, W]``: the drafted chunk ``[H, W]`` under each share of the same noise."""
    share = levels[:, None, None]
    return share * noise + (1.0 - share) * drafted


def implied(chunks: Array, velocities: Array, levels: Array) -> Array:
    """``x^ = x_s + s v(x_s, 1 - s)``: where the flow would lead in a single step, ``[K, H, W]``.

    Args:
        chunks, velocities: ``[K, H, W]``.
        levels: s ``[K]``.
    """
    return chunks + levels[:, None, None] * velocities


def deviations(drafted: Array, estimates: Array, grippers: Sequence[int] = ()) -> Array:
    """Root mean square over the dimensions of a step, ``[K, H]``; grippers do not count.

    Args:
        drafted: ``[H, W]``.
        estimates: see :func:`implied`.
        grippers: dimensions that are left out, unless nothing else is there.
    """
    kept = [dimension for dimension in range(drafted.shape[-1]) if dimension not in grippers]
    missing = (estimates - drafted)[..., kept or slice(None)]
    return np.asarray(np.sqrt(np.square(missing).mean(axis=-1)))


def accepted_length(deviation: Array, within: float) -> int:
    """``min_k sum_h prod_{j <= h} 1[d_kj <= delta]``: actions before the first that any share of noise finds too far.

    Args:
        deviation: ``[K, H]``; what is not a number is too far.
        within: delta; 0 accepts none.
    """
    if within <= 0.0:
        return 0
    beyond = np.flatnonzero(~(deviation <= within).all(axis=0))
    return int(beyond[0]) if beyond.size else deviation.shape[1]


def first_switch(closed: NDArray[np.bool_], held: NDArray[np.bool_] | None) -> int:
    """The first step of a chunk at which a gripper is not as it is held; H where there is none.

    Args:
        closed: of each step and gripper, ``[H, G]``.
        held: of each gripper, ``[G]``; None where nothing has been executed yet, and the chunk's first step counts.
    """
    before = closed[:1] if held is None else held[None]
    switched = np.flatnonzero((closed != before).any(axis=1))
    return int(switched[0]) if switched.size else len(closed)


@dataclass(frozen=True)
class Verdict:
    """What a check made of a chunk.

    Attributes:
        accepted: drafted actions to execute, at most as many as were asked for.
        switches: whether guards ended what is accepted, so that the next round has to be a full one.
        deviation: ``[K, H]``, see :func:`deviations`.
    """

    accepted: int
    switches: bool
    deviation: Array


def judge(
    check: Check,
    drafted: Array,
    estimates: Array,
    grippers: Sequence[int],
    middle: Array,
    held: NDArray[np.bool_] | None,
) -> Verdict:
    """Accepts a prefix of the drafted chunk.

    With guards, nothing is accepted where any estimate moves a gripper, and the prefix ends before the first action
    that moves one.

    Args:
        check: how.
        drafted: ``[n, W]``, the actions that may be executed, in the flow's units.
        estimates: ``[K, n, W]``.
        grippers: dimensions that are grippers, G of them.
        middle: of the grippers, ``[G]``, in the flow's units: above it a gripper is closed.
        held: see :func:`first_switch`.
    """
    deviation = deviations(drafted, estimates, grippers)
    accepted, count = accepted_length(deviation, check.within), len(drafted)
    if not check.guarded or not grippers:
        return Verdict(accepted, False, deviation)
    index = list(grippers)
    if any(first_switch(chunk[:, index] > middle, held) < count for chunk in estimates):
        return Verdict(0, True, deviation)
    switch = first_switch(drafted[:, index] > middle, held)
    return Verdict(min(accepted, switch), switch < accepted, deviation)
