"""Verification of a proposal of tokens by the target: a pure function of one window and one request."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specact.families.tokens.acceptance import Acceptance
from specact.families.tokens.drafters import Candidates, GroupCandidates, NoCandidates, TreeDrafter
from specact.families.tokens.network import Cache, Reading, Tokens
from specact.families.tokens.policy import TokenPolicy
from specact.families.tokens.speculative import DRAFT, TAIL, Decoded, decode
from specact.observation import Window
from specact.rng import StepAddress
from specact.types import Chunk, OffloadTimes, Origin, Outcome, Proposal, value
from specact.units import ActionUnits
from specact.verification import Answer, Target, TargetVerifier

# The target's own drafters, which run beside it. The order is part of the wire format: only append.
OWN_DRAFTERS = ("none", "bigram", "head")


@value
class DecodingRequest:
    """The request for a chunk: all inputs of the target besides the observation.

    Attributes:
        candidates: chunks drafted on the device, more likely ones first, int64 ``[K, T]``; K may be 0.
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
    """A window prefilled by a target, for any number of requests.

    Attributes:
        policy: the target.
        drafters: its own, by their names in :data:`OWN_DRAFTERS`.
        cache, prefix: KV cache and decoder outputs of the window.
    """

    policy: TokenPolicy
    drafters: Mapping[str, TreeDrafter]
    cache: Cache
    prefix: Reading

    def decode(self, question: DecodingRequest) -> Decoded:
        """The decoded chunk for a request."""
        own = None if question.then == "none" else self.drafters[question.then]
        drafter = NoCandidates() if own is None else own
        if len(question.candidates):
            rule, chunks = question.rule, question.candidates
            drafter = (
                GroupCandidates(chunks, rule.groups, rule.each == 0, then=own)
                if question.combined
                else Candidates(chunks, then=own)
            )
        # Extreme observations overflow to NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            return decode(self.policy.networks, self.cache.copy(), self.prefix, drafter, question.rule, question.tail)


class TokenTarget:
    """A token policy as a :class:`~specact.verification.TargetPolicy`; its answers are decoded later.

    Args:
        policy: the target.
        drafters: its own, by their names in :data:`OWN_DRAFTERS`.
    """

    def __init__(self, policy: TokenPolicy, drafters: Mapping[str, TreeDrafter]) -> None:
        self._policy, self.drafters = policy, drafters

    def answer(self, window: Window, address: StepAddress) -> Prefilled:
        """The prefilled window; decoding is greedy and needs no random stream."""
        networks = self._policy.networks
        with np.errstate(over="ignore", invalid="ignore"):
            cache, prefix = networks.prefill(networks.tokens([self._policy.spec.observation.select(window)]))
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
        """See :class:`~specact.verification.TargetVerifier`; NaN actions if any logit is not finite."""
        decoded = answer.value.decode(proposal.evidence.question)
        chunk = answer.value.policy.to_environment(decoded.tokens[None])[0]
        actions = self._units.from_environment(chunk) if decoded.finite else np.full_like(chunk, np.nan)
        return token_outcome(decoded, actions, answer.times)


def token_outcome(decoded: Decoded, actions: Chunk, times: OffloadTimes) -> Outcome:
    """A decoded chunk as an outcome.

    An action is *compensated* if any of its tokens is the tail's, otherwise *accepted* if any is a drafted one, and
    *replaced* if all of them are the target's.

    Args:
        decoded: the chunk; it is the outcome's evidence.
        actions: the same, ``[H, A]``, normalised.
        times: time that the device waited.
    """
    sources = decoded.sources.reshape(actions.shape)
    origins = np.full(len(actions), Origin.REPLACED, np.uint8)
    origins[(sources == DRAFT).any(axis=1)] = Origin.ACCEPTED
    origins[(sources == TAIL).any(axis=1)] = Origin.COMPENSATED
    accepted = int((decoded.sources == DRAFT).sum())
    return Outcome(actions, origins, len(decoded.tokens), accepted, times, decoded)
