"""The goals of the study and their results: each claim once for each pair, with its interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specact.errors import DataError
from specact.lab.report.drawing import Rows
from specact.lab.report.margins import efficiency, skip_margin
from specact.lab.report.runs import Run, Study
from specact.lab.statistics import Interval, success_margin

GATES = ("adahi", "uncertainty", "learned", "learned_action")
RATE, LOW_RATE = 0.6, 0.4
EFFICIENCY, OF_HYBRID, OF_HYBRID_DISTILLED = 0.80, 0.99, 0.97
EQUAL_RATE = 0.03
# The paper's difference in true skip ratio between ADAHI and its random gate.
PAPERS_MARGIN = {"kitchen": 0.07, "ball": 0.21, "swarm": 0.11}

Result = Literal["met", "not met", "cannot be told"]
# A method's success, by episode.
Wins = dict[int, bool]
RESULTS: tuple[Result, ...] = ("met", "not met", "cannot be told")


@dataclass(frozen=True)
class Part:
    """An estimate that has to lie above a bound.

    Attributes:
        what: its description.
        found: the estimate with its 95 % interval; NaN where it is undefined.
        above: the bound.
    """

    what: str
    found: Interval
    above: float = 0.0

    @property
    def result(self) -> Result:
        """Decided by the whole interval, not by the estimate."""
        if self.found.low > self.above:
            return "met"
        return "not met" if self.found.high < self.above else "cannot be told"

    def __str__(self) -> str:
        if math.isnan(self.found.mean):
            return f"{self.what} undefined"
        interval = "" if math.isnan(self.found.low) else f" [{self.found.low:+.3f}, {self.found.high:+.3f}]"
        return f"{self.what} {self.found.mean:+.3f}{interval}"


@dataclass(frozen=True)
class Goal:
    """The result of one claim for one bundle, from one run.

    Attributes:
        what: the claim, in words.
        bundle, rate, episodes: of the run.
        parts: all have to hold; none where the run's tables cannot be read.
        beside: a remark.
    """

    what: str
    bundle: str
    rate: float
    episodes: int
    parts: tuple[Part, ...]
    beside: str

    @property
    def result(self) -> Result:
        """Met if every part is, not met if one is not; else undecided."""
        results = {part.result for part in self.parts}
        return "met" if results == {"met"} else "not met" if "not met" in results else "cannot be told"

    @property
    def reached(self) -> str:
        """The numbers, in words."""
        return "; ".join(map(str, self.parts))


def goals_of(studies: Sequence[Study]) -> list[Goal]:
    """Every claim that these runs can decide, once for each bundle, sorted by claim.

    Where a claim is about the best of several gates, the gate is selected on the first half of the episodes and
    tested on the second.
    """
    goals = [goal for study in studies for goal in _goals_of_study(study)]
    kinds = [claim.what for claim in _CLAIMS]
    return sorted(goals, key=lambda goal: kinds.index(goal.what))


def count(goals: Sequence[Goal]) -> str:
    """The number of goals with each result."""
    counts = Counter(goal.result for goal in goals)
    return ", ".join(f"{counts[result]} {result}" for result in RESULTS)


def goals_rows(goals: Sequence[Goal]) -> Rows:
    """Every goal for CSV, a row per part."""
    return [
        {
            "what": goal.what, "bundle": goal.bundle, "rate": goal.rate, "episodes": goal.episodes, "part": part.what,
            **vars(part.found), "above": part.above, "part_result": part.result, "result": goal.result,
            "beside": goal.beside,
        }
        for goal in goals
        for part in goal.parts
    ]  # fmt: skip


def _goals_of_study(study: Study) -> Iterator[Goal]:
    kind = next((ending for ending in ("-distilled", "-undertrained") if study.title.endswith(ending)), "")
    for claim in _CLAIMS:
        run = _run_at(study, claim.rate, claim.needs) if kind in claim.kinds else None
        if run is None:
            continue
        try:
            judged = claim.judge(study, run)
        except DataError as error:
            judged = (), str(error)
        if judged is not None:
            yield Goal(claim.what, study.title, claim.rate, int(run.summary["episodes"]), *judged)


def _run_at(study: Study, rate: float, needs: frozenset[str]) -> Run | None:
    """The longest run in virtual time at this rate that has these methods, with the bundle's own limits on skips."""
    runs = (run for run in study.sweep if not run.summary["realtime"] and run.summary["rate"] == rate)
    return max(
        (run for run in runs if needs <= run.methods.keys()), key=lambda run: int(run.summary["episodes"]), default=None
    )


# The parts of a claim, and a remark.
Judged = tuple[tuple[Part, ...], str]


def _judge_skips(study: Study, run: Run) -> Judged:
    papers = f"the paper: {PAPERS_MARGIN[study.title]:+.2f}" if study.title in PAPERS_MARGIN else ""
    return (Part("difference", skip_margin(run, "adahi", "random")),), papers


def _judge_efficiency(study: Study, run: Run) -> Judged:
    chosen = run.methods["learned"]["choice_efficiency"]
    beside = "" if chosen is None else f"among the steps it met {chosen:.2f}"
    return (Part("efficiency", efficiency(run, "learned"), EFFICIENCY),), beside


def _judge_head_draft(study: Study, run: Run) -> Judged | None:
    """The head as the draft has no rate, so it may come from the run at another one, on the same episodes."""
    other = run if "head_draft" in run.methods else study.table
    if "head_draft" not in other.methods or other not in study.sweep:
        return None
    learned, head = _wins(run, "learned"), _wins(other, "head_draft")
    episodes = sorted(learned.keys() & head.keys())
    margin = _margin("difference", learned, head, episodes)
    shares = [np.mean([won[episode] for episode in episodes]) for won in (learned, head)]
    return (margin,), f"{shares[0]:.3f}, and the head {shares[1]:.3f} without sending anything"


def _judge_hybrid(study: Study, run: Run) -> Judged:
    gate, wins, judged, beside = _choose(run)
    what = f"success - {OF_HYBRID:g} of hybrid's"
    return (_margin(what, wins[gate], _wins(run, "hybrid"), judged, OF_HYBRID),), beside


def _judge_distilled(study: Study, run: Run) -> Judged:
    gate, wins, judged, beside = _choose(run)
    # The random baseline with the gate's constraints: only the deviation has a limit on skips.
    rival = "random_learned" if gate != "adahi" and "random_learned" in run.methods else "random"
    sent, chance = (run.methods[method]["transmission_rate"] for method in (gate, rival))
    parts: tuple[Part, ...] = (
        _margin(
            f"success - {OF_HYBRID_DISTILLED:g} of hybrid's",
            wins[gate],
            _wins(run, "hybrid"),
            judged,
            OF_HYBRID_DISTILLED,
        ),
        _margin(f"success - {rival}'s", wins[gate], _wins(run, rival), judged),
    )
    if sent - chance > EQUAL_RATE:
        # The comparison is only fair at equal rates.
        parts = (
            *parts,
            Part(f"{EQUAL_RATE:g} - (sent - sent by {rival})", _exactly(EQUAL_RATE - (sent - chance))),
        )
    return parts, f"{beside}; it sends {sent:.2f}, {rival} {chance:.2f}"


def _choose(run: Run) -> tuple[str, dict[str, Wins], list[int], str]:
    """The gate with most successes in the first half of the episodes, all outcomes, the second half, and a remark."""
    wins = {gate: _wins(run, gate) for gate in GATES if gate in run.methods}
    episodes = sorted(set.intersection(*(set(won) for won in wins.values())))
    first, second = episodes[: len(episodes) // 2], episodes[len(episodes) // 2 :]
    gate = max(wins, key=lambda gate: sum(wins[gate][episode] for episode in first))
    return (
        gate,
        wins,
        second,
        f"{gate}, chosen among {len(wins)} on {len(first)} episodes, judged on {len(second)} others",
    )


def _wins(run: Run, method: str) -> Wins:
    table = run.outcomes(method)
    return {int(episode): bool(won) for episode, won in zip(table["episode"], table["success"], strict=True)}


def _margin(what: str, first: Wins, second: Wins, episodes: Sequence[int], share: float = 1.0) -> Part:
    one, other = (np.array([won[episode] for episode in episodes], dtype=bool) for won in (first, second))
    return Part(what, success_margin(one, other, share))


def _exactly(value: float) -> Interval:
    return Interval(value, value, value)


@dataclass(frozen=True)
class _Claim:
    """A claim, and its test.

    Attributes:
        what: in words.
        kinds: suffixes of the names of the bundles that it applies to.
        rate, needs: rate and methods of the run.
        judge: its parts and a remark; None where a method is missing; raises DataError where a table cannot be read.
    """

    what: str
    kinds: tuple[str, ...]
    rate: float
    needs: frozenset[str]
    judge: Callable[[Study, Run], Judged | None]


_WITH_HEADS, _ALL_KINDS = ("", "-distilled"), ("", "-distilled", "-undertrained")
_CLAIMS = (
    _Claim("true skip ratio of ADAHI above random's", _ALL_KINDS, RATE, frozenset({"adahi", "random"}), _judge_skips),
    _Claim(
        f"efficiency of the learned gate at least {EFFICIENCY:g}",
        _WITH_HEADS,
        LOW_RATE,
        frozenset({"learned", "oracle", "random"}),
        _judge_efficiency,
    ),
    _Claim(
        "success of the learned gate above that of its head as the draft",
        _WITH_HEADS,
        LOW_RATE,
        frozenset({"learned"}),
        _judge_head_draft,
    ),
    _Claim(
        f"success of the chosen gate at least {OF_HYBRID:.0%} of hybrid's",
        ("",),
        RATE,
        frozenset({"hybrid", "adahi", "learned"}),
        _judge_hybrid,
    ),
    _Claim(
        f"success of the chosen gate at least {OF_HYBRID_DISTILLED:.0%} of hybrid's, and above random's",
        ("-distilled",),
        LOW_RATE,
        frozenset({"hybrid", "random", "learned"}),
        _judge_distilled,
    ),
)
