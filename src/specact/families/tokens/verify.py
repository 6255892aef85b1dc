"""What the target does with a proposal of tokens: a pure function of one window and one question."""

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

# The target's own drafters, which need its features or share its place. The order crosses the wire: only append.
OWN_DRAFTERS = ("none", "bigram", "head")


@value
class Question:
    """How a chunk is to be decoded; all that the target needs besides the observation.

    Attributes:
        candidates: chunks that were drafted elsewhere, the likelier first, int64 ``[K, T]``; K may be 0.
        then: which of :data:`OWN_DRAFTERS` proposes where there are no candidates, or after they failed.
        combined: whether groups of the candidates are combined, see
            :class:`~specact.families.tokens.drafters.GroupCandidates`.
        rule: which tokens are accepted.
        tail: what takes the place of everything from the first rejected token on, int64 ``[T]``; None decodes on.
    """

    candidates: Tokens
    then: str
    combined: bool
    rule: Acceptance
    tail: Tokens | None = None


@value
class Prefilled:
    """What a target made of one window; any number of questions can be put to it.

    Attributes:
        policy: the target.
        drafters: its own, by their names in :data:`OWN_DRAFTERS`.
        cache, prefix: of the window.
    """

    policy: TokenPolicy
    drafters: Mapping[str, TreeDrafter]
    cache: Cache
    prefix: Reading

    def decode(self, question: Question) -> Decoded:
        """The chunk that answers a question."""
        own = None if question.then == "none" else self.drafters[question.then]
        drafter = NoCandidates() if own is None else own
        if len(question.candidates):
            rule, chunks = question.rule, question.candidates
            drafter = (
                GroupCandidates(chunks, rule.groups, rule.each == 0, then=own)
                if question.combined
                else Candidates(chunks, then=own)
            )
        # NaN where an observation is far beyond those of training.
        with np.errstate(over="ignore", invalid="ignore"):
            return decode(self.policy.networks, self.cache.copy(), self.prefix, drafter, question.rule, question.tail)


class TokenTarget:
    """A token policy as a :class:`~specact.verification.TargetPolicy` whose answers are yet to be decoded.

    Args:
        policy: the target.
        drafters: its own, by their names in :data:`OWN_DRAFTERS`.
    """

    def __init__(self, policy: TokenPolicy, drafters: Mapping[str, TreeDrafter]) -> None:
        self._policy, self.drafters = policy, drafters

    def answer(self, window: Window, address: StepAddress) -> Prefilled:
        """The window, read; decoding is greedy, so nothing is drawn."""
        networks = self._policy.networks
        with np.errstate(over="ignore", invalid="ignore"):
            cache, prefix = networks.prefill(networks.tokens([self._policy.spec.observation.select(window)]))
        return Prefilled(self._policy, self.drafters, cache, prefix)


class TokenVerifier(TargetVerifier[Prefilled]):
    """Decodes here what the target has read.

    Args:
        target: where prefilled windows come from.
        units: of the actions.
    """

    def __init__(self, target: Target[Prefilled], units: ActionUnits) -> None:
        super().__init__(target)
        self._units = units

    def judge(self, answer: Answer[Prefilled], proposal: Proposal, address: StepAddress) -> Outcome:
        """See :class:`~specact.verification.TargetVerifier`; what is not finite is no outcome to act on."""
        decoded = answer.value.decode(proposal.evidence.question)
        chunk = answer.value.policy.to_environment(decoded.tokens[None])[0]
        actions = self._units.from_environment(chunk) if decoded.finite else np.full_like(chunk, np.nan)
        return token_outcome(decoded, actions, answer.times)


def token_outcome(decoded: Decoded, actions: Chunk, times: OffloadTimes) -> Outcome:
    """A decoded chunk as an outcome.

    An action is *compensated* where any of its tokens is the tail's, *accepted* where any other is a drafted one, and
    *replaced* where all of them are the target's.

    Args:
        decoded: the chunk; it is the outcome's evidence.
        actions: the same, ``[H, A]``, normalised.
        times: what was waited for.
    """
    sources = decoded.sources.reshape(actions.shape)
    origins = np.full(len(actions), Origin.REPLACED, np.uint8)
    origins[(sources == DRAFT).any(axis=1)] = Origin.ACCEPTED
    origins[(sources == TAIL).any(axis=1)] = Origin.COMPENSATED
    accepted = int((decoded.sources == DRAFT).sum())
    return Outcome(actions, origins, len(decoded.tokens), accepted, times, decoded)
