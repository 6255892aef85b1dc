"""The report of the study of device compute, and the recommendations that ``specact advise`` ships."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments.figures import Point, add_series
from experiments.report import Metrics, Picture, Report, Table, contrast_table, named, one_family, significant
from specact.lab.evaluation.advice import MARGIN, TABLE, Way, behind, choose, device_cost, without_server
from specact.lab.rollout.statistics import contrast

# ``rows``, each with ``task``, ``draft`` (its size after an x, empty for the target), ``method``, ``asked`` and
# ``seeds``: by training seed the achieved ``rate``, and ``successes``, a letter 0 or 1 for every episode; ``times``: by
# task the ``parts`` of every size; and the ``parameters`` of every draft by task.
Kept = Mapping[str, Any]

# Device budgets that the advice is given for, as shares of the target's time.
BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
SIZES = ("1/4", "1", "4", "16")
# Methods of the picture, each at this rate.
DRAWN = {
    "draft": 0.0, "head_draft": 0.0, "random_learned": 0.4, "adahi": 0.4, "learned": 0.4, "hybrid": 1.0,
    "target_on_device": 0.0,
}  # fmt: skip
LABELS = {"random_learned": "random", "head_draft": "head as draft", "target_on_device": "target on device"}


def study_ways(results: Kept, task: str, *, paired: bool = False) -> list[Way]:
    """The ways of a task; costs are shares of the target's time.

    Args:
        results: of the study.
        task: which.
        paired: only the training seeds that all ways have in common.
    """
    rows = [row for row in results["rows"] if row["task"] == task]
    common = set[str].intersection(*(set(row["seeds"]) for row in rows)) if paired and rows else None
    ways = []
    for row in rows:
        seeds = {seed: result for seed, result in row["seeds"].items() if common is None or seed in common}
        if seeds:
            rate = float(np.mean([result["rate"] for result in seeds.values()]))
            # A distilled draft takes the time of the plain one, whose network has the same shape.
            parts = results["times"][task]["parts"][row["draft"].rpartition("x")[2] or "1"]
            cost = device_cost(row["method"], parts, rate) / parts["target"]
            successes = {
                int(seed): {str(number): letter == "1" for number, letter in enumerate(result["successes"])}
                for seed, result in seeds.items()
            }
            ways.append(Way(row["draft"], row["method"], row["asked"], rate, cost, successes))
    return ways


def advice_of_package(by_task: Mapping[str, Sequence[Way]]) -> str:
    """For each task the recommendation from each share of the target's time on, as JSON."""
    advised: dict[str, list[list[Any]]] = {task: [] for task in by_task}
    for task, ways in by_task.items():
        for share in sorted({way.cost for way in ways}):
            choice, steps = choose(ways, share), advised[task]
            if choice is not None and (not steps or steps[-1][1] != str(choice)):
                steps.append([round(share, 4), str(choice)])
    return json.dumps(advised, indent=1) + "\n"


def advice(task: str, ways: Sequence[Way]) -> Iterator[dict[str, Any]]:
    """The recommendation from each budget on at which it changes."""
    previous: Way | None = None
    for budget in BUDGETS:
        choice = choose(ways, budget)
        if choice is not None and choice.way is not previous:
            previous = choice.way
            row = {"task": task, "budget": budget, "what": str(choice.way)}
            yield row | {"success": vars(choice.way.success), "best": str(choice.best)}


def gate_tests(by_task: Mapping[str, Sequence[Way]]) -> list[dict[str, Any]]:
    """Every gate against the random one with its rate, forced first step and limit, over all training seeds.

    Exact McNemar over the episodes, intervals over training seeds and episodes; one family over the whole study.
    """
    tests = []
    for task, of_task in by_task.items():
        ways = {(way.draft, way.method, way.requested): way for way in of_task}
        for (draft, gate, rate), way in ways.items():
            if gate in ("adahi", "uncertainty", "learned"):
                of_adahi = ways.get((draft, "random", rate)) if gate == "adahi" else None
                chance = of_adahi or ways[draft, "random_learned", rate]
                gained, p = behind(chance, way), contrast(outcomes(way), outcomes(chance)).p
                assert gained is not None
                tests.append({
                    "on": f"{task}, {draft}, rate {rate:g}", "measure": "success", "first": gate,
                    "second": chance.method, "p": p, "difference": vars(gained), "draft": draft.rpartition("x")[2],
                })  # fmt: skip
    sizes = [row["draft"] for row in tests]
    return [{**row, "draft": size} for row, size in zip(one_family(tests), sizes, strict=True)]


def outcomes(way: Way) -> NDArray[np.float64]:
    """The success of every episode of all training seeds, in order."""
    won = [way.successes[seed][name] for seed in sorted(way.successes) for name in sorted(way.successes[seed])]
    return np.array(won, np.float64)


def way_rows(by_task: Mapping[str, Sequence[Way]]) -> Iterator[dict[str, Any]]:
    """Every way with its success and cost."""
    for task, ways in by_task.items():
        for way in ways:
            yield {
                "task": task, "draft": way.draft or "-", "method": way.method, "asked": way.requested, "rate": way.rate,
                "cost": way.cost, "success": vars(way.success), "episodes": way.episodes, "seeds": list(way.successes),
            }  # fmt: skip


def report(kept: Kept, targets: Mapping[str, Any]) -> Report:
    """The study, and which targets fit."""
    tasks = list(dict.fromkeys(row["task"] for row in kept["rows"]))
    paired, every = ({task: study_ways(kept, task, paired=common) for task in tasks} for common in (True, False))
    tests = gate_tests(every)
    by_size = {size: [row for row in tests if row["draft"] == size] for size in SIZES}
    sizes = [
        {"size": size, "tests": len(rows), **{
            word: len(significant(rows, sign)) for word, sign in {"better": 1, "worse": -1}.items()
        }}
        for size, rows in by_size.items()
    ]  # fmt: skip
    fits = sorted(
        ({**row, "below": row["target_ms"] / row["chunk_ms"]} for row in named(targets["pairs"])),
        key=lambda row: float(row["below"]),
    )
    free = {task: without_server(ways) for task, ways in paired.items()}
    facts: dict[str, Any] = {
        "tests": len(tests), "drafts": len({(row["task"], row["draft"], seed) for row in kept["rows"] if row["draft"]
                                            for seed in row["seeds"]}),
        "better": sum(row["better"] for row in sizes), "worse": sum(row["worse"] for row in sizes),
        "smallest": sizes[0]["better"],
        "worse_on": ", ".join(f"`{row['first']}` on {row['on']}" for row in significant(tests, -1)),
        "second": fits[-2], "most": fits[-1], "free": free,
        "rate": DRAWN["learned"], "margin": MARGIN,
    }  # fmt: skip
    rows = {(row["task"], row["draft"], row["method"], row["asked"]): row for row in way_rows(every)}
    shares = {
        (task, draft): counts["draft"] / counts["target"]
        for task, drafts in kept["parameters"].items() for draft, counts in drafts.items()
    }  # fmt: skip
    named_ways = {
        "ball_x4": ("ball", "draft x4", "draft", 0.0), "ball_target": ("ball", "-", "target_on_device", 0.0),
        "camera_x4": ("pusht-camera", "distilled draft x4", "draft", 0.0),
        "pusht_distilled": ("pusht", "distilled draft x1", "draft", 0.0),
        "pusht_x1": ("pusht", "draft x1", "draft", 0.0),
    }  # fmt: skip
    facts |= {name: {**rows[key], "share": shares.get(key[:2])} for name, key in named_ways.items() if key in rows}
    tables = [
        Table("sizes", "Drafts by size, plain and distilled: contrasts of a gate with random, and how many show it "
              "better or worse.", "draft, times the recipe's | contrasts | better | worse",
              "x{size} | {tests} | {better} | {worse}", sizes),
        Table("advice", "The simplest way that is enough, from this share of the target's time on.",
              "task | from | what | success", "{task} | {budget:g} | {what} | {success:ci2}",
              [row for task, ways in paired.items() for row in advice(task, ways)]),
        Table("targets", "Medians of 100 rounds on one core, with nothing else on the machine; a target fits where it "
              "takes less time than its chunk lasts.",
              "pair | target, ms | draft, ms | a chunk lasts, ms | does not fit below, of this core",
              "`{name}` | {target_ms:.2f} | {draft_ms:.2f} | {chunk_ms:g} | {below:.2%}", fits),
        Table("ways", "Every way of the study: the cost is device time as a share of the target's; intervals over "
              "training seeds and episodes.", rows=list(way_rows(every))),
        contrast_table(tests, family="the study"),
    ]  # fmt: skip
    picture = Picture("budget.svg", lambda: draw(every, kept["parameters"]))
    return Report(tables, facts, [picture], also={TABLE: advice_of_package(paired)})


def draw(by_task: Mapping[str, Sequence[Way]], parameters: Mapping[str, Metrics]) -> Figure:
    """Success over the size of the plain drafts, a panel per task."""
    figure = Figure(figsize=(5.2, 5.8), layout="constrained")
    for axes, (task, ways) in zip(figure.subplots(2, 2).flat, by_task.items(), strict=True):
        series: dict[str, list[Point]] = {}
        for way in ways:
            if way.draft.startswith("distilled") or DRAWN.get(way.method) != way.requested:
                continue
            counts = parameters[task][way.draft or "draft x1"]
            share = counts["draft"] / counts["target"] if way.draft else 1.0
            success = way.success
            series.setdefault(way.method, []).append(Point(100 * share, success.mean, success.low, success.high))
        axes.set(xscale="log", ylim=(-0.03, 1.08), xlim=(0.1, 160.0))
        add_series(axes, {LABELS.get(n, n): series[n] for n in DRAWN if n in series}, "", "", task, lead=False)
        axes.set_xticks((0.1, 1, 10, 100), ("0.1", "1", "10", "100"))
        axes.minorticks_off()
    figure.supxlabel("parameters of the draft, % of the target's", fontsize=10)
    figure.supylabel("success, 95 % interval", fontsize=10)
    return figure
