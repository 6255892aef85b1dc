"""What each inference would have been worth verifying: exact, from both distributions, for skipped steps too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specact.families.codes.sampling import rejection_probability, total_variation, verify
from specact.families.codes.tokenizer import ActionTokenizer
from specact.families.codes.values import CodeDistribution, executed_codes
from specact.observation import ObservationSpec, Window
from specact.rng import Role, stream
from specact.types import StepRecord

STAGES = ("draft", "gate", "encode", "network", "queue", "target", "finish")
REASONS = ("score", "tie", "first", "max_skips", "audit")


# What a learner saw is in columns of these names.
SEEN = "observation."


class CodeAudit:
    """Collects the step table of an evaluation of action codes.

    Columns: ``episode``, ``step``, ``transmitted``, ``missed`` (transmitted, but no answer in
    time), ``reason`` (index into :data:`REASONS`), ``score``; ``drafted_k``
    and ``executed_k``, codes; ``rejection_k``, ``r_k(z_k)``, ``rejection``, ``R(z)``; ``accepted_k`` (as executed;
    true on unverified steps); ``tv_k``, total variation of the two distributions; ``draft_entropy`` and
    ``target_entropy``, summed over codebooks [nats]; ``action_change``, mean distance over the chunk between the
    executed action and the one verification would have given, with the step's own random stream, 0 where it was
    verified (normalised units); ``sent_ahead``, whether the request left
    before the draft was computed; ``STAGE_s`` for each of :data:`STAGES`, its
    time, accounted or measured [s].

    For learning also what the learner sees, under :data:`SEEN` and its name, ``draft_probs`` and
    ``target_probs`` ``[G, K]``, and ``target_offsets`` ``[G, K, n, A]`` as float16.

    Args:
        tokenizer: turns codes into actions.
        seed: of the evaluation.
        learner: for learning, what the learner needs to see; None for no learning.
    """

    def __init__(self, tokenizer: ActionTokenizer, seed: int, learner: ObservationSpec | None = None) -> None:
        self._tokenizer, self._seed, self._learner = tokenizer, seed, learner
        self._columns: dict[str, list[NDArray[np.generic]]] = {}

    def add(
        self, records: Sequence[StepRecord], drafts: Sequence[CodeDistribution], targets: Sequence[CodeDistribution]
    ) -> None:
        """Adds one inference of each of several robots, with what draft and target say of it."""
        drafted = np.stack([record.proposal.evidence.codes for record in records])
        executed = np.stack([executed_codes(record) for record in records])
        q, p = _rows(drafts, drafted), _rows(targets, drafted)
        rejection = rejection_probability(p, q, drafted)
        variation = total_variation(p, q)
        unverified = [record.outcome is None for record in records]
        columns: dict[str, NDArray[np.generic]] = {
            **common_columns(records),
            "rejection": 1.0 - np.prod(1.0 - rejection, axis=-1),
            "draft_entropy": _entropy(q),
            "target_entropy": _entropy(p),
            "action_change": np.array(
                [
                    self._change(*step) if alone else 0.0
                    for alone, step in zip(unverified, zip(records, drafts, targets, strict=True), strict=True)
                ]
            ),
        }
        accepted = np.stack(
            [
                np.ones_like(codes, dtype=bool) if record.outcome is None else record.outcome.evidence.verdict.accepted
                for record, codes in zip(records, drafted, strict=True)
            ]
        )
        for k in range(drafted.shape[1]):
            columns |= {
                f"drafted_{k}": drafted[:, k].astype(np.int16),
                f"executed_{k}": executed[:, k].astype(np.int16),
                f"rejection_{k}": rejection[:, k],
                f"accepted_{k}": accepted[:, k],
                f"tv_{k}": variation[:, k],
            }
        if self._learner is not None:
            columns |= code_lessons(self._learner, [r.proposal.window for r in records], drafts, targets)
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)

    def table(self) -> dict[str, NDArray[np.generic]]:
        """The step table, one array per column."""
        return {name: np.concatenate(values) for name, values in self._columns.items()}

    def _change(self, record: StepRecord, draft: CodeDistribution, target: CodeDistribution) -> float:
        rng = stream(self._seed, Role.VERIFY, episode=record.address.episode, step=record.address.step)
        verdict = verify(target, draft, record.proposal.evidence.codes, rng)
        verified = self._tokenizer.decode(verdict.codes, target.offsets)
        return float(np.linalg.norm(verified - record.actions, axis=-1).mean())


def common_columns(records: Sequence[StepRecord]) -> dict[str, NDArray[np.generic]]:
    """The columns that every family's step table has, one row per record."""
    return {
        "episode": np.array([record.address.episode for record in records]),
        "step": np.array([record.address.step for record in records]),
        "transmitted": np.array([record.decision.transmit for record in records]),
        "missed": np.array([record.miss is not None for record in records]),
        "reason": np.array([REASONS.index(record.decision.reason) for record in records], dtype=np.int8),
        "score": np.array([record.decision.score for record in records]),
        "origin": np.array([record.origins[0] for record in records]),
        "sent_ahead": np.array([record.sent_ahead for record in records]),
        **{f"{stage}_s": np.array(times) for stage, times in _stages(records).items()},
    }


def _stages(records: Sequence[StepRecord]) -> dict[str, list[float]]:
    every = [record.times for record in records]
    own = {stage: [getattr(times, stage) for times in every] for stage in ("draft", "gate", "finish")}
    far = {stage: [getattr(times.offload, stage) for times in every] for stage in STAGES[2:6]}
    return own | far


def code_lessons(
    learner: ObservationSpec,
    windows: Sequence[Window],
    drafts: Sequence[CodeDistribution],
    targets: Sequence[CodeDistribution],
) -> dict[str, NDArray[np.generic]]:
    """The columns that one learns from, see :class:`CodeAudit`."""
    return {
        **seen_by(learner, windows),
        "draft_probs": np.stack([draft.probs for draft in drafts]).astype(np.float32),
        "target_probs": np.stack([target.probs for target in targets]).astype(np.float32),
        "target_offsets": np.stack([target.offsets for target in targets]).astype(np.float16),
    }


def seen_by(learner: ObservationSpec | None, windows: Sequence[Window]) -> dict[str, NDArray[np.generic]]:
    """What a learner sees, as columns under :data:`SEEN` and its name."""
    return {} if learner is None else {SEEN + name: values for name, values in learner.stack(windows).items()}


def _rows(distributions: Sequence[CodeDistribution], codes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Rows ``[B, G, K]`` that verification compares; a sequential secondary's is the one given the drafted primary."""
    rows = np.stack([distribution.probs for distribution in distributions])
    for index, distribution in enumerate(distributions):
        if distribution.conditional is not None:
            rows[index, 1] = distribution.conditional[codes[index, 0]]
    return rows


def _entropy(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    logs = np.log(np.maximum(rows, 1e-300))
    return np.asarray(-(rows * logs).sum(axis=(-2, -1)))
