"""Missing parts of a study's report, and the commands that produce them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from specact.lab.report.runs import Study

_REALTIME = "draft,target,hybrid,random,adahi"


@dataclass(frozen=True)
class Gap:
    """A missing part of the report.

    Attributes:
        what: its description; the same text for every pair that lacks it.
        how: the command that produces it; may be empty.
    """

    what: str
    how: str = ""

    def __str__(self) -> str:
        return f"{self.what}; run: {self.how}" if self.how else self.what


def gaps_of(study: Study) -> list[Gap]:
    """The gaps that the summaries reveal; those of gates concern action codes only."""
    run = study.table
    start, out = f"specact eval {shlex.quote(str(run.evaluation['bundle']))}", f"--out runs/{study.slug}"
    like = f"--episodes {run.summary['episodes']} --seed {run.evaluation['seed']}"
    at_rate = f"{start} --rate 0.3 {like} {out}-0.3 (and others)"
    real = f"{start} --methods {_REALTIME} --episodes 20 --realtime {out}-realtime"
    codes, metrics = run.of_codes, run.methods.values()
    candidates = (
        (
            codes and study.realtime is None,
            Gap("no run over real sockets: times are accounted in virtual time", real),
        ),
        (
            codes and len({each.summary["rate"] for each in study.sweep}) < 2,
            Gap("no runs at other rates: no figures over the rate", at_rate),
        ),
        (codes and study.rejections is None, Gap("no method adahi: no figure of its rejections")),
        (
            codes and all(m.get("gate_efficiency") is None for m in metrics),
            Gap("no gate efficiency: it needs the methods random and oracle"),
        ),
        (all(m.get("mse") is None for m in metrics), Gap("no mean squared error on held-out demonstrations")),
    )
    return [gap for missing, gap in candidates if missing]
