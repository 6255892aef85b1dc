"""Drafting and verification of codes: exact speculative sampling, or the target's own codes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, get_args

import numpy as np

from specact.errors import unknown_name
from specact.families.codes.sampling import sample_codes, verify
from specact.families.codes.spec import InfersCodes
from specact.families.codes.tokenizer import ActionTokenizer
from specact.families.codes.values import CodeDistribution, Drafted, Verdict, Verified
from specact.observation import Window
from specact.rng import Role, StepAddress, StepStreams
from specact.types import Chunk, OffloadTimes, Origin, Outcome, Proposal, all_from
from specact.verification import Answer, Target, TargetVerifier


class CodeDrafter:
    """Proposes codes ``z ~ q``, see :class:`~specact.pair.Drafter`.

    Args:
        policy: computes q.
        tokenizer: decodes codes into actions.
    """

    def __init__(self, policy: InfersCodes, tokenizer: ActionTokenizer) -> None:
        self._policy, self._tokenizer = policy, tokenizer

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The drafted chunk; its evidence is a :class:`~specact.families.codes.values.Drafted`."""
        draft = self._policy.infer(window)
        codes = sample_codes(draft, rng)
        return Proposal(window, self._tokenizer.decode(codes, draft.offsets), Drafted(draft, codes))


Offset = Literal["target", "draft", "stale"]


class CodeVerifier(TargetVerifier[CodeDistribution]):
    """Requests the target's distribution and samples the final codes on the device.

    Args:
        target: local or remote.
        tokenizer: decodes codes into actions.
        offset: of a verified step. ``target``: the target's, for the final codes (the action then follows the target's
            distribution); ``draft``: the draft's, for the final codes; ``stale``: the draft's for the drafted codes,
            even if they were replaced. The last two are ablations.

    Raises:
        ConfigError: for an unknown offset.
    """

    def __init__(
        self, target: Target[CodeDistribution], tokenizer: ActionTokenizer, *, offset: Offset = "target"
    ) -> None:
        super().__init__(target)
        if offset not in get_args(Offset):
            raise unknown_name("offset", offset, get_args(Offset))
        self._tokenizer, self._offset, self._streams = tokenizer, offset, StepStreams()

    def judge(self, answer: Answer[CodeDistribution], proposal: Proposal, address: StepAddress) -> Outcome:
        """See :class:`~specact.verification.TargetVerifier`."""
        drafted: Drafted = proposal.evidence
        verdict = self._final_codes(answer.value, drafted, self._streams(Role.VERIFY, address))
        return code_outcome(verdict, self._decode(verdict, answer.value, proposal), answer.times, answer.value)

    @abstractmethod
    def _final_codes(self, target: CodeDistribution, drafted: Drafted, rng: np.random.Generator) -> Verdict:
        """The final codes."""

    def _decode(self, verdict: Verdict, target: CodeDistribution, proposal: Proposal) -> Chunk:
        tokenizer, drafted = self._tokenizer, proposal.evidence
        if self._offset == "target":
            return tokenizer.decode(verdict.codes, target.offsets)
        if self._offset == "draft":
            return tokenizer.decode(verdict.codes, drafted.draft.offsets)
        return tokenizer.base(verdict.codes) + (proposal.actions - tokenizer.base(drafted.codes))


class SpeculativeVerifier(CodeVerifier):
    """Accepts or replaces each drafted code so that it follows the target's distribution (ADAHI, equation 7)."""

    def _final_codes(self, target: CodeDistribution, drafted: Drafted, rng: np.random.Generator) -> Verdict:
        return verify(target, drafted.draft, drafted.codes, rng)


class TargetSampler(CodeVerifier):
    """Takes the target's own codes and ignores the draft: *remote target*, or *gated target* with a gate.

    A code counts as accepted if the target's sample equals the drafted one.
    """

    def _final_codes(self, target: CodeDistribution, drafted: Drafted, rng: np.random.Generator) -> Verdict:
        codes = sample_codes(target, rng)
        kept = codes == drafted.codes
        return Verdict(codes, kept, 1.0 - kept)


def code_outcome(verdict: Verdict, actions: Chunk, times: OffloadTimes, target: CodeDistribution | None) -> Outcome:
    """The outcome of a verdict on codes; its origin is ACCEPTED if every code was accepted, else REPLACED."""
    accepted = verdict.accepted.tolist()
    origins = all_from(Origin.ACCEPTED if all(accepted) else Origin.REPLACED, len(actions))
    evidence, kept_all = Verified(verdict, target), 1.0 - verdict.rejected_any
    return Outcome(actions, origins, len(accepted), sum(accepted), times, evidence, kept_all)
