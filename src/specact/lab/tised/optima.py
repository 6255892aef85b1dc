"""The best setting of a lever, its sweet spot: by exhaustive search, and by the conditions of its optimum.

Settings are ordered by strength, the weakest first, so that of equally good settings the weakest is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from specact.errors import ConfigError
from specact.lab.tised.timing import chunk_s, task_s
from specact.types import Floats

# Task time is minimised ("least"), success is maximised ("most").
Best = Literal["least", "most"]

# Relative rounding error of values that are equal in exact arithmetic.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Optimum:
    """The best setting of a lever.

    Attributes:
        where: the setting: m, or another lever's strength.
        value: task time [s] or success there.
        interior: whether it is better than both the weakest and the strongest setting, by more than rounding.
        conditions: the first difference, and the largest (minimum) or smallest (maximum) of all. A first value below 0
            and a second above 0 suffice for an interior local minimum (14), the reverse for a maximum (20, by analogy);
            they are not necessary: a curve can dip twice. NaN for a single setting.
        others: the other local optima; empty from :func:`scan`.
    """

    where: float
    value: float
    interior: bool
    conditions: tuple[float, float]
    others: tuple[float, ...] = ()


def scan(settings: ArrayLike, values: ArrayLike, best: Best) -> Optimum:
    """The best of all settings, by exhaustive search.

    Args:
        settings: ``[S]``, the weakest first.
        values: task time [s] (``least``) or success (``most``), ``[S]``.
        best: whether to minimise or maximise.

    Raises:
        ConfigError: for arrays that do not fit together, or values that are not finite.
    """
    where, found = np.asarray(settings, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if where.ndim != 1 or where.shape != found.shape or not len(where) or not np.isfinite(found).all():
        raise ConfigError(f"a curve needs one finite value for each of its settings, got {found} for {where}")
    return _pick(where, found, [int(np.argmin(losses(found, best)))], best, np.diff(found))


def task_time_steps(chunks: ArrayLike, each_s: ArrayLike) -> tuple[Floats, Floats]:
    """``dT(m) = dN(m) T_chunk(m+1) + N(m) dT_chunk(m)`` (13, derived): the effect of one more action.

    Args:
        chunks: N, ``[M + 1]`` at m = 0..M.
        each_s: T_chunk, ``[M + 1]`` [s].

    Returns:
        The two terms, ``[M]`` each [s]: the cost of more chunks, and the gain from shorter ones (at most 0). Their sum
        is exactly the change of task time.
    """
    n, each = np.asarray(chunks, dtype=np.float64), np.asarray(each_s, dtype=np.float64)
    return np.asarray(np.diff(n) * each[1:]), np.asarray(n[:-1] * np.diff(each))


def fastest_overlap(chunks: ArrayLike, inference_s: float, action_s: float, actions: int) -> Optimum:
    """The overlap with the shortest task time, where (13) changes from negative to >= 0 (12 to 14, derived).

    Args:
        chunks: N, ``[M + 1]`` at m = 0..M, M <= n.
        inference_s, action_s, actions: see :mod:`specact.lab.tised.timing` [s].

    Raises:
        ConfigError: for values outside their ranges.
    """
    depths = np.arange(np.size(chunks), dtype=np.float64)
    each = chunk_s(inference_s, action_s, actions, overlap=depths)
    steps = sum(task_time_steps(chunks, each))
    gains = np.asarray(steps) < 0.0
    # A local optimum: the step to it is a gain, the step beyond it is not.
    candidates = np.flatnonzero(np.append(True, gains) & ~np.append(gains, False))
    return _pick(depths, task_s(chunks, each), candidates.tolist(), "least", np.asarray(steps))


def losses(values: Floats, best: Best) -> Floats:
    """The values, negated for a maximum, so that the best one is the smallest."""
    return values if best == "least" else -values


def _pick(where: Floats, values: Floats, candidates: Sequence[int], best: Best, steps: Floats) -> Optimum:
    """The best of the candidates, ascending indices into the curve ``[S]``, the first one on a tie."""
    loss = losses(values, best)
    end = float(min(loss[0], loss[-1]))
    chosen = min(candidates, key=lambda i: float(loss[i]))
    conditions = float("nan"), float("nan")
    if len(steps):
        conditions = float(steps[0]), float(steps.max() if best == "least" else steps.min())
    return Optimum(
        where=float(where[chosen]),
        value=float(values[chosen]),
        interior=bool(end - loss[chosen] > _ROUNDING * abs(end)),
        conditions=conditions,
        others=tuple(float(where[i]) for i in candidates if i != chosen),
    )
