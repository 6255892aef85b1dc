"""The pages' tables of the study of device compute as Markdown, from ``benchmarks/results/budget.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.lab.evaluation.budget import HEAD_DRAFT, Way, behind, choose, study_ways
from specact.lab.evaluation.budget import advice as device_advice
from specact.lab.rollout.methods import METHODS
from specact.lab.statistics import contrast, holm

# What :func:`~specact.lab.evaluation.budget.study_ways` takes, and the ``parameters`` of every draft by task.
Results = Mapping[str, Any]

# Device budgets that the advice is given for, as shares of the target's time.
BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def tasks_of(results: Results) -> list[str]:
    """Tasks with results."""
    return list(dict.fromkeys(row["task"] for row in results["rows"]))


def advice(results: Results) -> str:
    """A line for each task: what is recommended at which device budget."""
    return "\n".join(
        f"- **{task}** ({_sample_sizes(results, task)}): "
        + device_advice(study_ways(results, task, alike=True), BUDGETS, "of the target's time")
        for task in tasks_of(results)
    )


def choices(results: Results) -> str:
    """For each task the recommended way at each budget (rows) and maximum transmission rate (columns)."""
    return "\n\n".join(_choices(study_ways(results, task, alike=True), task) for task in tasks_of(results))


def gates(results: Results) -> str:
    """Gates against the random gate with the same privileges: the contrasts that are significant over the whole study.

    Paired over the episodes of all training seeds, exact McNemar; Holm's correction over all gates, drafts, rates and
    tasks.
    """
    tests = []
    for task in tasks_of(results):
        ways = {(way.draft, way.method, way.asked): way for way in study_ways(results, task)}
        for (draft, gate, asked), way in ways.items():
            if gate not in ("adahi", "uncertainty", "learned"):
                continue
            of_adahi = ways.get((draft, "random", asked)) if gate == "adahi" else None
            chance = of_adahi or ways[draft, "random_learned", asked]
            tests.append((task, way, chance, contrast(_outcomes(way), _outcomes(chance))))
    corrected, gains = holm([one.p for *_, one in tests]), []
    lines = ["| task | draft | gate | success | at random | difference | p (Holm) |", "|---|---|---|---|---|---|---|"]
    for (task, way, chance, _), p in sorted(zip(tests, corrected, strict=True), key=lambda item: item[1]):
        gained = behind(chance, way)
        if p < 0.05 and gained is not None:
            gains.append(gained.mean)
            lines.append(
                f"| {task} | {way.draft} | {way.method} {way.asked:g} | {_interval(way)} | {_interval(chance)} | "
                f"{gained.mean:+.2f} [{gained.low:+.2f}, {gained.high:+.2f}] | {p:.2g} |"
            )
    positive = sum(gain > 0.0 for gain in gains)
    return "\n".join([*lines, "", f"{len(gains)} of {len(tests)} contrasts, {positive} of them in favour of the gate."])


def costs(results: Results) -> str:
    """Parameters, milliseconds of an inference, and time as a share of the target's."""
    lines = [
        "| task | policy | parameters | of the target's | ms | alone | random | adahi | uncertainty | learned "
        "| head alone |",
        "|" + "---|" * 11,
    ]
    methods = ("draft", "random_learned", "adahi", "uncertainty", "learned", HEAD_DRAFT)
    for task, drafts in results["parameters"].items():
        ways, parts = study_ways(results, task), results["times"][task]["parts"]
        target = next(iter(drafts.values()))["target"]
        lines.append(
            f"| {task} | target | {target:,} | 100% | {parts['1']['target']:.3f} | 1 |" + " - |" * (len(methods) - 1)
        )
        for draft, counts in drafts.items():
            cost = {way.method: way.cost for way in ways if way.draft == draft}
            cells = [f"{cost[method]:.2f}" if method in cost else "-" for method in methods]
            share, ms = counts["draft"] / counts["target"], parts[draft.rpartition("x")[2]]["draft"]
            lines.append(
                f"| {task} | {draft} | {counts['draft']:,} | {share:.2%} | {ms:.3f} | " + " | ".join(cells) + " |"
            )
    return "\n".join(lines)


def successes(results: Results) -> str:
    """For each task the success of every way, with its interval."""
    return "\n\n".join(_successes(study_ways(results, task), task) for task in tasks_of(results))


def _sample_sizes(results: Results, task: str) -> str:
    """The numbers of seeds, episodes and ways."""
    ways = study_ways(results, task, alike=True)
    seeds = sorted({seed for way in ways for seed in way.successes})
    each = sorted({way.episodes // len(way.successes) for way in ways})
    trained = f"training seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return f"{trained}, {'/'.join(map(str, each))} episodes each, {len(ways)} ways"


def _choices(ways: Sequence[Way], task: str) -> str:
    rates = sorted({way.asked for way in ways} | {0.0, 1.0})
    lines = [
        f"| {task}: device budget | " + " | ".join(f"at most {rate:g} sent" for rate in rates) + " |",
        "|" + "---|" * (len(rates) + 1),
    ]
    for budget in BUDGETS:
        found = [choose(ways, budget, rate) for rate in rates]
        cells = " | ".join("-" if one is None else f"{_label(one.way)}: {_interval(one.way)}" for one in found)
        if not lines[-1].endswith(f" | {cells} |"):
            lines.append(f"| from {budget:g} | {cells} |")
    return "\n".join(lines)


def _successes(ways: Sequence[Way], task: str) -> str:
    order = list(METHODS)
    columns = sorted({(way.asked, order.index(way.method), way.method) for way in ways})
    lines = [
        f"| {task} | " + " | ".join(f"{method}, {asked:g}" for asked, _, method in columns) + " |",
        "|" + "---|" * (len(columns) + 1),
    ]
    for draft in dict.fromkeys(way.draft for way in ways):
        found = {(way.asked, way.method): way for way in ways if way.draft == draft}
        cells = [_interval(found[asked, method]) if (asked, method) in found else "" for asked, _, method in columns]
        lines.append(f"| {draft or 'target'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _outcomes(way: Way) -> NDArray[np.float64]:
    """The success of every episode of all training seeds, in order."""
    won = [way.successes[seed][name] for seed in sorted(way.successes) for name in sorted(way.successes[seed])]
    return np.array(won, np.float64)


def _label(way: Way) -> str:
    """Draft, method, and the rate of gated methods."""
    rate = f" {way.asked:g}" if 0.0 < way.asked < 1.0 else ""
    return f"{way.draft}, {way.method}{rate}" if way.draft else way.method


def _interval(way: Way) -> str:
    """Success and its interval."""
    return f"{way.success.mean:.2f} [{way.success.low:.2f}, {way.success.high:.2f}]"
