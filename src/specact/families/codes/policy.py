"""Policies of action codes: spec, the frozen tokenizer that decodes codes, networks; how they draft and verify.

Drafted codes are accepted or replaced exactly, or are the target's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.bundle.manifest import Words
from specact.bundle.network import CPU, Compute, Network, NetworkInputs
from specact.errors import ConfigError
from specact.families.chunks.policy import BatchPolicy, Chunk, ChunkSpec
from specact.families.codes.sampling import (
    CodeDistribution,
    Drafted,
    Verdict,
    code_outcome,
    sample_codes,
    softmax,
    verify,
)
from specact.observation import ObservationSpec, Window
from specact.pair import Answer, Target, TargetVerifier
from specact.records import Positive, RateHz, Record, Size, check_fields
from specact.rng import Role, StepAddress, StepStreams
from specact.types import ActionUnits, Codes, Outcome, Proposal, StepRecord


class PolicySpec(Record, frozen=True):
    """The spec shared by draft, target and tokenizer of one bundle.

    Attributes:
        codebooks, codes, chunk, actions: G, K, n and A.
        execute, overlap: how many actions of a chunk are executed before the next inference; with ``average``, actions
            that several chunks predict for the same control step are averaged.
        temperature: of both softmaxes.
        sequential: whether both policies have a sequential secondary head, which gives the distribution of the
            secondary code given the primary one (``CodeDistribution.conditional``); only with two codebooks.
    """

    draft: ObservationSpec
    target: ObservationSpec
    codebooks: Annotated[int, Meta(ge=1, le=1 << 13)]
    codes: Size
    chunk: Size
    actions: Size
    execute: Size
    overlap: Literal["drop", "average"]
    temperature: Positive
    rate_hz: RateHz
    sequential: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.observation
        if self.execute > self.chunk:
            raise ConfigError(f"execute must lie between 1 and chunk = {self.chunk}, got {self.execute}")
        if self.sequential and self.codebooks != 2:
            raise ConfigError(f"a sequential secondary head needs 2 codebooks, got {self.codebooks}")

    @property
    def observation(self) -> ObservationSpec:
        """Union of the observations that draft and target need; the device stores these."""
        return self.draft.union(self.target)


class InfersCodes(Protocol):
    """Maps an observation window to a distribution over action codes; deterministic."""

    def infer(self, window: Window) -> CodeDistribution:
        """The distribution for one window."""
        ...


class CodePolicy(ABC):
    """A policy of action codes, deterministic; also as a :class:`~specact.pair.TargetPolicy`."""

    @abstractmethod
    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        """The distributions for several windows in one batch."""

    def infer(self, window: Window) -> CodeDistribution:
        """The distribution for one window."""
        return self.infer_batch([window])[0]

    def answer(self, window: Window, address: StepAddress) -> CodeDistribution:
        """The distribution for one window."""
        return self.infer(window)


class OnnxPolicy(CodePolicy):
    """An exported VQ-BeT, with the vocabulary of its instructions if it needs one.

    Attributes:
        observation: its observation spec.
        inputs: converts windows to the network's inputs.

    Raises:
        BundleError: if the file is no ONNX model or does not fit the spec, or a vocabulary is missing.
    """

    def __init__(
        self,
        file: Path,
        spec: PolicySpec,
        observation: ObservationSpec,
        *,
        words: Words | None = None,
        compute: Compute = CPU,
    ) -> None:
        self.inputs = NetworkInputs(observation, words if observation.instruction else None)
        self._spec, self.observation = spec, observation
        rows = ("batch", spec.codebooks, spec.codes)
        conditional = {"conditional": ("batch", spec.codes, spec.codes)} if spec.sequential else {}
        # A sequential secondary has a row for each primary code in its place.
        logits = ("batch", 1, spec.codes) if spec.sequential else rows
        outputs = {"logits": logits, "offsets": (*rows, spec.chunk, spec.actions), **conditional}
        self._network = Network(file, self.inputs.shapes, outputs, compute)

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        return distributions(self.outputs(windows), self._spec.temperature)

    def outputs(self, windows: Sequence[Window]) -> list[NDArray[np.float32]]:
        """The network's outputs for B windows, see :func:`distributions`."""
        return self._network.run(self.inputs.stack(windows))


def distributions(outputs: Sequence[NDArray[Any]], temperature: float) -> list[CodeDistribution]:
    """Distributions of B windows from a network's outputs.

    Args:
        outputs: ``logits`` [B, G, K], ``offsets`` [B, G, K, n, A]; of a sequential secondary ``logits`` are those of
            the primary code alone, [B, 1, K], and ``conditional`` [B, K, K] those of the secondary for each.
        temperature: of the softmax.
    """
    logits, offsets, *conditional = outputs
    probs = softmax(logits, temperature)
    if not conditional:
        return list(map(CodeDistribution, probs, offsets))
    rows = softmax(conditional[0], temperature)
    # Row 1 of the probabilities is the marginal of the secondary code.
    marginal = np.einsum("bi,bij->bj", probs[:, 0], rows)
    probs = np.stack([probs[:, 0], marginal], axis=1)
    return list(map(CodeDistribution, probs, offsets, rows))


@dataclass(frozen=True)
class ActionTokenizer(ActionUnits):
    """Decodes codes into action chunks; shared by draft and target, so that their codes are comparable.

    Attributes:
        table: the residual VQ's decoder over all code tuples, float32 ``[K ** G, n, A]``, normalised units.
        fingerprint: of the file it came from.
        codes: K.
    """

    table: NDArray[np.float32]
    fingerprint: str
    codes: int

    @np.errstate(over="ignore", invalid="ignore")
    def decode(self, codes: Codes, offsets: NDArray[np.float32]) -> Chunk:
        """``decoder(codes) + sum_g offset_g(code_g)``: a normalised chunk ``[n, A]``.

        Offsets beyond float32 give infinite numbers or NaN; callers must refuse such a chunk.

        Args:
            codes: ``[G]``.
            offsets: ``[G, K, n, A]``.
        """
        index, chosen = 0, codes.tolist()
        for code in chosen:
            index = index * self.codes + code
        chunk: Chunk = self.table[index].copy()
        for book, code in enumerate(chosen):
            chunk += offsets[book, code]
        return chunk


# Final codes from the target's distribution, the draft's, the drafted codes and a random stream.
Rule = Callable[[CodeDistribution, CodeDistribution, Codes, np.random.Generator], Verdict]


def _decoded(codes: Codes, distribution: CodeDistribution, tokenizer: ActionTokenizer) -> Chunk:
    """The chunk of codes; like the probabilities it is not finite, so that what nobody meant is not executed."""
    chunk = tokenizer.decode(codes, distribution.offsets)
    return chunk if np.isfinite(distribution.rows_given(codes)).all() else np.full_like(chunk, np.nan)


class CodeDrafter:
    """Proposes codes ``z ~ q`` of a policy; the evidence is a :class:`~specact.families.codes.sampling.Drafted`."""

    def __init__(self, policy: InfersCodes, tokenizer: ActionTokenizer) -> None:
        self._policy, self._tokenizer = policy, tokenizer

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        draft = self._policy.infer(window)
        codes = sample_codes(draft, rng)
        return Proposal(window, _decoded(codes, draft, self._tokenizer), Drafted(draft, codes))


def take_target(target: CodeDistribution, draft: CodeDistribution, codes: Codes, rng: np.random.Generator) -> Verdict:
    """The target's own codes, whatever was drafted: *remote target*, or *gated target* with a gate.

    A code counts as accepted if the target's sample equals the drafted one; codes are ``[G]``.
    """
    sampled = sample_codes(target, rng)
    kept = sampled == codes
    return Verdict(sampled, kept, 1.0 - kept, target)


class CodeVerifier(TargetVerifier[CodeDistribution]):
    """Requests the target's distribution and samples the final codes on the device.

    The rule is :func:`~specact.families.codes.sampling.verify`, which is exact, or :func:`take_target`.
    """

    def __init__(self, target: Target[CodeDistribution], tokenizer: ActionTokenizer, rule: Rule = verify) -> None:
        super().__init__(target)
        self._tokenizer, self._rule, self._streams = tokenizer, rule, StepStreams()

    def judge(self, answer: Answer[CodeDistribution], proposal: Proposal, address: StepAddress) -> Outcome:
        drafted: Drafted = proposal.evidence
        target = answer.value
        verdict = self._rule(target, drafted.draft, drafted.codes, self._streams(Role.VERIFY, address))
        # With the target's offsets the action follows the target's distribution.
        return code_outcome(verdict, _decoded(verdict.codes, target, self._tokenizer), answer.times)


def executed_codes(record: StepRecord) -> Codes:
    """The codes of an executed chunk, ``[G]``; the drafted ones if a fallback replaced the actions."""
    codes: Codes = (record.outcome or record.proposal).evidence.codes
    return codes


class CodeChunks(BatchPolicy):
    """A policy of action codes as a :class:`~specact.families.chunks.policy.ChunkPolicy`: samples codes, decodes them.

    Given the generator that a pair's policy draws the codes from, the chunk is the one that it executes.

    Args:
        policy: draft or target of a bundle.
        tokenizer, spec: of the same bundle.
        observation: spec of this policy.
    """

    steady = True

    def __init__(
        self, policy: CodePolicy, tokenizer: ActionTokenizer, spec: PolicySpec, observation: ObservationSpec
    ) -> None:
        self._policy, self._tokenizer = policy, tokenizer
        self.spec = ChunkSpec(observation, spec.chunk, spec.actions, spec.rate_hz)

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> list[Chunk]:
        chunks = []
        for distribution, rng in zip(self._policy.infer_batch(windows), rngs, strict=True):
            codes = sample_codes(distribution, rng)
            chunks.append(self._tokenizer.to_environment(_decoded(codes, distribution, self._tokenizer)))
        return chunks
