"""The step table of a rollout: each inference, and the exact effect of verifying it, for skipped steps too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from specact.bundle.words import NetworkInputs
from specact.families.codes.pair import executed_codes
from specact.families.codes.policy import ActionTokenizer
from specact.families.codes.sampling import CodeDistribution, rejection_probability, total_variation, verify
from specact.observation import ObservationSpec, Window
from specact.rng import Role, StepStreams
from specact.types import Chunk, Proposal, StepRecord

STAGES = ("draft", "gate", "encode", "network", "queue", "target", "finish")
REASONS = ("score", "tie", "first", "max_skips", "audit")
_FREE = (REASONS.index("score"), REASONS.index("tie"))
# Prefix of the columns with a learner's observations.
OBSERVATION = "observation."

Table = dict[str, NDArray[Any]]
# Makes the training columns from proposals and the outputs of draft and target for the same windows.
Lessons = Callable[[Sequence[Proposal], Sequence[Any], Sequence[Any]], Table]

_COMMON: dict[str, DTypeLike] = {
    "episode": np.int64,
    "step": np.int64,
    "transmitted": np.bool_,
    "missed": np.bool_,
    "reason": np.int8,
    "score": np.float64,
    "origin": np.uint8,
    **{f"{stage}_s": np.float64 for stage in ("draft", "gate", "finish", "encode", "network", "queue", "target")},
}


class Audit(ABC):
    """Collects a step table, one row per inference; a subclass adds the columns of its family.

    Columns of every family: ``episode``, ``step``, ``transmitted``, ``missed`` (transmitted, but no answer in time),
    ``reason`` (index into :data:`REASONS`), ``score``, ``origin`` of the first action, and ``STAGE_s``
    for each of :data:`STAGES`, its time, accounted or measured [s].

    Args:
        lessons: makes the training columns; None for a table without them.
    """

    def __init__(self, lessons: Lessons | None = None) -> None:
        self._lessons = lessons
        self._common: list[tuple[Any, ...]] = []
        self._judgements: list[tuple[Any, ...]] = []
        self._training_columns: list[Table] = []

    def add(self, records: Sequence[StepRecord], drafts: Sequence[Any], targets: Sequence[Any]) -> None:
        """Adds one inference of each of several robots, with the outputs of draft and target."""
        for record, draft, target in zip(records, drafts, targets, strict=True):
            address, decision, times = record.address, record.decision, record.times
            offload = times.offload
            self._common.append(
                (
                    address.episode, address.step, decision.transmit, record.miss is not None,
                    REASONS.index(decision.reason), decision.score, record.origins[0],
                    times.draft, times.gate, times.finish,
                    offload.encode, offload.network, offload.queue, offload.target,
                )
            )  # fmt: skip
            self._judgements.append(self.judge(record, draft, target))
        if self._lessons is not None and records:
            self._training_columns.append(self._lessons([record.proposal for record in records], drafts, targets))

    def table(self) -> Table:
        """The step table, one array per column."""
        common = zip(_COMMON.items(), zip(*self._common, strict=True), strict=True)
        table = {name: np.array(values, kind) for (name, kind), values in common}
        table |= self.columns(*zip(*self._judgements, strict=True))
        for name in self._training_columns[0] if self._training_columns else ():
            table[name] = np.concatenate([part[name] for part in self._training_columns])
        return table

    @abstractmethod
    def judge(self, record: StepRecord, draft: Any, target: Any) -> tuple[Any, ...]:
        """The family's figures of one inference."""

    @abstractmethod
    def columns(self, *values: Sequence[Any]) -> Table:
        """The family's columns, from the transposed results of :meth:`judge`."""


class CodeAudit(Audit):
    """The step table of action codes.

    Columns: ``drafted_k`` and ``executed_k``, codes; ``rejection_k``, ``r_k(z_k)``, ``rejection``, ``R(z)``;
    ``accepted_k`` (as executed; true on unverified steps); ``tv_k``, total variation of the two distributions;
    ``draft_entropy`` and ``target_entropy``, summed over codebooks [nats]; ``action_change``, mean distance over the
    chunk between the executed action and the verified one, with the step's own random stream, 0 where it was verified
    (normalised units).

    Args:
        tokenizer: turns codes into actions.
        lessons: see :class:`Audit`.
    """

    def __init__(self, tokenizer: ActionTokenizer, lessons: Lessons | None = None) -> None:
        super().__init__(lessons)
        self._tokenizer, self._streams = tokenizer, StepStreams()

    def judge(self, record: StepRecord, draft: CodeDistribution, target: CodeDistribution) -> tuple[Any, ...]:
        """See :class:`Audit`."""
        codes, outcome, change = record.proposal.evidence.codes, record.outcome, 0.0
        accepted = np.ones(len(codes), bool) if outcome is None else outcome.evidence.verdict.accepted
        if outcome is None:
            verdict = verify(target, draft, codes, self._streams(Role.VERIFY, record.address))
            change = distance(self._tokenizer.decode(verdict.codes, target.offsets), record.actions)
        return codes, executed_codes(record), draft.rows_given(codes), target.rows_given(codes), accepted, change

    def columns(self, *values: Sequence[Any]) -> Table:
        """See :class:`Audit`."""
        drafted, executed, q, p, accepted = map(np.stack, values[:5])
        rejection, variation = rejection_probability(p, q, drafted), total_variation(p, q)
        columns: Table = {
            "rejection": 1.0 - np.prod(1.0 - rejection, axis=-1),
            "draft_entropy": _entropy(q),
            "target_entropy": _entropy(p),
            "action_change": np.array(values[5]),
        }
        for k in range(drafted.shape[1]):
            columns |= {
                f"drafted_{k}": drafted[:, k].astype(np.int16),
                f"executed_{k}": executed[:, k].astype(np.int16),
                f"rejection_{k}": rejection[:, k],
                f"accepted_{k}": accepted[:, k],
                f"tv_{k}": variation[:, k],
            }
        return columns


def code_lessons(
    learner: NetworkInputs,
    proposals: Sequence[Proposal],
    drafts: Sequence[CodeDistribution],
    targets: Sequence[CodeDistribution],
) -> Table:
    """The training columns: the learner's observations, and the outputs of both policies.

    The latter are ``draft_probs`` and ``target_probs`` ``[G, K]``, and ``target_offsets`` ``[G, K, n, A]`` as float16.
    """
    return {
        **observation_columns(learner, [proposal.window for proposal in proposals]),
        "draft_probs": np.stack([draft.probs for draft in drafts]).astype(np.float32),
        "target_probs": np.stack([target.probs for target in targets]).astype(np.float32),
        "target_offsets": np.stack([target.offsets for target in targets]).astype(np.float16),
    }


def free_steps(table: Table) -> NDArray[np.bool_]:
    """Which rows of a table of steps a score decided: those neither forced nor an audit."""
    return np.isin(table["reason"], _FREE)


def observation_columns(learner: ObservationSpec | NetworkInputs | None, windows: Sequence[Window]) -> Table:
    """A learner's observations, as columns prefixed with :data:`OBSERVATION`."""
    return {} if learner is None else {OBSERVATION + name: values for name, values in learner.stack(windows).items()}


def distance(verified: Chunk, executed: Chunk) -> float:
    """Mean distance over a chunk between verified and executed actions, ``[n, A]``."""
    return float(np.linalg.norm(verified - executed, axis=-1).mean())


def _entropy(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    logs = np.log(np.maximum(rows, 1e-300))
    return np.asarray(-(rows * logs).sum(axis=(-2, -1)))
