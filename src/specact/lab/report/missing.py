"""What a study lacks for the full report, and the command that would make it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specact.lab.report.runs import Study
from specact.lab.rollout.methods import METHODS

_REALTIME = "draft,target,hybrid,random,adahi"


@dataclass(frozen=True)
class Gap:
    """Something that is not in the report.

    Attributes:
        what: is missing; the same words for every bundle that lacks it.
        how: a command that makes it; empty where there is none to name.
    """

    what: str
    how: str = ""

    def __str__(self) -> str:
        return f"{self.what}; run: {self.how}" if self.how else self.what


def gaps_of(study: Study) -> list[Gap]:
    """What can be told from the summaries."""
    run = study.table
    start = f"specact eval --bundle {shlex.quote(str(run.evaluation['bundle']))}"
    like = f"--episodes {run.summary['episodes']} --seed {run.evaluation['seed']}"
    out = f"--out runs/{study.slug}"
    metrics = run.methods.values()
    absent = [name for name in METHODS if name not in run.methods]
    found = (
        (
            study.realtime is None,
            Gap(
                "no run over real sockets: times are accounted in virtual time",
                f"{start} --methods {_REALTIME} --episodes 20 --realtime {out}-realtime",
            ),
        ),
        (
            len({one.summary["rate"] for one in study.sweep}) < 2,
            Gap(
                "no runs at other rates: no figures over the rate", f"{start} --rate 0.3 {like} {out}-0.3 (and others)"
            ),
        ),
        (all("adahi" not in one.methods for one in study.runs), Gap("no method adahi: no figure of its rejections")),
        (
            all(m["gate_efficiency"] is None for m in metrics),
            Gap("no gate efficiency: it needs the methods random and oracle"),
        ),
        (all(m.get("mse") is None for m in metrics), Gap("no mean squared error on held-out demonstrations")),
        (bool(absent), Gap(f"methods that were not run: {', '.join(absent)}")),
    )
    return [gap for lacks, gap in found if lacks]


def by_gap(missing: Mapping[str, Sequence[Gap]]) -> list[str]:
    """Each gap once, with the bundles that have it."""
    bundles: dict[str, list[str]] = {}
    for title, gaps in missing.items():
        for gap in gaps:
            bundles.setdefault(gap.what, []).append(title)
    return [f"{what} ({', '.join(titles)})" for what, titles in bundles.items()]
