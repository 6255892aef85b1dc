"""Runs of one pair of policies, and what each of them is good for: the table, the rates, real time, the rejections."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specact.lab.report.runs import Run

# In these the runs of a sweep may differ. The bundle is known by its fingerprint, wherever it was read from; errors
# along demonstrations are measured beside the episodes; shards are how they were shared out; a head is named only where
# a method has it for its draft.
_FREE_IN_SWEEP = (
    "rate", "methods", "episodes", "shard", "calibration_episodes", "bundle", "mse", "data", "demonstrations",
    "head",
)  # fmt: skip


@dataclass(frozen=True)
class Study:
    """All runs of one bundle in one environment.

    Attributes:
        title: the bundle's name, told apart where two bundles have the same.
        slug: the title as part of a file name.
        runs: all of them.
        table: the run with the most methods, then episodes; in virtual time where there is one.
        sweep: runs that differ only in rate, methods and episodes, by rate; at least one.
        realtime: the largest run over real sockets, or None.
        rejections: the run with the most inferences of ADAHI, or None.
    """

    title: str
    slug: str
    runs: tuple[Run, ...]
    table: Run
    sweep: tuple[Run, ...]
    realtime: Run | None
    rejections: Run | None

    @property
    def timed(self) -> Run:
        """The run whose times are told: measured ones where there are any."""
        return self.realtime or self.table


def group(runs: Iterable[Run]) -> list[Study]:
    """Studies by bundle and environment, in the order of their names."""
    parts: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        parts[run.summary["bundle"], run.evaluation["env"], run.evaluation["fingerprint"]].append(run)
    studies: list[Study] = []
    for (name, env, fingerprint), members in sorted(parts.items()):
        title = name
        if len({other_env for other, other_env, _ in parts if other == name}) > 1:
            title += f" in {env}"
        if sum((name, env) == other[:2] for other in parts) > 1:
            title += f" ({fingerprint})"
        studies.append(_study(title, members, {study.slug for study in studies}))
    return studies


def _study(title: str, runs: list[Run], taken: set[str]) -> Study:
    realtime = [run for run in runs if run.summary["realtime"]]
    accounted = [run for run in runs if not run.summary["realtime"]]
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", title).strip("-.") or "bundle"
    while slug in taken:
        slug += "-"
    return Study(
        title=title,
        slug=slug,
        runs=tuple(runs),
        table=max(accounted or realtime, key=_size),
        sweep=_sweep(accounted or realtime),
        realtime=max(realtime, key=_size, default=None),
        rejections=max((run for run in runs if "adahi" in run.methods), key=_inferences, default=None),
    )


def _size(run: Run) -> tuple[int, int]:
    return len(run.methods), int(run.summary["episodes"])


def _inferences(run: Run) -> int:
    return int(run.methods["adahi"]["inferences"])


def _sweep(runs: list[Run]) -> tuple[Run, ...]:
    """Of the runs that differ only in rate, those that cover the most rates; then the most episodes."""
    alike: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        kept: dict[str, Any] = {key: value for key, value in run.evaluation.items() if key not in _FREE_IN_SWEEP}
        alike[json.dumps(kept, sort_keys=True)].append(run)

    def worth(members: list[Run]) -> tuple[int, int]:
        return len({run.summary["rate"] for run in members}), sum(run.summary["episodes"] for run in members)

    widest = max(alike.values(), key=worth)
    return tuple(sorted(widest, key=lambda run: float(run.summary["rate"])))
