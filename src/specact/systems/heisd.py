"""HeiSD (Zheng et al. 2026, arXiv 2603.17573): a memory of the target's chunks drafts where the robot moves fast.

For an observation with feature f (the mean of the target encoder's tokens, of unit length):

1. kinematic switch: ``F = alpha Norm(R) + (1 - alpha) Norm(D)`` of the last w points of the path, R its radius, D its
   length. Where F reaches a boundary the memory drafts the K = 5 chunks with the largest ``cos(f, f_k)``, whose groups
   (position, rotation, gripper) are combined to a tree; elsewhere Spec-VLA's head drafts, within 9 bins, and every
   chunk is verified.
2. acceptance by groups: each token within 15 bins, the sum of a group within 30
   (:func:`~specact.families.tokens.speculative.relaxed`).
3. verify-skip: a retrieved chunk is executed unverified while ``cos(f, f_v)`` to the last verified feature is at least
   a bound, and that is at most so many inferences ago.

What we changed: the memory is one file, all of which is compared. Boundary and bounds are fitted to held-out rollouts:
the boundary so that most drafted tokens are accepted, the bounds so that 95 % of the skipped chunks would have been
accepted whole. These may never be reached, so that :class:`Similarity` has the first bound that gives a wanted rate,
and no second one. They are not updated by the success or failure of episodes, which would no longer be independent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.errors import ConfigError, ObservationError
from specact.families.tokens.pair import Decoding, TokenDrafter, TokenParts
from specact.families.tokens.policy import DecodingRequest
from specact.families.tokens.speculative import Array, Tokens
from specact.gates.gate import Gate
from specact.observation import Window
from specact.records import Record, Share, WholeNumber, check_fields, validated
from specact.types import Floats, Proposal, StepRecord

# Candidates retrieved from the memory (K in the released code), and the tolerance in bins where the head drafts.
NEIGHBOURS, HEAD_BINS = 5, 9
# Boundary of F in the released code: .143, .188, .217 and .4 for four suites.
_RELEASED_BOUNDARY = 0.2
_PERCENTILE = 95.0
# A window with a smaller extent, relative to its distance from the origin, does not move: that is rounding error. One
# with a smaller width, relative to its length, is straight.
_MIN_EXTENT, _MIN_WIDTH = 1e-12, 1e-6


@dataclass(frozen=True)
class KinematicMetric:
    """The fused metric ``F = alpha Norm(R) + (1 - alpha) Norm(D)`` of the last w points of a path.

    R measures how straight the path is: the points are projected onto their plane (the first two principal axes), a
    circle is fitted to them by least squares (Kasa 1976; the paper fits iteratively), and R is their mean distance to
    its centre; infinite for straight windows. D is the length of the path, ``sum |P_i - P_i+1|``.
    ``Norm(x) = (x - least) / (most - least)``, within [0, 1]; without motion, F is 0. ``window`` is w, and the ranges
    of ``radius`` and ``distance`` are the smallest value of calibration and its 95th percentile.
    """

    window: Annotated[int, Meta(ge=3, le=1 << 20)]
    alpha: Share
    least_radius: float
    most_radius: float
    least_distance: float
    most_distance: float

    def __post_init__(self) -> None:
        check_fields(self)
        for least, most in ((self.least_radius, self.most_radius), (self.least_distance, self.most_distance)):
            if not 0.0 <= least <= most < math.inf:
                raise ConfigError(f"ranges of the kinematic metric must fulfil 0 <= least <= most, got {least}, {most}")

    @classmethod
    def fit(cls, paths: Sequence[NDArray[np.floating]], window: int = 15, alpha: float = 0.5) -> Self:
        """The metric with the ranges of given paths ``[n, d]``, d at least 2: smallest value to 95th percentile.

        Raises:
            ConfigError: for points that are not finite or of one dimension, or if no path is as long as a window.
        """
        try:
            measures = [_measure(path, window) for path in paths if len(path) >= window]
        except ObservationError as error:
            raise ConfigError(f"the kinematic metric cannot be fitted to these paths: {error}") from None
        if not measures:
            raise ConfigError(f"the kinematic metric needs a path of at least {window} points to be fitted to")
        radii, distances = (np.concatenate(parts) for parts in zip(*measures, strict=True))
        return cls(window, alpha, *_range(radii[np.isfinite(radii)]), *_range(distances))

    def now(self, points: NDArray[np.floating]) -> float:
        """F of the last w of some points ``[k, d]``, oldest first; 0 if there are fewer, as for precise motion.

        Raises:
            ObservationError: for points that are not finite, or of one dimension.
        """
        values = self.along(points[-self.window :])
        return float(values[-1]) if len(values) else 0.0

    def along(self, path: NDArray[np.floating]) -> Floats:
        """F at every point of a path, ``[n]``; see :meth:`now`."""
        values = np.zeros(len(path))
        if len(path) >= self.window:
            radii, distances = _measure(path, self.window)
            straight = _normalised(radii, self.least_radius, self.most_radius)
            fast = _normalised(distances, self.least_distance, self.most_distance)
            fused = self.alpha * straight + (1.0 - self.alpha) * fast
            values[self.window - 1 :] = np.where(distances > 0.0, fused, 0.0)
        return values


def _measure(path: NDArray[np.floating], window: int) -> tuple[Floats, Floats]:
    """R and D of every window of a path, ``[n - w + 1]`` each; both 0 without motion."""
    path = np.asarray(path, np.float64)
    if path.ndim != 2 or path.shape[1] < 2 or not np.isfinite(path).all():
        raise ObservationError(
            f"a path must be finite points of at least 2 dimensions, got an array of shape {path.shape}", "not_finite"
        )
    points = np.swapaxes(np.lib.stride_tricks.sliding_window_view(path, window, axis=0), 1, 2)
    offsets = points - points.mean(axis=1, keepdims=True)
    _, extents, axes = np.linalg.svd(offsets, full_matrices=False)
    moves = extents[:, 0] > _MIN_EXTENT * np.abs(points).max(axis=(1, 2))
    bent = moves & (extents[:, 1] > _MIN_WIDTH * extents[:, 0])
    # Along principal axes through the mean, the normal equations of x^2 + y^2 = 2 a x + 2 b y + c are diagonal.
    plane = offsets[bent] @ np.swapaxes(axes[bent, :2], 1, 2)
    squares = (plane**2).sum(axis=2, keepdims=True)
    centres = (plane * squares).sum(axis=1, keepdims=True) / (2.0 * extents[bent, None, :2] ** 2)
    radii = np.where(moves, np.inf, 0.0)
    radii[bent] = np.linalg.norm(plane - centres, axis=2).mean(axis=1)
    lengths = np.linalg.norm(np.diff(points, axis=1), axis=2)
    return radii, np.where(moves, lengths.sum(axis=1), 0.0)


def _range(values: Floats) -> tuple[float, float]:
    """Smallest value and 95th percentile; both 0 for no values, as if no radius is finite."""
    return (float(values.min()), float(np.percentile(values, _PERCENTILE))) if len(values) else (0.0, 0.0)


def _normalised(values: Floats, least: float, most: float) -> Floats:
    """From 0 at ``least`` to 1 at ``most``; 1 if they are equal."""
    shares = np.clip((values - least) / (most - least if most > least else 1.0), 0.0, 1.0)
    return np.where(values >= most, 1.0, shares)


def unit(features: NDArray[np.floating]) -> Array:
    """Features of unit length, ``[..., F]``, whose dot products are cosines.

    Raises:
        ObservationError: for one that is 0 or not finite.
    """
    lengths = np.linalg.norm(features.astype(np.float64), axis=-1, keepdims=True)
    if not (np.isfinite(lengths) & (lengths > 0.0)).all():
        raise ObservationError("a feature is 0 or not finite, so that nothing is like it", "not_finite")
    scaled: Array = (features / lengths).astype(np.float32)
    return scaled


@dataclass(frozen=True)
class Memory:
    """What was seen and done in n steps.

    Attributes:
        features: of unit length, ``[n, F]``.
        tokens: the target's or the demonstrated chunk, ``[n, T]``, each 0 to 255.

    Raises:
        ConfigError: if it is empty, or a feature is not of unit length.
    """

    features: Array
    tokens: Tokens

    def __post_init__(self) -> None:
        apart = np.linalg.norm(self.features, axis=-1) - 1.0
        if not len(apart) or len(apart) != len(self.tokens) or not (np.abs(apart) < 1e-3).all():
            raise ConfigError(
                f"a memory needs as many features of length 1, see unit(), as chunks of tokens, got {len(apart)} and "
                f"{len(self.tokens)}"
            )

    def nearest(self, feature: NDArray[np.floating], count: int = 1) -> Tokens:
        """The chunks of the ``count`` steps most like a feature ``[F]`` of any length but 0, best first, ``[K, T]``.

        Raises:
            ObservationError: for a feature that is 0 or not finite.
        """
        similarities, count = self.features @ unit(feature), min(count, len(self.features))
        indices = np.sort(np.argpartition(-similarities, count - 1)[:count])
        nearest: Tokens = self.tokens[indices[np.argsort(-similarities[indices], kind="stable")]]
        return nearest


class SkipRule(Record, frozen=True):
    """Condition for executing a retrieved chunk without verification: soon after a verified step with similar features.

    Attributes:
        similarity: smallest cosine of the feature and that of the last verified step.
        distance: largest number of steps since then; 0 for never.
    """

    similarity: Annotated[float, Meta(ge=-1, le=1)] = 1.0
    distance: WholeNumber = 0


class HeisdDrafter(TokenDrafter):
    """Keeps the path of one robot."""

    decoding: Heisd

    def __init__(self, parts: TokenParts, decoding: Heisd) -> None:
        super().__init__(parts, decoding)
        self._path = deque[Array](maxlen=parts.drafters.settings.metric.window)

    @property
    def stateless(self) -> bool:
        return not self.decoding.switches

    def reset(self) -> None:
        super().reset()
        self._path.clear()

    def request(self, window: Window, rng: np.random.Generator) -> DecodingRequest:
        policy, settings, decoding = self.parts.policy, self.parts.drafters.settings, self.decoding
        tokens = policy.networks.tokens([policy.spec.observation.select(window)])[0]
        feature, fast = unit(tokens.mean(axis=0)), self._is_fast(window)
        candidates = np.zeros((0, policy.networks.length), np.int64)
        if fast:
            candidates = self.parts.drafters.memory.nearest(feature, NEIGHBOURS)
        if decoding.total is None:
            rule = self.within(decoding.bins)
        else:
            rule = self.within(decoding.bins, settings.groups, decoding.total) if fast else self.within(HEAD_BINS)
        combined = fast and decoding.total is not None
        return DecodingRequest(candidates, decoding.then, rule, combined, feature=feature, retrieved=fast)

    def _is_fast(self, window: Window) -> bool:
        settings = self.parts.drafters.settings
        if not self.decoding.switches:
            return True
        self._path.append(window["state"][-1, list(settings.path)])
        boundary = settings.fast if self.decoding.boundary is None else self.decoding.boundary
        return bool(settings.metric.now(np.stack(self._path)) >= boundary)


# Score if there is nothing to compare; above 2, the maximum of 1 - cos.
_NOT_SIMILAR = 3.0


class Similarity(Gate):
    """Skips the retrieved proposals whose features are most similar to those of the last verified inference.

    Score: ``1 - cos(f_t, f_v)``; 3, above its range, if nothing was retrieved, or the last verification is more than
    :attr:`reach` inferences ago; None for no limit. Arguments as for :class:`~specact.gates.gate.Gate`.
    """

    reach: int | None = None
    # The feature of the last verified inference, and the number of inferences since then.
    _verified: Array | None = None
    _since = 0

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Similarity:
        """A gate for a pair whose decoding proposes from a memory; ConfigError for any other."""
        bare = getattr(pair.parts, "drafters", None) is None
        if bare or pair.parts.decoding.proposes != "retrieval":
            raise ConfigError(
                f"{pair.name} {'has no drafters beside it' if bare else 'is decoded without its memory'}, whose "
                "features could be compared; choose a token policy with drafters and a decoding that retrieves, such "
                "as heisd_no_switch of relocate-tokens, or a gate that looks at actions alone, such as adahi"
            )
        return cls(threshold, **settings)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        request: DecodingRequest = proposal.evidence
        self._since += 1
        too_long_ago = self.reach is not None and self._since > self.reach
        if not request.retrieved or request.feature is None or self._verified is None or too_long_ago:
            return _NOT_SIMILAR
        return 1.0 - float(request.feature @ self._verified)

    def on_verified(self, record: StepRecord) -> None:
        self._verified, self._since = record.proposal.evidence.feature, 0

    def reset(self) -> None:
        super().reset()
        self._verified, self._since = None, 0


class VerifySkip(Similarity):
    """HeiSD's verify-skip, whose threshold is not calibrated for a rate but fitted for safety."""

    calibrated = False

    @validated
    def __init__(self, threshold: float, *, reach: WholeNumber | None = None, **limits: Any) -> None:
        super().__init__(threshold, **limits)
        self.reach = reach

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Similarity:
        gate = super().for_pair(pair, threshold, **settings)
        skip: SkipRule = pair.parts.drafters.settings.skip
        gate.threshold, gate.reach = 1.0 - skip.similarity, settings.get("reach", skip.distance)
        return gate


class FixedSkip(Similarity):
    """The pattern of HeiSD's released code: two retrieved chunks after a verified one are skipped, no others."""

    calibrated = False

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, *, max_skips: int | None = None, **settings: Any) -> Similarity:
        return super().for_pair(pair, 0.5, max_skips=2 if max_skips is None else max_skips, **settings)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return 0.0 if proposal.evidence.retrieved else _NOT_SIMILAR


@dataclass(frozen=True)
class Heisd(Decoding):
    """HeiSD and its variants.

    Attributes:
        bins, total: tolerance of a token and of a group's sum [bins]; if total is None tokens are accepted one by one.
        switches: whether the memory drafts only where F reaches the boundary, and the head elsewhere.
        boundary: smallest F at which the memory drafts; None for the fitted one.
    """

    proposes: str = "retrieval"
    then: str = "head"
    bins: int = 15
    total: int | None = 30
    switches: bool = True
    boundary: float | None = None
    gate: str = "verify_skip"
    learned = True
    drafts = HeisdDrafter


_HEISD = Heisd("HeiSD: a memory or the head drafts, and verification is skipped where features are alike")
_MEMORY = replace(_HEISD, about="HeiSD without the kinematic switch: the memory always drafts", switches=False)
_RANDOM = replace(_MEMORY, gate="random")
HEISD: dict[str, Decoding] = {
    "heisd": _HEISD,
    "heisd_no_switch": _MEMORY,
    "heisd_similar": replace(
        _HEISD, about="HeiSD, verified at the gates' rate, where features are least alike", gate="similarity"
    ),
    "heisd_similar_random": replace(
        _RANDOM, about="the memory, verified at random at that rate: the control", rate_of="heisd_similar"
    ),
    "heisd_fixed": replace(
        _HEISD, about="HeiSD as in its released code: its boundary, two of three retrieved chunks not verified",
        boundary=_RELEASED_BOUNDARY, gate="fixed_skip",
    ),
    "heisd_fixed_random": replace(
        _RANDOM, about="the memory, verified at random at that rate: the control", rate_of="heisd_fixed"
    ),
    "heisd_fixed_no_switch": replace(
        _MEMORY, about="the released code's pattern without its switch: two of three inferences not verified",
        gate="periodic",
    ),
    "retrieval": replace(
        _MEMORY, about="the memory alone, never verified: the control", then="none", bins=0, total=None, gate="never"
    ),
}  # fmt: skip
