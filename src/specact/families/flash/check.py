"""FLASH's check of a drafted chunk by the flow itself, without denoising it (Realtime-VLA FLASH, arXiv 2605.13778).

A drafted chunk is mixed with noise, the expert estimates the clean chunk in one pass, and the drafted actions are
accepted up to the first that is too far from the estimate. The check measures whether the flow leads back to the draft,
not whether the draft is correct: with little noise, a smooth expert accepts anything. This has to be measured for each
policy, see docs/flash.md.
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
        levels: noise levels s in (0, 1]; the flow's time is 1 - s. All are evaluated in one batch.
        within: delta, tolerance of the root mean square deviation over the dimensions, in the flow's units, in which
            demonstrated actions have variance 1; 0 accepts none.
        guarded: whether a change of a gripper ends the accepted prefix.

    Raises:
        ConfigError: for a number out of range.
    """

    levels: tuple[float, ...] = (0.1, 0.05)
    within: float = 0.15
    guarded: bool = True

    def __post_init__(self) -> None:
        if not self.levels or not all(0.0 < level <= 1.0 for level in self.levels):
            raise ConfigError(f"levels must be one or more noise levels above 0 and at most 1, got {self.levels}")
        if not self.within >= 0.0:
            raise ConfigError(f"within must be at least 0, got {self.within}")


def noised(drafted: Array, noise: Array, levels: Array) -> Array:
    """``x_s = s eps + (1 - s) x``, ``[K, H, W]``: the drafted chunk ``[H, W]`` at each level of the same noise."""
    share = levels[:, None, None]
    return share * noise + (1.0 - share) * drafted


def implied(chunks: Array, velocities: Array, levels: Array) -> Array:
    """``x^ = x_s + s v(x_s, 1 - s)``: the one-step estimate of the clean chunk, ``[K, H, W]``.

    Args:
        chunks, velocities: ``[K, H, W]``.
        levels: s ``[K]``.
    """
    return chunks + levels[:, None, None] * velocities


def deviations(drafted: Array, estimates: Array, grippers: Sequence[int] = ()) -> Array:
    """Root mean square deviation over the dimensions of a step, without grippers, ``[K, H]``.

    Args:
        drafted: ``[H, W]``.
        estimates: see :func:`implied`.
        grippers: excluded dimensions, unless there are no others.
    """
    kept = [dimension for dimension in range(drafted.shape[-1]) if dimension not in grippers]
    missing = (estimates - drafted)[..., kept or slice(None)]
    return np.asarray(np.sqrt(np.square(missing).mean(axis=-1)))


def accepted_length(deviation: Array, within: float) -> int:
    """``min_k sum_h prod_{j <= h} 1[d_kj <= delta]``: actions before the first that is too far at any noise level.

    Args:
        deviation: ``[K, H]``; NaN is too far.
        within: delta; 0 accepts none.
    """
    if within <= 0.0:
        return 0
    beyond = np.flatnonzero(~(deviation <= within).all(axis=0))
    return int(beyond[0]) if beyond.size else deviation.shape[1]


def first_switch(closed: NDArray[np.bool_], held: NDArray[np.bool_] | None) -> int:
    """The first step of a chunk at which a gripper differs from its current state; H if there is none.

    Args:
        closed: of each step and gripper, ``[H, G]``.
        held: current state of each gripper, ``[G]``; None before the first action, for that of the chunk's first step.
    """
    before = closed[:1] if held is None else held[None]
    switched = np.flatnonzero((closed != before).any(axis=1))
    return int(switched[0]) if switched.size else len(closed)


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Attributes:
        accepted: number of drafted actions to execute.
        switches: whether a guard ended the accepted prefix, so that the next round must be a full one.
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

    With guards, nothing is accepted if any estimate moves a gripper, and the prefix ends before the first action that
    moves one.

    Args:
        check: its settings.
        drafted: ``[n, W]``, the actions that may be executed, in the flow's units.
        estimates: ``[K, n, W]``.
        grippers: the G gripper dimensions.
        middle: threshold of each gripper, ``[G]``, in the flow's units: above it a gripper is closed.
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
