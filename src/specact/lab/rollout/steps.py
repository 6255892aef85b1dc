"""The step table of a rollout: each inference, and the exact effect of verifying it, for skipped steps too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specact.bundle.network import NetworkInputs
from specact.observation import ObservationSpec, Window
from specact.types import Chunk, StepRecord

if TYPE_CHECKING:
    from specact.lab.rollout.families import FamilyRollout

STAGES = ("draft", "gate", "encode", "network", "queue", "target", "finish")
REASONS = ("score", "tie", "first", "max_skips", "audit")
_FREE = (REASONS.index("score"), REASONS.index("tie"))
# Prefix of the columns with a learner's observations.
OBSERVATION = "observation."

# Recorded episodes of a file, which are run together: of a suite of ten tasks, every file has each of them.
SHARD = 10

Table = dict[str, NDArray[Any]]
Row = dict[str, Any]


class Audit:
    """Collects a step table, one row per inference.

    Columns of every family: ``episode``, ``step``, ``transmitted``, ``missed`` (transmitted, but no answer in time),
    ``reason`` (index into :data:`REASONS`), ``score``, ``origin`` of the first action, and ``STAGE_s`` for each of
    :data:`STAGES`, its time, accounted or measured [s]. The family adds its own columns, and training columns where
    ``learning``.
    """

    def __init__(self, family: FamilyRollout, *, learning: bool = False) -> None:
        self._family, self._learning = family, learning
        self._rows: list[Row] = []
        self._judgements: list[Row] = []
        self._lessons: list[Table] = []

    def add(self, records: Sequence[StepRecord], drafts: Sequence[Any], targets: Sequence[Any]) -> None:
        """Adds one inference of each of several robots, with the outputs of draft and target."""
        for record, draft, target in zip(records, drafts, targets, strict=True):
            decision, times, offload = record.decision, record.times, record.times.offload
            self._rows.append({
                "episode": record.address.episode, "step": record.address.step, "transmitted": decision.transmit,
                "missed": record.miss is not None, "reason": np.int8(REASONS.index(decision.reason)),
                "score": float(decision.score), "origin": np.uint8(record.origins[0]),
                "draft_s": times.draft, "gate_s": times.gate, "finish_s": times.finish, "encode_s": offload.encode,
                "network_s": offload.network, "queue_s": offload.queue, "target_s": offload.target,
            })  # fmt: skip
            self._judgements.append(self._family.judge(record, draft, target))
        if self._learning and records:
            self._lessons.append(self._family.lessons([record.proposal for record in records], drafts, targets))

    def table(self) -> Table:
        """The step table, one array per column."""
        times = {f"{stage}_s": np.float64 for stage in STAGES}
        table = {name: column.astype(times.get(name, column.dtype)) for name, column in stacked(self._rows).items()}
        return table | self._family.columns(self._judgements) | (concatenated(self._lessons) if self._lessons else {})


def stacked(rows: Sequence[Row]) -> Table:
    """Rows with the same names as one array per column."""
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def concatenated(tables: Sequence[Table]) -> Table:
    """The rows of tables with the same columns, one table after the other."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def free_steps(table: Table) -> NDArray[np.bool_]:
    """Mask of the steps that a score decided: those that were neither forced nor an audit."""
    return np.isin(table["reason"], _FREE)


def observation_columns(learner: ObservationSpec | NetworkInputs | None, windows: Sequence[Window]) -> Table:
    """A learner's observations, as columns prefixed with :data:`OBSERVATION`."""
    return {} if learner is None else {OBSERVATION + name: values for name, values in learner.stack(windows).items()}


def distance(verified: Chunk, executed: Chunk) -> float:
    """Mean distance over a chunk between verified and executed actions, ``[n, A]``."""
    return float(np.linalg.norm(verified - executed, axis=-1).mean())
