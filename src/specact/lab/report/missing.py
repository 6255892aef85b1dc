"""Missing parts of a study's report, and the commands that produce them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specact.lab.report.runs import Study
from specact.lab.rollout.methods import METHODS

_REALTIME = "draft,target,hybrid,random,adahi"


@dataclass(frozen=True)
class Gap:
    """A missing part of the report.

    Attributes:
        what: its description; the same text for every bundle that lacks it.
        how: the command that produces it; may be empty.
    """

    what: str
    how: str = ""

    def __str__(self) -> str:
        return f"{self.what}; run: {self.how}" if self.how else self.what


def gaps_of(study: Study) -> list[Gap]:
    """The gaps that the summaries reveal."""
    run = study.table
    start = f"specact eval {shlex.quote(str(run.evaluation['bundle']))}"
    like = f"--episodes {run.summary['episodes']} --seed {run.evaluation['seed']}"
    out = f"--out runs/{study.slug}"
    metrics = run.methods.values()
    absent = [name for name in METHODS if name not in run.methods]
    candidates = (
        (
            study.realtime is None,
            Gap(
                "no run over real sockets: times are accounted in virtual time",
                f"{start} --methods {_REALTIME} --episodes 20 --realtime {out}-realtime",
            ),
        ),
        (
            len({run_.summary["rate"] for run_ in study.sweep}) < 2,
            Gap(
                "no runs at other rates: no figures over the rate", f"{start} --rate 0.3 {like} {out}-0.3 (and others)"
            ),
        ),
        (all("adahi" not in run_.methods for run_ in study.runs), Gap("no method adahi: no figure of its rejections")),
        (
            all(m["gate_efficiency"] is None for m in metrics),
            Gap("no gate efficiency: it needs the methods random and oracle"),
        ),
        (all(m.get("mse") is None for m in metrics), Gap("no mean squared error on held-out demonstrations")),
        (bool(absent), Gap(f"methods that were not run: {', '.join(absent)}")),
    )
    return [gap for missing, gap in candidates if missing]


def by_gap(missing: Mapping[str, Sequence[Gap]]) -> list[str]:
    """The gaps, each with its bundles."""
    bundles: dict[str, list[str]] = {}
    for title, gaps in missing.items():
        for gap in gaps:
            bundles.setdefault(gap.what, []).append(title)
    return [f"{what} ({', '.join(titles)})" for what, titles in bundles.items()]
