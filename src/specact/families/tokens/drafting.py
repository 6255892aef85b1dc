"""Speculative decoding on the device: the robot's state, drafting, and the request to the target."""

from __future__ import annotations

from collections import deque

import numpy as np

from specact.errors import ConfigError
from specact.families.chunks.policy import ChunkPolicy, resized
from specact.families.tokens.acceptance import Acceptance, grouped, relaxed
from specact.families.tokens.bins import BINS, to_actions, to_tokens
from specact.families.tokens.decoding import Decoding
from specact.families.tokens.drafter_bundle import DrafterBundle
from specact.families.tokens.drafters import Decided
from specact.families.tokens.head import HeadDrafter
from specact.families.tokens.kalman import Extrapolation, Persistence
from specact.families.tokens.network import Array, Tokens
from specact.families.tokens.policy import TokenPolicy
from specact.families.tokens.retrieval import unit
from specact.families.tokens.speculative import DRAFT, TAIL, Decoded
from specact.families.tokens.threshold import AdaptiveThreshold, Spacing, Threshold, variability
from specact.families.tokens.tree import rows_of
from specact.families.tokens.verify import MAX_CANDIDATES, DecodingRequest
from specact.observation import Window
from specact.types import Chunk, Origin, Proposal, StepRecord, value
from specact.units import ActionUnits

# Executed actions used for extrapolation (AC in KERV), and candidates retrieved from the memory (K in HeiSD's code).
HISTORY, NEIGHBOURS = 10, 5
# Tolerance in bins when HeiSD's head drafts, as in Spec-VLA.
_HEAD_BINS = 9


@value
class DraftedTokens:
    """Evidence of a proposal of tokens, for the gates of this family.

    Attributes:
        question: the request to the target.
        feature: of the observation, for HeiSD's comparison with the last verified one, ``[F]``; None without a memory.
        retrieved: whether the candidates come from the memory.
    """

    question: DecodingRequest
    feature: Array | None = None
    retrieved: bool = False


class TokenDrafter:
    """See :class:`~specact.pair.FollowingDrafter`.

    The proposed actions are the most likely candidate. Where it ends, or without one, they are the draft's chunk if
    there is a draft, else the last executed action repeated, or zeros (the middle of the demonstrated range) before
    the first one.

    A head on the device reads the last verified chunk's first token and the target's feature from which it was
    predicted. Both are of an earlier observation: a device without the target has no newer ones.

    Args:
        policy: the target; its encoder runs on the device if the memory is used.
        units: of the proposed actions, those of its tokens.
        decoding: what is composed.
        drafters: what was learned for the target; None where the decoding needs nothing of it.
        draft: a policy whose chunks are candidates.

    Raises:
        ConfigError: if the decoding needs drafters or a draft that are not there.
    """

    def __init__(
        self,
        policy: TokenPolicy,
        units: ActionUnits,
        decoding: Decoding,
        drafters: DrafterBundle | None = None,
        draft: ChunkPolicy | None = None,
    ) -> None:
        if drafters is None and decoding.learned:
            raise ConfigError(
                "this decoding needs drafters that learned from the target, and there are none beside its bundle; "
                'train them: specact train with a recipe of kind = "drafters"'
            )
        if draft is None and decoding.proposes == "draft":
            raise ConfigError("this decoding needs a draft policy; name one: --draft NAME")
        if decoding.proposes == "perfect" and not policy.networks.decodes:
            raise ConfigError(
                "this decoding drafts with the target itself, and this copy has no decoder; use the complete bundle"
            )
        self._policy, self._units, self._decoding = policy, units, decoding
        self._drafters, self._draft = drafters, draft
        low = decoding.least if decoding.adapts else decoding.bins
        rule = decoding.adapts or "repaired"
        scale = 1.0 if drafters is None or not decoding.adapts else drafters.settings.scale
        self._threshold = AdaptiveThreshold(Threshold(low, decoding.bins, rule, scale))
        self._spacing = Spacing(decoding.plain_steps)
        self._executed: deque[Array] = deque(maxlen=HISTORY)
        self._path: deque[Array] = deque(maxlen=1 if drafters is None else drafters.settings.metric.window)
        self._head: HeadDrafter | None = None
        if drafters is not None and decoding.proposes == "head":
            # A tree has at most as many paths as nodes, so that each has its row in the request.
            settings = drafters.settings
            self._head = HeadDrafter(drafters.head, settings.top, settings.depth, min(settings.nodes, MAX_CANDIDATES))
        self._last_verified: Decided | None = None

    @property
    def stateless(self) -> bool:
        """Whether what it proposes depends on the window alone."""
        proposes = self._decoding.proposes
        if proposes == "nothing":
            return self._draft is not None
        return proposes in ("draft", "random", "perfect") or (proposes == "retrieval" and not self._decoding.switches)

    def reset(self) -> None:
        """See :class:`~specact.pair.FollowingDrafter`."""
        self._executed.clear()
        self._path.clear()
        self._last_verified = None
        self._threshold.reset()
        self._spacing.reset()

    def on_action(self, drafted: Array, executed: Array) -> None:
        self._executed.append(executed)

    def on_inference(self, record: StepRecord) -> None:
        pass

    def on_verified(self, record: StepRecord) -> None:
        assert record.outcome is not None
        self.verified(record.outcome.evidence)

    def verified(self, decoded: Decoded) -> None:
        """Learns from an answer: the next tolerance, whether compensation is due, and what a head here reads."""
        # Rounded as on the wire, so that the same is drafted with the target here and elsewhere.
        feature = decoded.feature.astype(np.float16).astype(np.float32)
        self._last_verified = Decided(decoded.tokens[:1], feature[None], len(decoded.tokens))
        drafted = decoded.sources == DRAFT
        tokens, bias = decoded.tokens[drafted], decoded.bias[drafted]
        self._threshold.update(variability(tokens - bias, tokens))
        self._spacing.update(bool((decoded.sources == TAIL).any()))

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The most likely chunk, and the request to the target."""
        use_memory, feature = self._decoding.proposes == "retrieval" and self._uses_memory(window), None
        candidates = np.zeros((0, self._policy.networks.length), np.int64)
        if self._decoding.proposes == "retrieval":
            feature = pooled_features(self._policy, window)
        if use_memory and feature is not None:
            candidates = self._retrieved(feature)
        elif self._head is not None and self._last_verified is not None:
            (tree,) = self._head.grow([self._last_verified])
            candidates = rows_of(tree, int(self._last_verified.tokens[0]), self._last_verified.length)
        elif self._decoding.proposes in ("last", "filter", "random", "draft", "perfect"):
            candidates = self._candidates(window, rng)
        combined = use_memory and self._decoding.total is not None
        question = DecodingRequest(
            candidates, self._decoding.then, combined, self._acceptance(use_memory), self._tail()
        )
        origin = Origin.RETRIEVED if use_memory else Origin.DRAFTED
        actions = self._actions(candidates, window, rng)
        return Proposal(window, actions, DraftedTokens(question, feature, use_memory), origin)

    def _candidates(self, window: Window, rng: np.random.Generator) -> Tokens:
        if self._decoding.proposes == "random":
            return rng.integers(BINS, size=(1, self._policy.networks.length))
        if self._decoding.proposes == "perfect":
            return self._policy.decode([self._policy.spec.observation.select(window)], [rng])[0]
        if self._decoding.proposes == "draft":
            return self._tokens(self._drafted(window, rng))
        if not self._executed:
            return np.zeros((0, self._policy.networks.length), np.int64)
        return self._tokens(self._extrapolated("last" if self._decoding.proposes == "last" else "velocity"))

    def _actions(self, candidates: Tokens, window: Window, rng: np.random.Generator) -> Chunk:
        spec = self._policy.spec
        if not len(candidates):
            return self._without_candidates(window, rng)
        tokens = candidates[0]
        if tokens[-1] < 0:
            rest = self._tokens(self._without_candidates(window, rng))[0]
            tokens = np.where(tokens < 0, rest, tokens)
        return to_actions(tokens).reshape(spec.chunk, spec.actions)

    def _without_candidates(self, window: Window, rng: np.random.Generator) -> Chunk:
        spec = self._policy.spec
        if self._draft is not None:
            return self._drafted(window, rng)
        if self._executed:
            return np.repeat(self._executed[-1][None], spec.chunk, axis=0)
        return np.zeros((spec.chunk, spec.actions), np.float32)

    def _drafted(self, window: Window, rng: np.random.Generator) -> Chunk:
        assert self._draft is not None
        chunk = self._draft.infer(self._draft.spec.observation.select(window), rng)
        return self._units.from_environment(resized(chunk, self._policy.spec.chunk))

    def _acceptance(self, retrieved: bool) -> Acceptance:
        spec, settings = self._policy.spec, None if self._drafters is None else self._drafters.settings
        length, decoding = spec.chunk * spec.actions, self._decoding
        strict = () if settings is None or decoding.uniform else settings.strict
        if decoding.total is None:
            return relaxed(self._threshold.bins, length, spec.actions, strict)
        if not retrieved or settings is None:
            return relaxed(_HEAD_BINS, length, spec.actions, strict)
        return grouped(decoding.total, decoding.bins, length, spec.actions, settings.groups, strict)

    def _tail(self) -> Tokens | None:
        if self._decoding.tail is None or not self._executed or not self._spacing.armed:
            return None
        tail: Tokens = self._tokens(self._extrapolated(self._decoding.tail))[0]
        return tail

    def _extrapolated(self, how: str) -> Chunk:
        found: Extrapolation = Persistence()
        if how != "last" and self._drafters is not None:
            found = self._drafters.settings.filters[how]
        return found.predict(np.stack(self._executed), self._policy.spec.chunk)

    def _uses_memory(self, window: Window) -> bool:
        if not self._decoding.switches or self._drafters is None:
            return True
        settings = self._drafters.settings
        self._path.append(window["state"][-1, list(settings.path)])
        return bool(settings.metric.now(np.stack(self._path)) >= settings.fast)

    def _retrieved(self, feature: Array) -> Tokens:
        assert self._drafters is not None, "a decoding with a memory needs drafters"
        return self._drafters.memory.nearest(feature, NEIGHBOURS).tokens

    def _tokens(self, actions: Chunk) -> Tokens:
        """The tokens ``[1, T]`` of a normalised chunk ``[H, A]``."""
        return to_tokens(actions).reshape(1, -1)


def pooled_features(policy: TokenPolicy, window: Window) -> Array:
    """The mean of the target encoder's tokens of a window, normalised to unit length, ``[W]``.

    Raises:
        ObservationError: if the mean is 0 or not finite.
    """
    pooled = policy.networks.tokens([policy.spec.observation.select(window)])[0].mean(axis=0)
    return unit(pooled)
