"""What the study set out to reach, and whether it did: gate by gate, with what the oracle reaches beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from specact.report.drawing import Rows
from specact.report.html import Html, join, table
from specact.report.runs import Run
from specact.report.studies import Study

GATES = ("adahi", "uncertainty", "learned", "learned_action")
EFFICIENCY, OF_HYBRID, OF_HYBRID_DISTILLED, SIGNIFICANT = 0.80, 0.99, 0.97, 0.05
EQUAL_RATE = 0.03
# Of the paper's ADAHI over its random gate, in true skip ratio.
PAPERS_MARGIN = {"kitchen": 0.07, "ball": 0.21, "swarm": 0.11}


@dataclass(frozen=True)
class Goal:
    """One goal in one run.

    Attributes:
        what: in words.
        bundle, rate: of the run.
        reached: the number, in words.
        met: whether that is enough.
        beside: what else to know.
    """

    what: str
    bundle: str
    rate: float
    reached: str
    met: bool
    beside: str


def goals_of(studies: Sequence[Study]) -> list[Goal]:
    """Every goal that these runs can be held to, kind by kind.

    Where a bundle limits the run of skips, the efficiency of its learned gate is told without that limit too: at a low
    rate the limit leaves the gate nothing to decide.
    """
    found = [goal for study in studies for run in _held(study) for goal in _of(study, run)]
    kinds = list(dict.fromkeys(goal.what for goal in found))
    return sorted(found, key=lambda goal: kinds.index(goal.what))


def goals_tables(goals: Sequence[Goal]) -> Html:
    """A table per kind of goal."""
    return join(_one_kind(what, list(same)) for what, same in groupby(goals, key=lambda goal: goal.what))


def _one_kind(what: str, goals: Sequence[Goal]) -> Html:
    rows = [
        [goal.bundle, f"{goal.rate:g}", goal.reached, "yes" if goal.met else Html("<b>no</b>"), goal.beside]
        for goal in goals
    ]
    caption = f"{what}: {sum(goal.met for goal in goals)} of {len(goals)} met"
    return table(caption[0].upper() + caption[1:], ["bundle", "rate", "reached", "met", "beside it"], rows)


def goals_rows(goals: Sequence[Goal]) -> Rows:
    """The same for CSV."""
    return [vars(goal) for goal in goals]


def _held(study: Study) -> list[Run]:
    accounted = [run for run in study.runs if not run.summary["realtime"]]
    runs = [run for run in accounted if run in study.sweep or _unlimited(run)]
    return sorted(runs, key=lambda run: (float(run.summary["rate"]), _unlimited(run)))


def _unlimited(run: Run) -> bool:
    return bool(run.evaluation.get("gates", {}).get("max_skips") == "unlimited")


def _of(study: Study, run: Run) -> Iterator[Goal]:
    rate, name, methods = run.summary["rate"], study.title, run.methods
    name += ", no limit on skips" if _unlimited(run) else ""
    hybrid = methods.get("hybrid") or study.table.methods.get("hybrid")
    distilled, undertrained = name.endswith("-distilled"), name.endswith("-undertrained")
    candidates = [gate for gate in GATES if gate in methods]
    best = max(candidates, key=lambda gate: _success(run, gate), default=None)
    if rate == 0.6 and {"adahi", "random"} <= methods.keys():
        margin = methods["adahi"]["true_skip_ratio"] - methods["random"]["true_skip_ratio"]
        papers = f"the paper: {100 * PAPERS_MARGIN[name]:+.0f}" if name in PAPERS_MARGIN else ""
        words = f"{100 * margin:+.0f} points, success {_against(run, 'adahi', 'random')[0]}"
        yield Goal("ADAHI skips better than random: true skip ratio", name, rate, words, margin > 0.0, papers)
    if undertrained or hybrid is None or best is None:
        return
    if {"learned", "oracle", "random"} <= methods.keys() and rate in (0.2, 0.4, 0.6):
        found, chosen = (methods["learned"][kind] for kind in ("gate_efficiency", "choice_efficiency"))
        words = f"success {_success(run, 'learned'):.3f}, of the oracle {_success(run, 'oracle'):.3f}"
        words += "" if chosen is None else f"; among the steps it met {chosen:.2f}"
        reached = "undefined: the oracle gains next to nothing" if found is None else f"{found:.2f}"
        met = found is not None and found >= EFFICIENCY
        yield Goal(f"efficiency of the learned gate at least {EFFICIENCY:g}", name, rate, reached, met, words)
    # A run of one method, as for rejection over deviation, has neither hybrid nor an oracle of its own beside it.
    if _unlimited(run) or not {"hybrid", "oracle"} <= methods.keys():
        return
    wanted = {(False, 0.6): OF_HYBRID, (True, 0.4): OF_HYBRID_DISTILLED}.get((distilled, rate))
    if wanted is None:
        return
    share, oracle = (_success(run, gate) / max(hybrid["success"]["rate"], 1e-9) for gate in (best, "oracle"))
    what = f"success of the best gate at least {wanted:.0%} of hybrid's"
    yield Goal(what, name, rate, f"{share:.1%}", share >= wanted, f"{best}; the oracle {oracle:.1%}")
    if distilled:
        words, p, difference = _against(run, best, "random")
        sent, chance = (run.methods[method]["transmission_rate"] for method in (best, "random"))
        # The best of several was looked for, so that its p counts as often (Bonferroni).
        met = difference > 0.0 and p * len(candidates) < SIGNIFICANT and sent - chance <= EQUAL_RATE
        beside = f"{best}, which sends {sent:.2f} against {chance:.2f}"
        beside += f"; p counts {len(candidates)} times" if len(candidates) > 1 else ""
        yield Goal("success of the best gate above random's at the same rate", name, rate, words, met, beside)


def _success(run: Run, method: str) -> float:
    return float(run.methods[method]["success"]["rate"]) if method in run.methods else float("nan")


def _against(run: Run, first: str, second: str) -> tuple[str, float, float]:
    """The paired contrast of two methods: in words, its p, and the difference."""
    for row in run.summary["contrasts"]:
        if (row["first"], row["second"]) == (first, second):
            found = row["success"]
            return f"{found['difference']:+.3f}, p = {found['p']:.2g}", float(found["p"]), float(found["difference"])
    return "not tested", 1.0, 0.0
