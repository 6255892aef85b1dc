"""The time of a chunk and of a task under two kinds of lever (TISED, equations 1 to 6 and 8).

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

import numpy as np
from numpy.typing import ArrayLike

from specact.lab.tised.checks import chunk_actions, inference_ratio, not_negative, overlap_depth, positive
from specact.types import Floats


def relative_latency(inference_s: ArrayLike, action_s: ArrayLike) -> Floats:
    """``rho = T_inf / T_act`` ``[...]``: the number of actions that take as long as one inference."""
    return np.asarray(_latency(inference_s) / _action(action_s))


def chunk_s(
    inference_s: ArrayLike, action_s: ArrayLike, actions: ArrayLike, alpha: ArrayLike = 1.0, overlap: ArrayLike = 0
) -> Floats:
    """``T_chunk = n T_act + max(0, alpha T_inf - m T_act)`` ``[...]`` [s].

    With ``alpha = 1`` and ``m = 0`` it is T_0, equation (1); with ``m = 0`` equation (2); with ``alpha = 1`` equation
    (3), the same as in VLASH (all three given). The first chunk takes longer, see :func:`exact_task_s`.
    """
    n = chunk_actions(actions)
    overlap_depth(overlap, n)
    return np.asarray(n * _action(action_s) + stall_s(inference_s, action_s, alpha, overlap))


def chunk_speedup(
    inference_s: ArrayLike, action_s: ArrayLike, actions: ArrayLike, alpha: ArrayLike = 1.0, overlap: ArrayLike = 0
) -> Floats:
    """``T_0 / T_chunk`` ``[...]`` (2, given), at least 1.

    In terms of rho it is ``(rho + n) / (alpha rho + n)`` and ``(rho + n) / (rho + n - min(rho, m))`` (8, derived).
    """
    return np.asarray(chunk_s(inference_s, action_s, actions) / chunk_s(inference_s, action_s, actions, alpha, overlap))


def speedup_bound(inference_s: ArrayLike, action_s: ArrayLike, actions: ArrayLike) -> Floats:
    """``(rho + n) / n`` ``[...]``, the bound of :func:`chunk_speedup`: no lever shortens the actions (8, derived)."""
    n = chunk_actions(actions)
    return np.asarray((relative_latency(inference_s, action_s) + n) / n)


def task_s(chunks: ArrayLike, each_s: ArrayLike) -> Floats:
    """``T_task = N T_chunk`` ``[...]`` [s] (4, given)."""
    return np.asarray(not_negative("the number of chunks N", chunks) * positive("the time of a chunk [s]", each_s))


def exact_task_s(
    chunks: ArrayLike, inference_s: ArrayLike, action_s: ArrayLike, actions: ArrayLike, alpha: ArrayLike = 1.0,
    overlap: ArrayLike = 0,
) -> Floats:  # fmt: skip
    """``T_task = N T_chunk + min(alpha T_inf, m T_act)`` ``[...]`` [s] (4, exact form, derived).

    The first inference cannot be hidden, so overlap saves time ``N - 1`` times instead of ``N`` times.
    """
    each = chunk_s(inference_s, action_s, actions, alpha, overlap)
    hidden = np.minimum(inference_ratio(alpha) * _latency(inference_s), overlap_depth(overlap) * _action(action_s))
    return np.asarray(task_s(positive("the number of chunks N", chunks), each) + hidden)


def task_speedup(chunks_before: ArrayLike, chunks_after: ArrayLike, each: ArrayLike) -> Floats:
    """``(N_0 / N) * chunk speedup`` ``[...]`` (5, given); below 1 the task is slower with the lever."""
    ratio = positive("the number of chunks N_0", chunks_before) / positive("the number of chunks N", chunks_after)
    return np.asarray(ratio * positive("the speedup of a chunk", each))


def stall_s(inference_s: ArrayLike, action_s: ArrayLike, alpha: ArrayLike = 1.0, overlap: ArrayLike = 0) -> Floats:
    """``tau = max(0, alpha T_inf - m T_act)`` ``[...]`` [s]: how long the robot waits for a chunk (6, derived).

    This is not the age of the chunk's observation, see :func:`age_s`.
    """
    left = inference_ratio(alpha) * _latency(inference_s) - overlap_depth(overlap) * _action(action_s)
    return np.asarray(np.maximum(0.0, left))


def age_s(inference_s: ArrayLike, action_s: ArrayLike, alpha: ArrayLike = 1.0, overlap: ArrayLike = 0) -> Floats:
    """``max(alpha T_inf, m T_act)`` ``[...]`` [s]: age of a chunk's observation when its first action starts (derived).

    Deeper overlap shortens the stall and makes the observation older; the two are equal only without overlap.
    """
    inference = inference_ratio(alpha) * _latency(inference_s)
    return np.asarray(np.maximum(inference, overlap_depth(overlap) * _action(action_s)))


def _latency(inference_s: ArrayLike) -> Floats:
    return not_negative("the inference time T_inf [s]", inference_s)


def _action(action_s: ArrayLike) -> Floats:
    return positive("the duration of an action T_act [s]", action_s)
