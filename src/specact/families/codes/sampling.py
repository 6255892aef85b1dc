"""Exact speculative sampling over action codes (Leviathan et al. 2023; ADAHI, equations 7 and 8).

A code ``z ~ q`` is accepted with probability ``min(1, p(z) / q(z))``; otherwise another is drawn from the residual
``norm(max(p - q, 0))``. The result is distributed as ``p``, whatever ``p`` and ``q`` are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from specact.types import Chunk, Codes, Floats, OffloadTimes, Origin, Outcome, all_from, value

# Probabilities ``[K]`` of one codebook; for so few, a list is several times faster than an array.
Row = list[float]
_MAX_UNIFORM = 1.0 - 2.0**-52


@value
class CodeDistribution:
    """A policy's output: a distribution over action codes, and an offset for each code.

    Attributes:
        probs: ``[G, K]``, every row a distribution over the K codes of one of G codebooks. With a sequential
            secondary head row 1 is the marginal over the primary codes.
        offsets: float32 ``[G, K, n, A]``, in normalised action units; the offsets of the chosen codes are summed.
        conditional: ``[K, K]``, row i the distribution of the secondary code given primary code i, or None if the
            codebooks are independent.
    """

    probs: Floats
    offsets: NDArray[np.float32]
    conditional: Floats | None = None

    def rows_given(self, codes: Codes) -> Floats:
        """The rows ``[G, K]`` that verification compares: a sequential secondary's is the one given the first code."""
        if self.conditional is None:
            return self.probs
        return np.stack([self.probs[0], self.conditional[codes[0]]])


@value
class Verdict:
    """The outcome of verifying one step's codes, and the evidence of an outcome.

    Attributes:
        codes: final codes, ``[G]``.
        accepted: whether each codebook kept the draft's code, bool ``[G]``.
        rejection: ``r_k(z_k) = 1 - min(1, p_k(z_k) / q_k(z_k))`` of each drafted code, ``[G]``, in [0, 1].
        target: the target's distribution; None if the server verified.
    """

    codes: Codes
    accepted: NDArray[np.bool_]
    rejection: Floats
    target: CodeDistribution | None = None


@value
class Drafted:
    """Evidence of a proposal: the draft's distribution, and the codes sampled from it, ``[G]``."""

    draft: CodeDistribution
    codes: Codes


def softmax(logits: Floats, temperature: float = 1.0) -> Floats:
    """``exp(l / T) / sum exp(l / T)`` over the last axis (ADAHI, equation 2), in double precision.

    Args:
        logits: ``[..., K]``.
        temperature: T > 0; must be the same for draft and target, or the output distribution is not the target's.
    """
    weights: Floats = np.array(logits, np.float64)
    if temperature != 1.0:
        weights /= temperature
    # On small arrays ufunc.reduce takes half the time of the array method.
    weights -= np.maximum.reduce(weights, axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= np.add.reduce(weights, axis=-1, keepdims=True)
    return weights


def residual(target_probs: Floats, draft_probs: Floats) -> Floats:
    """``norm(max(p - q, 0))``: the distribution that replaces a rejected code, ``[..., K]``.

    For ``p == q`` no code can be rejected and the residual is undefined; ``p`` is returned.
    """
    excess = np.maximum(np.subtract(target_probs, draft_probs), 0.0)
    mass = np.add.reduce(excess, axis=-1, keepdims=True)
    normalised: Floats = np.divide(excess, mass, out=np.array(target_probs, dtype=np.float64), where=mass > 0.0)
    return normalised


def total_variation(p: Floats, q: Floats) -> Floats:
    """``TV(p, q) = 1/2 sum |p - q|`` over the last axis."""
    return np.asarray(0.5 * np.abs(np.subtract(p, q)).sum(axis=-1))


def rejection_probability(target_probs: Floats, draft_probs: Floats, codes: Codes) -> Floats:
    """``r_k(z_k) = 1 - min(1, p_k(z_k) / q_k(z_k))`` (ADAHI, equation 8, given the code).

    Args:
        target_probs, draft_probs: ``[..., G, K]``.
        codes: ``[..., G]``.

    Returns:
        ``[..., G]`` in [0, 1]. A code with ``q = 0``, which is never sampled from q, is accepted if ``p > 0``.
    """
    codes = np.asarray(codes)
    p, q = (
        np.take_along_axis(np.asarray(probs), codes[..., None], -1)[..., 0] for probs in (target_probs, draft_probs)
    )
    kept = np.divide(p, q, out=(p > 0.0).astype(np.float64), where=q > 0.0)
    return np.asarray(1.0 - np.minimum(kept, 1.0))


def sample(probs: Floats, uniforms: Floats | float) -> Codes:
    """Inverse-CDF sampling: the code whose interval of the cumulative distribution holds the uniform.

    Args:
        probs: ``[..., K]``; rows need not sum to 1.
        uniforms: ``[...]`` in [0, 1).

    Returns:
        codes ``[...]``; one with probability 0 is never returned.
    """
    cumulative = np.cumsum(probs, axis=-1)
    # Scaled by the last entry and kept below it, so that rounding cannot exceed the last code.
    height = np.minimum(uniforms, _MAX_UNIFORM) * cumulative[..., -1]
    return np.asarray((cumulative <= height[..., None]).sum(axis=-1))


def sample_codes(distribution: CodeDistribution, rng: np.random.Generator) -> Codes:
    """Samples one code per codebook, ``[G]``; a sequential secondary is sampled given the primary."""
    rows = distribution.probs.tolist()
    uniforms = rng.random(len(rows)).tolist()
    codes = list(map(_sample, rows, uniforms))
    if distribution.conditional is not None:
        codes[1] = _sample(distribution.conditional[codes[0]].tolist(), uniforms[1])
    return np.array(codes)


def verify(target: CodeDistribution, draft: CodeDistribution, codes: Codes, rng: np.random.Generator) -> Verdict:
    """Accepts or replaces each drafted code so that the result is distributed as the target (ADAHI, equation 7).

    Codebooks are independent given the observation: each is verified alone. A sequential secondary was drafted given
    the drafted primary: both conditionals at that primary are compared, and if it is replaced, the secondary is sampled
    from the target's conditional. Always consumes ``2 G`` uniforms, a test and a redraw for each codebook, so that the
    random streams of different methods stay aligned.

    Raises:
        ValueError: if the two distributions do not have the same form, or a code is outside ``[0, K)``.
    """
    shape, drafted = target.probs.shape, codes.tolist()
    if len(shape) != 2 or draft.probs.shape != shape or codes.shape != shape[:1]:
        raise ValueError(f"expected probs [G, K] and codes [G]; got {shape}, {draft.probs.shape} and {codes.shape}")
    if (target.conditional is None) != (draft.conditional is None):
        raise ValueError("only one of draft and target has a sequential secondary head; both or neither must have one")
    if min(drafted) < 0 or max(drafted) >= shape[1]:
        raise ValueError(f"codes must lie in [0, {shape[1]}), got {drafted}")
    p, q = target.rows_given(codes).tolist(), draft.rows_given(codes).tolist()
    test, redraw = rng.random((2, len(drafted))).tolist()
    verified = list(map(_verify, p, q, drafted, test, redraw))
    if target.conditional is not None and not verified[0][1]:
        verified[1] = _sample(target.conditional[verified[0][0]].tolist(), redraw[1]), False, verified[1][2]
    final, accepted, rejection = zip(*verified, strict=True)
    return Verdict(np.array(final), np.array(accepted), np.array(rejection), target)


def code_outcome(verdict: Verdict, actions: Chunk, times: OffloadTimes) -> Outcome:
    """A verdict as an outcome; its origin is ACCEPTED if every code was accepted, else REPLACED.

    All codes are kept with the probability ``prod_k (1 - r_k(z_k))``.
    """
    accepted, kept = verdict.accepted.tolist(), (1.0 - verdict.rejection).tolist()
    origins = all_from(Origin.ACCEPTED if all(accepted) else Origin.REPLACED, len(actions))
    return Outcome(actions, origins, len(accepted), sum(accepted), times, verdict, math.prod(kept))


def _sample(probs: Row, uniform: float) -> int:
    """:func:`sample` of one codebook."""
    cumulative = list(accumulate(probs))
    height = min(uniform, _MAX_UNIFORM) * cumulative[-1]
    # Probabilities that are not finite yield code 0; its action is not finite, either.
    return 0 if math.isnan(height) else bisect_right(cumulative, height)


def _verify(p: Row, q: Row, code: int, test: float, redraw: float) -> tuple[int, bool, float]:
    """Final code of one codebook, whether the drafted one was accepted, and ``r(z)``."""
    rejection = 1.0 - min(1.0, p[code] / q[code] if q[code] > 0.0 else float(p[code] > 0.0))
    if test >= rejection:
        return code, True, rejection
    excess = [wanted - offered if wanted > offered else 0.0 for wanted, offered in zip(p, q, strict=True)]
    return _sample(excess if sum(excess) > 0.0 else p, redraw), False, rejection
