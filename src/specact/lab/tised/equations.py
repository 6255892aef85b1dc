"""The time of a chunk and of a task under two kinds of lever, and the sweet spot of a lever (TISED, equations 1 to 14).

A policy-intrinsic lever reduces the inference time ``T_inf`` to ``alpha T_inf``. An execution-aware lever starts the
next inference ``m`` actions before the chunk ends, so that their execution hides it. The paper treats each alone; here
they can be combined, as a policy of inference time ``alpha T_inf`` with overlap ``m``.

All arguments are ``[...]`` and broadcast, all results are float64 arrays of their common shape, and values outside
their ranges raise :exc:`ConfigError`: ``inference_s``, T_inf >= 0, latency of one full inference [s]; ``action_s``,
T_act > 0, duration of one action [s]; ``actions``, n >= 1, executed per chunk; ``alpha`` in (0, 1], remaining share of
the inference time; ``overlap``, m in 0..n, actions whose execution hides the next inference; ``chunks``, N to
completion, of which a mean over episodes need not be whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError
from specact.types import Floats


def chunk_s(
    inference_s: ArrayLike, action_s: ArrayLike, actions: ArrayLike, alpha: ArrayLike = 1.0, overlap: ArrayLike = 0
) -> Floats:
    """``T_chunk = n T_act + max(0, alpha T_inf - m T_act)`` ``[...]`` [s].

    With ``alpha = 1`` and ``m = 0`` it is T_0, equation (1); with ``m = 0`` equation (2); with ``alpha = 1`` equation
    (3), the same as in VLASH (all three given). The first chunk takes longer, see :func:`exact_task_s`.
    """
    n = _checked("n", actions)
    if np.any(_checked("m", overlap) > n):
        raise ConfigError(f"the overlap must be at most the actions of a chunk, got {np.asarray(overlap)} of {n}")
    return np.asarray(n * _checked("T_act", action_s) + stall_s(inference_s, action_s, alpha, overlap))


def chunk_speedup(
    inference_s: ArrayLike, action_s: ArrayLike, actions: ArrayLike, alpha: ArrayLike = 1.0, overlap: ArrayLike = 0
) -> Floats:
    """``T_0 / T_chunk`` ``[...]`` (2, given), at least 1.

    With ``rho = T_inf / T_act`` it is ``(rho + n) / (alpha rho + n)`` and ``(rho + n) / (rho + n - min(rho, m))``, and
    never above ``(rho + n) / n``: no lever shortens the actions (8, derived).
    """
    return np.asarray(chunk_s(inference_s, action_s, actions) / chunk_s(inference_s, action_s, actions, alpha, overlap))


def task_s(chunks: ArrayLike, each_s: ArrayLike) -> Floats:
    """``T_task = N T_chunk`` ``[...]`` [s] (4, given)."""
    return np.asarray(_checked("N", chunks) * _checked("T_chunk", each_s))


def exact_task_s(
    chunks: ArrayLike, inference_s: ArrayLike, action_s: ArrayLike, actions: ArrayLike, alpha: ArrayLike = 1.0,
    overlap: ArrayLike = 0,
) -> Floats:  # fmt: skip
    """``T_task = N T_chunk + min(alpha T_inf, m T_act)`` ``[...]`` [s] (4, exact form, derived).

    The first inference cannot be hidden, so overlap saves time ``N - 1`` times instead of ``N`` times.
    """
    chunk = chunk_s(inference_s, action_s, actions, alpha, overlap)
    hidden = np.minimum(*_sides(inference_s, action_s, alpha, overlap))
    return np.asarray(task_s(_checked("N > 0", chunks), chunk) + hidden)


def stall_s(inference_s: ArrayLike, action_s: ArrayLike, alpha: ArrayLike = 1.0, overlap: ArrayLike = 0) -> Floats:
    """``tau = max(0, alpha T_inf - m T_act)`` ``[...]`` [s]: how long the robot waits for a chunk (6, derived).

    This is not the age of the chunk's observation, see :func:`age_s`.
    """
    inference, hiding = _sides(inference_s, action_s, alpha, overlap)
    return np.asarray(np.maximum(0.0, inference - hiding))


def age_s(inference_s: ArrayLike, action_s: ArrayLike, alpha: ArrayLike = 1.0, overlap: ArrayLike = 0) -> Floats:
    """``max(alpha T_inf, m T_act)`` ``[...]`` [s]: age of a chunk's observation when its first action starts (derived).

    Deeper overlap shortens the stall and makes the observation older; the two are equal only without overlap.
    """
    return np.asarray(np.maximum(*_sides(inference_s, action_s, alpha, overlap)))


@dataclass(frozen=True)
class Decomposition:
    """The speedup of a task as a product: fewer chunks times faster chunks (5, given).

    Attributes:
        chunk_speedup: ``T_chunk,0 / T_chunk``; above 1 each chunk is faster.
        chunks_ratio: ``N_0 / N``; below 1 the task needs more chunks.
    """

    chunk_speedup: float
    chunks_ratio: float

    @property
    def task_speedup(self) -> float:
        """``(N_0 / N) * chunk speedup``; below 1 the task is slower, with faster chunks the paradox of the paper."""
        return self.chunks_ratio * self.chunk_speedup

    def explain(self) -> str:
        """The decomposition as a sentence, with the growth of N at which the lever breaks even."""
        break_even = f"it breaks even at {self.chunk_speedup:.3f} times as many"
        return (
            f"a chunk is {_times(self.chunk_speedup, 'as fast')} and the task needs "
            f"{_times(1.0 / self.chunks_ratio, 'as many chunks')} ({break_even}): the task is "
            f"{_times(self.task_speedup, 'as fast')}"
        )


def decompose(chunks_before: float, before_s: float, chunks: float, after_s: float) -> Decomposition:
    """Decomposes the speedup of a lever over its baseline (5, given); exact by construction.

    Args:
        chunks_before, before_s: N_0 and T_task,0 [s] of the baseline, means over its successful trials (31, given).
        chunks, after_s: N and T_task [s] with the lever, likewise.
    """
    n_0, n = (float(_checked("N > 0", value)) for value in (chunks_before, chunks))
    t_0, t = (float(_checked("T_task", value)) for value in (before_s, after_s))
    return Decomposition((t_0 / n_0) / (t / n), n_0 / n)


@dataclass(frozen=True)
class Optimum:
    """The best setting of a lever, its sweet spot.

    Attributes:
        where: the setting: m, or another lever's strength.
        value: task time [s] or success there.
        interior: whether it is better than both the weakest and the strongest setting, by more than rounding.
        conditions: the first difference, and the largest (minimum) or smallest (maximum) of all. A first value below 0
            and a second above 0 suffice for an interior local minimum (14), the reverse for a maximum (20, by analogy);
            they are not necessary: a curve can dip twice. NaN for a single setting.
    """

    where: float
    value: float
    interior: bool
    conditions: tuple[float, float]


def optimum(settings: ArrayLike, values: ArrayLike, best: Literal["least", "most"]) -> Optimum:
    """The best of all settings, by exhaustive search; of equally good ones the weakest.

    Args:
        settings: ``[S]``, the weakest first.
        values: task time [s], to be minimised (``least``), or success, to be maximised (``most``), ``[S]``.
        best: which of the two. Differences of task time are those of (13), ``dN(m) T_chunk(m+1) + N(m) dT_chunk(m)``.

    Raises:
        ConfigError: for arrays that do not fit together, or values that are not finite.
    """
    points, curve = np.asarray(settings, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if points.ndim != 1 or points.shape != curve.shape or not len(points) or not np.isfinite(curve).all():
        raise ConfigError(f"a curve needs one finite value for each of its settings, got {curve} for {points}")
    loss, steps = curve if best == "least" else -curve, np.diff(curve)
    chosen, end = int(np.argmin(loss)), float(min(loss[0], loss[-1]))
    conditions = float("nan"), float("nan")
    if len(steps):
        conditions = float(steps[0]), float(steps.max() if best == "least" else steps.min())
    interior = bool(end - loss[chosen] > 1e-12 * abs(end))  # above the rounding error of values that are equal
    return Optimum(float(points[chosen]), float(curve[chosen]), interior, conditions)


def _times(factor: float, what: str) -> str:
    return what if abs(factor - 1.0) < 0.005 else f"{factor:.3f} times {what}"


def _sides(inference_s: ArrayLike, action_s: ArrayLike, alpha: ArrayLike, overlap: ArrayLike) -> tuple[Floats, Floats]:
    """``alpha T_inf``, and ``m T_act``, the time of the actions that hide it [s]."""
    inference = _checked("alpha", alpha) * _checked("T_inf", inference_s)
    return inference, np.asarray(_checked("m", overlap) * _checked("T_act", action_s))


def _whole(values: Floats) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(values) & (values == np.rint(values)))


def _positive(values: Floats) -> NDArray[np.bool_]:
    return np.asarray((values > 0.0) & (values < np.inf))


_RANGES: dict[str, tuple[str, Callable[[Floats], NDArray[np.bool_]]]] = {
    "T_inf": ("the inference time T_inf [s] must be finite and at least 0", lambda s: (s == 0.0) | _positive(s)),
    "T_act": ("the duration of an action T_act [s] must be positive and finite", _positive),
    "T_chunk": ("the time of a chunk [s] must be positive and finite", _positive),
    "T_task": ("the time of a task [s] must be positive and finite", _positive),
    "N": ("the number of chunks N must be finite and at least 0", lambda n: (n == 0.0) | _positive(n)),
    "N > 0": ("the number of chunks N must be positive and finite", _positive),
    "n": ("a chunk must have a whole number of actions, at least 1", lambda n: _whole(n) & (n >= 1.0)),
    "m": ("the overlap must be a whole number of actions, at least 0", lambda m: _whole(m) & (m >= 0.0)),
    "alpha": (
        "alpha, the remaining share of the full inference time, must lie in (0, 1]",
        lambda share: (share > 0.0) & (share <= 1.0),
    ),
}


def _checked(name: str, value: ArrayLike) -> Floats:
    values, (must, allowed) = np.asarray(value, dtype=np.float64), _RANGES[name]
    if not np.all(allowed(values)):
        text = f"{values.item():g}" if values.ndim == 0 else np.array2string(values, threshold=6)
        raise ConfigError(f"{must}, got {text}")
    return values
