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
from specact.tised.timing import chunk_s, task_s
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
    where, found = _as_curve(settings, values)
    conditions = _difference_conditions(np.diff(found), best)
    return _pick(where, found, [int(np.argmin(losses(found, best)))], best, conditions)


def _pick(
    where: Floats, values: Floats, candidates: Sequence[int], best: Best, conditions: tuple[float, float]
) -> Optimum:
    """The best of the candidates, the first one on a tie.

    Args:
        where, values: the curve, ``[S]``, including both ends.
        candidates: ascending indices into it.
        best: whether to minimise or maximise.
        conditions: see :class:`Optimum`.
    """
    loss = losses(values, best)
    end = float(min(loss[0], loss[-1]))
    chosen = min(candidates, key=lambda i: float(loss[i]))
    return Optimum(
        where=float(where[chosen]),
        value=float(values[chosen]),
        interior=bool(end - loss[chosen] > _ROUNDING * abs(end)),
        conditions=conditions,
        others=tuple(float(where[i]) for i in candidates if i != chosen),
    )


def _difference_conditions(steps: Floats, best: Best) -> tuple[float, float]:
    """The two differences of condition (14) or (20): the first, and the largest or smallest."""
    if not len(steps):
        return float("nan"), float("nan")
    return float(steps[0]), float(steps.max() if best == "least" else steps.min())


def losses(values: Floats, best: Best) -> Floats:
    """The values, negated for a maximum, so that the best one is the smallest."""
    return values if best == "least" else -values


def _as_curve(settings: ArrayLike, values: ArrayLike) -> tuple[Floats, Floats]:
    """Settings and values as checked float64 arrays ``[S]``.

    Raises:
        ConfigError: for arrays that do not fit together, or values that are not finite.
    """
    where, found = np.asarray(settings, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if where.ndim != 1 or where.shape != found.shape or not len(where):
        raise ConfigError(
            f"a curve needs one value per setting and at least one of them; got the shapes {where.shape} and "
            f"{found.shape}"
        )
    if not np.isfinite(found).all():
        missing = ", ".join(f"{setting:g}" for setting in where[~np.isfinite(found)])
        raise ConfigError(f"a curve's values must be finite; they are not at {missing}. Leave these settings out")
    return where, found


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
        inference_s: T_inf >= 0 [s].
        action_s: T_act > 0 [s].
        actions: n >= 1.

    Raises:
        ConfigError: for values outside their ranges.
    """
    depths = np.arange(np.size(chunks))
    each = chunk_s(inference_s, action_s, actions, overlap=depths)
    return _best_depth(task_s(chunks, each), sum(task_time_steps(chunks, each)), "least")


def _best_depth(values: Floats, steps: Floats | int, best: Best) -> Optimum:
    """The best of the depths 0..M whose differences ``steps`` ``[M]`` change sign there."""
    where, values = _as_curve(np.arange(len(values)), values)
    differences = np.asarray(steps, dtype=np.float64)
    gains = losses(differences, best) < 0.0
    # A local optimum: the step to it is a gain, the step beyond it is not.
    candidates = np.flatnonzero(np.append(True, gains) & ~np.append(gains, False))
    return _pick(where, values, candidates.tolist(), best, _difference_conditions(differences, best))
