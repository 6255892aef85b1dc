"""A pair of policies of action codes: the draft's codes are accepted or replaced exactly, or are the target's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from specact.bundle.bundle import Bundle, check_scale, open_bundle
from specact.bundle.network import CPU, Compute
from specact.bundle.words import Words
from specact.errors import BundleError, ConfigError, unknown_name
from specact.families.codes.policy import ActionTokenizer, InfersCodes, OnnxPolicy, PolicySpec
from specact.families.codes.sampling import (
    CodeDistribution,
    Drafted,
    Verdict,
    code_outcome,
    sample_codes,
    verify,
)
from specact.families.codes.wire import CodeExchange
from specact.observation import ObservationSpec, Window
from specact.pair import Pair, PairSource
from specact.rng import Role, StepAddress, StepStreams
from specact.types import Codes, Outcome, Proposal, StepRecord
from specact.verification import Answer, Target, TargetVerifier

PARTS = {"tokenizer": "tokenizer.safetensors", "draft": "draft.onnx", "target": "target.onnx"}
Offset = Literal["target", "draft", "stale"]
# Final codes from the target's distribution, the draft's, the drafted codes and a random stream.
Rule = Callable[[CodeDistribution, CodeDistribution, Codes, np.random.Generator], Verdict]


class CodeDrafter:
    """Proposes codes ``z ~ q``; the evidence is a :class:`~specact.families.codes.sampling.Drafted`.

    Args:
        policy: computes q.
        tokenizer: decodes codes into actions.
    """

    def __init__(self, policy: InfersCodes, tokenizer: ActionTokenizer) -> None:
        self._policy, self._tokenizer = policy, tokenizer

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        draft = self._policy.infer(window)
        codes = sample_codes(draft, rng)
        return Proposal(window, self._tokenizer.decode(codes, draft.offsets), Drafted(draft, codes))


def take_target(target: CodeDistribution, draft: CodeDistribution, codes: Codes, rng: np.random.Generator) -> Verdict:
    """The target's own codes, whatever was drafted: *remote target*, or *gated target* with a gate.

    A code counts as accepted if the target's sample equals the drafted one; codes are ``[G]``.
    """
    sampled = sample_codes(target, rng)
    kept = sampled == codes
    return Verdict(sampled, kept, 1.0 - kept)


class CodeVerifier(TargetVerifier[CodeDistribution]):
    """Requests the target's distribution and samples the final codes on the device.

    Args:
        target: local or remote.
        tokenizer: decodes codes into actions.
        rule: :func:`~specact.families.codes.sampling.verify`, which is exact, or :func:`take_target`.
        offset: of a verified step. ``target``: the target's, for the final codes (the action then follows the target's
            distribution); ``draft``: the draft's, for the final codes; ``stale``: the draft's for the drafted codes,
            even if they were replaced. The last two are ablations.

    Raises:
        ConfigError: for an unknown offset.
    """

    def __init__(
        self,
        target: Target[CodeDistribution],
        tokenizer: ActionTokenizer,
        rule: Rule = verify,
        *,
        offset: Offset = "target",
    ) -> None:
        super().__init__(target)
        if offset not in get_args(Offset):
            raise unknown_name("offset", offset, get_args(Offset))
        self._tokenizer, self._rule, self._offset, self._streams = tokenizer, rule, offset, StepStreams()

    def judge(self, answer: Answer[CodeDistribution], proposal: Proposal, address: StepAddress) -> Outcome:
        drafted: Drafted = proposal.evidence
        target, tokenizer = answer.value, self._tokenizer
        verdict = self._rule(target, drafted.draft, drafted.codes, self._streams(Role.VERIFY, address))
        if self._offset == "stale":
            actions = tokenizer.base(verdict.codes) + (proposal.actions - tokenizer.base(drafted.codes))
        else:
            offsets = target.offsets if self._offset == "target" else drafted.draft.offsets
            actions = tokenizer.decode(verdict.codes, offsets)
        return code_outcome(verdict, actions, answer.times, target)


def executed_codes(record: StepRecord) -> Codes:
    """The codes of an executed chunk, ``[G]``; the drafted ones if a fallback replaced the actions."""
    codes: Codes = record.proposal.evidence.codes if record.outcome is None else record.outcome.evidence.verdict.codes
    return codes


@dataclass(frozen=True)
class CodeParts(Bundle[PolicySpec]):
    """The parts of a pair of action codes.

    Attributes:
        tokenizer, draft: parts.
        local_target: the target, or None if the bundle was exported for a device.
    """

    tokenizer: ActionTokenizer
    draft: OnnxPolicy
    local_target: OnnxPolicy | None

    @property
    def words(self) -> Words | None:
        """Vocabulary of its policies, if one follows an instruction."""
        return self.manifest.words

    @property
    def target(self) -> OnnxPolicy:
        """The target.

        Raises:
            BundleError: if the bundle was exported for a device.
        """
        if self.local_target is None:
            raise BundleError(
                f"the bundle {self.path} was exported without its target, which runs on the server. Connect to a "
                "server, as with specact run --server URL, or use the complete bundle"
            )
        return self.local_target

    def pair(self) -> Pair[CodeDistribution]:
        """As a pair; verification is exact speculative sampling."""
        spec, target = self.spec, self.manifest.fingerprints["target"]
        return Pair(
            name=self.name, observation=spec.observation, units=self.tokenizer, execute=spec.execute,
            rate_hz=spec.rate_hz, overlap=spec.overlap, env=self.env, fingerprint=self.fingerprint, path=self.path,
            drafter=lambda: CodeDrafter(self.draft, self.tokenizer),
            target=lambda: self.target,
            verifier=lambda target: CodeVerifier(target, self.tokenizer),
            exchange=CodeExchange(spec, self.tokenizer, self.name, target, lambda: self.target),
            source=PairSource(str(self.path)), recommended_gates=self.manifest.gates, parts=self,
        )  # fmt: skip


def codes_of(pair: Pair[Any], what: str) -> CodeParts:
    """The parts of a pair, which must be one of action codes.

    Args:
        pair: the pair.
        what: what needs it, for the message.

    Raises:
        ConfigError: if it is of another family.
    """
    if not isinstance(pair.parts, CodeParts):
        raise ConfigError(f"{what} needs a pair of action codes, and {pair.name} is of another family")
    return pair.parts


def load_codes(name_or_path: str | Path, *, compute: Compute = CPU) -> CodeParts:
    """Loads a bundle of a pair and refuses parts that do not fit together.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package, such as ``ball``.
        compute: where its networks run.

    Raises:
        BundleError: if a part is missing, damaged, or does not match its fingerprint in the manifest.
        ConfigError: if there is no bundle of that name.
    """
    bundle = open_bundle(name_or_path, "pair", PolicySpec, PARTS)
    spec, files = bundle.spec, bundle.files
    units = (np.float32, (spec.actions,))
    table = (np.float32, (spec.codes**spec.codebooks, spec.chunk, spec.actions))
    tensors = bundle.tensors("tokenizer", {"table": table, "centre": units, "scale": units})
    check_scale(files["tokenizer"], tensors["centre"], tensors["scale"])
    tokenizer = ActionTokenizer(**tensors, fingerprint=bundle.manifest.fingerprints["tokenizer"], codes=spec.codes)

    def policy(part: str, observation: ObservationSpec) -> OnnxPolicy:
        return OnnxPolicy(files[part], spec, observation, words=bundle.manifest.words, compute=compute)

    draft = policy("draft", spec.draft)
    target = policy("target", spec.target) if "target" in files else None
    return CodeParts(bundle.path, bundle.manifest, spec, files, tokenizer, draft, target)
