"""The goals of the study and their results: each claim once for each pair, decided by whole intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.adahi.methods import METHODS
from experiments.tables import table
from specact.lab.evaluation.metrics import Table, add_gate_efficiency
from specact.lab.evaluation.runs import Run
from specact.lab.rollout.statistics import Interval, success_margin

GATES = ("adahi", "uncertainty", "learned", "learned_action")
EFFICIENCY, OF_HYBRID, OF_HYBRID_DISTILLED, EQUAL_RATE = 0.80, 0.99, 0.97, 0.03
# The paper's difference in true skip ratio between ADAHI and its random gate.
PAPERS_MARGIN = {"kitchen": 0.07, "ball": 0.21, "swarm": 0.11}
RESULTS = ("met", "not met", "cannot be told")
_SAMPLES = 400
# Maximum share of samples with an undefined statistic; above it there is no interval.
_UNDEFINED = 0.025
# A run's stored result; all of them by BUNDLE-RUN.
Summary = Mapping[str, Any]
Study = Mapping[str, Summary]


def evidence(run: Run) -> dict[str, Any]:
    """What the goals need of a run: who won which episode, and statistics of its steps with bootstrap intervals.

    Returns:
        ``won``, by method the outcome of every episode as a letter 1 or 0; where the methods ran ``skips``, the true
        skip ratio of ADAHI minus random's, and ``efficiency``, of the learned gate.
    """
    found: dict[str, Any] = {"won": {name: _letters(run.outcomes(name)) for name in run.methods}}
    if {"adahi", "random"} <= run.methods.keys():
        tables = {name: run.steps(name) for name in ("adahi", "random")}
        found["skips"] = vars(bootstrap(tables, lambda sample: _skips(sample["adahi"]) - _skips(sample["random"])))
    if {"learned", "oracle", "random"} <= run.methods.keys():
        names = [name for name in ("learned", "random", "random_learned", "oracle") if name in run.methods]
        found["efficiency"] = vars(bootstrap({name: run.steps(name) for name in names}, efficiency))
    return found


def _letters(outcomes: Table) -> str:
    return "".join("01"[int(won)] for won in outcomes["success"][np.argsort(outcomes["episode"])])


def _skips(table: Table) -> float:
    rejected = table["rejection"][~table["transmitted"]]
    return float(1.0 - rejected.mean()) if len(rejected) else float("nan")


def efficiency(tables: Mapping[str, Table]) -> float:
    """The learned gate's efficiency; NaN where it is undefined."""
    methods: dict[str, dict[str, Any]] = {
        name: {
            "transmission_rate": float(table["transmitted"].mean()),
            "gated_loss": float((table["rejection"] * (~table["transmitted"] | table["missed"])).mean()),
        }
        for name, table in tables.items()
    }
    add_gate_efficiency([METHODS[name] for name in methods], methods, tables["oracle"])
    value = methods["learned"]["gate_efficiency"]
    return float("nan") if value is None else float(value)


def bootstrap(tables: Mapping[str, Table], statistic: Callable[[Mapping[str, Table]], float]) -> Interval:
    """The statistic of the tables, and its 95 % interval over samples of whole common episodes."""
    names = ("episode", "transmitted", "missed", "rejection", "reason")
    columns = {method: {name: table[name] for name in names} for method, table in tables.items()}
    rows = {
        method: {episode: np.flatnonzero(table["episode"] == episode) for episode in np.unique(table["episode"])}
        for method, table in columns.items()
    }
    episodes = sorted(set.intersection(*(set(by_episode) for by_episode in rows.values())))
    values = []
    for drawn in np.random.default_rng(0).choice(episodes, size=(_SAMPLES, len(episodes))):
        chosen = {method: np.concatenate([rows[method][episode] for episode in drawn]) for method in columns}
        values.append(
            statistic({m: {name: column[chosen[m]] for name, column in table.items()} for m, table in columns.items()})
        )
    if np.isnan(values).mean() > _UNDEFINED:
        return Interval(statistic(columns), float("nan"), float("nan"))
    low, high = np.nanquantile(values, [0.025, 0.975])
    return Interval(statistic(columns), float(low), float(high))


@dataclass(frozen=True)
class Part:
    """An estimate that has to lie above a bound; NaN where it is undefined."""

    what: str
    found: Interval
    above: float = 0.0

    @property
    def result(self) -> str:
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
    """The result of one claim for one bundle at one rate: its parts, all of which have to hold, and a remark."""

    what: str
    bundle: str
    rate: float
    episodes: int
    parts: tuple[Part, ...]
    beside: str

    @property
    def result(self) -> str:
        """Met if every part is, not met if one is not; else undecided."""
        results = {part.result for part in self.parts}
        return "met" if results == {"met"} else "not met" if "not met" in results else "cannot be told"


Judged = tuple[tuple[Part, ...], str]


def _stored(found: Mapping[str, float | None]) -> Interval:
    """An interval; JSON has null for what is undefined."""
    return Interval(**{name: float("nan") if value is None else value for name, value in found.items()})


def _judge_skips(run: Summary, table: Summary) -> Judged:
    papers = PAPERS_MARGIN.get(run["bundle"])
    return (Part("difference", _stored(run["evidence"]["skips"])),), f"the paper: {papers:+.2f}" if papers else ""


def _judge_efficiency(run: Summary, table: Summary) -> Judged:
    chosen = run["methods"]["learned"]["choice_efficiency"]
    beside = "" if chosen is None else f"among the steps it met {chosen:.2f}"
    return (Part("efficiency", _stored(run["evidence"]["efficiency"]), EFFICIENCY),), beside


def _judge_head_draft(run: Summary, table: Summary) -> Judged | None:
    """The head as the draft has no rate, so it may come from the run at another one, on the same episodes."""
    other = run if "head_draft" in run["methods"] else table
    if "head_draft" not in other["methods"]:
        return None
    learned, head = _wins(run, "learned"), _wins(other, "head_draft")
    common = slice(min(len(learned), len(head)))
    beside = f"{learned[common].mean():.3f}, and the head {head[common].mean():.3f} without sending anything"
    return (Part("difference", success_margin(learned[common], head[common], 1.0)),), beside


def _judge_hybrid(run: Summary, table: Summary, share: float = OF_HYBRID) -> Judged:
    """Of the gate with most successes in the first half of the episodes, on the second half."""
    gate, second, beside = _choose(run)
    margin = success_margin(_wins(run, gate)[second], _wins(run, "hybrid")[second], share)
    return (Part(f"success - {share:g} of hybrid's", margin),), beside


def _judge_distilled(run: Summary, table: Summary) -> Judged:
    parts, beside = _judge_hybrid(run, table, OF_HYBRID_DISTILLED)
    gate, second, _ = _choose(run)
    # The random baseline with the gate's constraints: only the deviation has a limit on skips.
    rival = "random_learned" if gate != "adahi" and "random_learned" in run["methods"] else "random"
    sent, chance = (run["methods"][method]["transmission_rate"] for method in (gate, rival))
    above = success_margin(_wins(run, gate)[second], _wins(run, rival)[second], 1.0)
    parts = (*parts, Part(f"success - {rival}'s", above))
    if sent - chance > EQUAL_RATE:
        # The comparison is only fair at equal rates.
        more = EQUAL_RATE - (sent - chance)
        parts = (*parts, Part(f"{EQUAL_RATE:g} - (sent - sent by {rival})", Interval(more, more, more)))
    return parts, f"{beside}; it sends {sent:.2f}, {rival} {chance:.2f}"


def _choose(run: Summary) -> tuple[str, slice, str]:
    """The gate with most successes in the first half of the episodes, the second half, and a remark."""
    wins = {gate: _wins(run, gate) for gate in GATES if gate in run["methods"]}
    episodes = min(map(len, wins.values()))
    half = episodes // 2
    gate = max(wins, key=lambda gate: wins[gate][:half].sum())
    beside = f"{gate}, chosen among {len(wins)} on {half} episodes, judged on {episodes - half} others"
    return gate, slice(half, episodes), beside


def _wins(run: Summary, method: str) -> NDArray[np.bool_]:
    return np.array([letter == "1" for letter in run["evidence"]["won"][method]])


# A claim in words, the endings of the bundles it is about, its rate, the methods it needs, and its test.
CLAIMS: tuple[tuple[str, tuple[str, ...], float, set[str], Callable[[Summary, Summary], Judged | None]], ...] = (
    (
        "true skip ratio of ADAHI above random's", ("", "-distilled", "-undertrained"), 0.6, {"adahi", "random"},
        _judge_skips,
    ),
    (
        f"efficiency of the learned gate at least {EFFICIENCY:g}", ("", "-distilled"), 0.4,
        {"learned", "oracle", "random"}, _judge_efficiency,
    ),
    (
        "success of the learned gate above that of its head as the draft", ("", "-distilled"), 0.4, {"learned"},
        _judge_head_draft,
    ),
    (
        f"success of the chosen gate at least {OF_HYBRID:.0%} of hybrid's", ("",), 0.6, {"hybrid", "adahi", "learned"},
        _judge_hybrid,
    ),
    (
        f"success of the chosen gate at least {OF_HYBRID_DISTILLED:.0%} of hybrid's, and above random's",
        ("-distilled",), 0.4, {"hybrid", "random", "learned"}, _judge_distilled,
    ),
)  # fmt: skip


def goals_of(study: Study) -> Iterator[Goal]:
    """Every claim that the stored runs can decide, claim by claim, once for each bundle.

    Where a claim is about the best of several gates, the gate is selected on the first half of the episodes and
    tested on the second.
    """
    bundles = dict.fromkeys(summary["bundle"] for _, summary in sorted(study.items()))
    for what, endings, rate, needs, judge in CLAIMS:
        for bundle in bundles:
            ending = next((each for each in ("-distilled", "-undertrained") if bundle.endswith(each)), "")
            table = study.get(f"{bundle}-table", {"methods": {}})
            run = table if rate == 0.6 else study.get(f"{bundle}-rate-{rate:g}", {"methods": {}})
            judged = judge(run, table) if ending in endings and needs <= run["methods"].keys() else None
            if judged is not None:
                yield Goal(what, bundle, rate, int(run["episodes"]), *judged)


def goals_table(goals: Iterable[Goal]) -> str:
    """The goals as Markdown, and how many of them are met."""
    goals = list(goals)
    rows = [
        {
            **vars(goal), "reached": "; ".join(map(str, goal.parts)),
            "result": f"**{goal.result}**" if goal.result == "not met" else goal.result,
        }
        for goal in goals
    ]  # fmt: skip
    whole = table(
        "goal | bundle | rate | episodes | reached [95 %] | result | beside it",
        "{what} | {bundle} | {rate:g} | {episodes} | {reached} | {result} | {beside}",
        rows,
    )
    counts = Counter(goal.result for goal in goals)
    told = ", ".join(f"{counts[result]} {result}" for result in RESULTS)
    return f"{whole}\n\nOf {len(goals)} goals: {told}."
