"""Verification of proposals of tokens by the target: a pure function of windows and a request for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specact.families.tokens.drafters import NO_CANDIDATES, Candidates, GroupCandidates
from specact.families.tokens.policy import Cache, Reading, TokenPolicy, Tokens
from specact.families.tokens.speculative import (
    DRAFT,
    TAIL,
    Acceptance,
    Decoded,
    Speculation,
    TreeDrafter,
    decode,
)
from specact.observation import Window
from specact.pair import Answer, Target, TargetVerifier
from specact.rng import StepAddress
from specact.types import ActionUnits, OffloadTimes, Origin, Outcome, Proposal, value

# The target's own drafters, which run beside it. The order is part of the wire format: only append.
OWN_DRAFTERS = ("none", "bigram", "head")
# Candidates that a request can hold. It is part of the wire format.
MAX_CANDIDATES = 8


@value
class DecodingRequest:
    """The request for a chunk: all inputs of the target besides the observation.

    Attributes:
        candidates: drafted on the device, more likely ones first, int64 ``[K, T]``; K may be 0. Each is a chunk, or the
            beginning of one and -1 from there on; together they are a tree. The first token of each is the one that the
            others follow: the target predicts it itself, and reads it from no candidate.
        then: which of :data:`OWN_DRAFTERS` proposes without candidates, or after their rejection.
        combined: whether groups of the candidates are combined, see
            :class:`~specact.families.tokens.drafters.GroupCandidates`.
        rule: for accepting tokens.
        tail: replacement of everything from the first rejected token on, int64 ``[T]``; None continues decoding.
    """

    candidates: Tokens
    then: str
    combined: bool
    rule: Acceptance
    tail: Tokens | None = None


@value
class Prefilled:
    """B windows prefilled by a target, for any number of requests each.

    Attributes:
        policy: the target.
        drafters: its own, by their names in :data:`OWN_DRAFTERS`.
        cache, prefix: KV cache and decoder outputs of the windows.
    """

    policy: TokenPolicy
    drafters: Mapping[str, TreeDrafter]
    cache: Cache
    prefix: Reading

    def decode(self, requests: Sequence[DecodingRequest]) -> list[Decoded]:
        """The decoded chunks for a request of each window, in one batch."""
        speculations = [self._speculation(request) for request in requests]
        cache = self.cache.select(np.arange(len(requests)))
        # Extreme observations overflow to NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            return decode(self.policy.networks, cache, self.prefix, speculations)

    def _speculation(self, request: DecodingRequest) -> Speculation:
        rule, chunks = request.rule, request.candidates
        own = [] if request.then == "none" else [self.drafters[request.then]]
        drafters: list[TreeDrafter] = own or [NO_CANDIDATES]
        if len(chunks):
            first = GroupCandidates(chunks, rule.groups, rule.each == 0) if request.combined else Candidates(chunks)
            drafters = [first, *own]
        return Speculation(drafters, rule, request.tail)


class TokenTarget:
    """A token policy as a :class:`~specact.pair.TargetPolicy`; its answers are decoded later.

    Args:
        policy: the target.
        drafters: its own, by their names in :data:`OWN_DRAFTERS`.
    """

    def __init__(self, policy: TokenPolicy, drafters: Mapping[str, TreeDrafter]) -> None:
        self._policy, self.drafters = policy, drafters

    def answer(self, window: Window, address: StepAddress) -> Prefilled:
        """The prefilled window; decoding is greedy and needs no random stream."""
        return self.prefill([window])

    def prefill(self, windows: Sequence[Window]) -> Prefilled:
        """B windows, prefilled in one batch."""
        networks, sees = self._policy.networks, self._policy.spec.observation
        with np.errstate(over="ignore", invalid="ignore"):
            cache, prefix = networks.prefill(networks.tokens([sees.select(window) for window in windows]))
        return Prefilled(self._policy, self.drafters, cache, prefix)


class TokenVerifier(TargetVerifier[Prefilled]):
    """Decodes windows that the target has prefilled.

    Args:
        target: prefills windows.
        units: of the actions.
    """

    def __init__(self, target: Target[Prefilled], units: ActionUnits) -> None:
        super().__init__(target)
        self._units = units

    def judge(self, answer: Answer[Prefilled], proposal: Proposal, address: StepAddress) -> Outcome:
        (decoded,) = answer.value.decode([proposal.evidence.request])
        return token_outcome(decoded, answer.value.policy, self._units, answer.times)


def token_outcome(decoded: Decoded, policy: TokenPolicy, units: ActionUnits, times: OffloadTimes) -> Outcome:
    """A decoded chunk as an outcome; NaN actions if any logit was not finite.

    An action is *compensated* if any of its tokens is the tail's, otherwise *accepted* if any is a drafted one, and
    *replaced* if all of them are the target's.

    Args:
        decoded: the chunk; it is the outcome's evidence.
        policy: the target.
        units: of the actions.
        times: time that the device waited.
    """
    chunk = policy.to_environment(decoded.tokens[None])[0]
    actions = units.from_environment(chunk) if decoded.finite else np.full_like(chunk, np.nan)
    sources = decoded.sources.reshape(actions.shape)
    origins = np.full(len(actions), Origin.REPLACED, np.uint8)
    origins[(sources == DRAFT).any(axis=1)] = Origin.ACCEPTED
    origins[(sources == TAIL).any(axis=1)] = Origin.COMPENSATED
    accepted = int((decoded.sources == DRAFT).sum())
    return Outcome(actions, origins, len(decoded.tokens), accepted, times, decoded)
