"""The best setting of a lever: what a sweet spot is, and how to find it by looking everywhere.

Settings are given in order of strength, the weakest first, so that a tie goes to the one that loses least. The
conditions of :mod:`~specact.tised.alpha_spots` and :mod:`~specact.tised.overlap_spots` lead to the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from specact.errors import ConfigError
from specact.types import Floats

# Task time is to be least, success to be most.
Best = Literal["least", "most"]

# Share of a value within which two doubles that should be equal may differ.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Optimum:
    """The best setting of a lever.

    Attributes:
        where: the setting: alpha, m, or another lever's strength.
        value: task time [s] or success there.
        interior: whether it is better than both the weakest and the strongest setting, by more than rounding.
        conditions: what the conditions for an interior optimum read. For alpha the slope at alpha = 1 and at the
            strongest lightweighting: a minimum needs the first positive and the second negative (11), a maximum the
            reverse (17). For settings that are counted, the first difference, and the largest (minimum) or smallest
            (maximum) of all: a minimum needs the first negative and the other positive (14), a maximum the reverse
            (20, by analogy). NaN where there is one setting only.
        others: further settings at the bottom of a valley (or on a hill) that are not as good. The conditions promise
            one such place and not the best one, so on a curve with several the best is returned and the rest named.
    """

    where: float
    value: float
    interior: bool
    conditions: tuple[float, float]
    others: tuple[float, ...] = ()


def scan(settings: ArrayLike, values: ArrayLike, best: Best) -> Optimum:
    """The best of all settings, by looking at every one of them.

    Args:
        settings: ``[S]``, the weakest first.
        values: task time (``least``) or success (``most``), ``[S]``.
        best: which way.

    Raises:
        ConfigError: for arrays that do not fit together, or values that are not finite.
    """
    where, found = as_curve(settings, values)
    return pick(where, found, [int(np.argmin(losses(found, best)))], best, ends(np.diff(found), best))


def pick(
    where: Floats, values: Floats, candidates: Sequence[int], best: Best, conditions: tuple[float, float]
) -> Optimum:
    """The best of the candidates, the earliest one on a tie.

    Args:
        where, values: the curve, ``[S]``, its ends among them.
        candidates: places in it, in order.
        best: which way.
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


def ends(steps: Floats, best: Best) -> tuple[float, float]:
    """What condition (14) or (20) reads for these differences: the first one, and the one that turns back most."""
    if not len(steps):
        return float("nan"), float("nan")
    return float(steps[0]), float(steps.max() if best == "least" else steps.min())


def losses(values: Floats, best: Best) -> Floats:
    """The values with the sign that makes the best one the least."""
    return values if best == "least" else -values


def as_curve(settings: ArrayLike, values: ArrayLike) -> tuple[Floats, Floats]:
    """Settings and values as rows of floats, checked.

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
