"""Tables and pictures of the study of device compute, and the recommendations that ``specact advise`` ships."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments.tables import interval_text, markdown
from specact.lab.evaluation.advice import HEAD_DRAFT, Way, behind, choose, device_cost, without_server
from specact.lab.report.figures import INK, legend_below, style_of
from specact.lab.rollout.methods import METHODS
from specact.lab.rollout.statistics import contrast, holm

# ``rows``, each with ``task``, ``draft`` (its size after an x, empty for the target), ``method``, ``asked`` and
# ``seeds``: by training seed the achieved ``rate``, and ``successes``, a letter 0 or 1 for every episode; ``times``: by
# task the ``parts`` of every size; and the ``parameters`` of every draft by task.
Kept = Mapping[str, Any]

# Device budgets that the advice is given for, as shares of the target's time.
BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def tables_of(results: Kept) -> dict[str, str]:
    """The parts of the page, by name."""
    tasks = tasks_of(results)
    paired = {task: study_ways(results, task, paired=True) for task in tasks}
    every = {task: study_ways(results, task) for task in tasks}
    return {
        "advice": "\n".join(f"- **{task}** ({_sample_sizes(ways)}): {advice(ways)}" for task, ways in paired.items()),
        "gates": gates(every),
        "choices": "\n\n".join(_choices(task, ways) for task, ways in paired.items()),
        "costs": costs(results, every),
        "results": "\n\n".join(_successes(task, ways) for task, ways in every.items()),
    }


def tasks_of(results: Kept) -> list[str]:
    """Tasks with results."""
    return list(dict.fromkeys(row["task"] for row in results["rows"]))


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
        seeds = {seed: found for seed, found in row["seeds"].items() if common is None or seed in common}
        if seeds:
            rate = float(np.mean([found["rate"] for found in seeds.values()]))
            # A distilled draft takes the time of the plain one, whose network has the same shape.
            parts = results["times"][task]["parts"][row["draft"].rpartition("x")[2] or "1"]
            cost = device_cost(row["method"], parts, rate) / parts["target"]
            successes = {
                int(seed): {str(number): one == "1" for number, one in enumerate(found["successes"])}
                for seed, found in seeds.items()
            }
            ways.append(Way(row["draft"], row["method"], row["asked"], rate, cost, successes))
    return ways


def advice_of_package(results: Kept) -> str:
    """By task the recommendation from each share of the target's time on, as JSON."""
    found: dict[str, list[list[Any]]] = {}
    for task in tasks_of(results):
        ways = study_ways(results, task, paired=True)
        steps: list[list[Any]] = []
        for share in sorted({way.cost for way in ways}):
            choice = choose(ways, share)
            if choice is not None and (not steps or steps[-1][1] != str(choice)):
                steps.append([round(share, 4), str(choice)])
        found[task] = steps
    return json.dumps(found, indent=1) + "\n"


def advice(ways: Sequence[Way]) -> str:
    """The recommendations for the budgets, as a sentence; successive ones that are the same are merged."""
    if not ways:
        return "not every method was evaluated at a common training seed"
    parts: list[str] = []
    previous: Way | None = None
    for budget in BUDGETS:
        choice = choose(ways, budget)
        if choice is not None and choice.way is not previous:
            previous = choice.way
            parts.append(f"from {budget:.2g} of the target's time on {choice}")
    least = without_server(ways)
    needed = "a server is needed at every budget"
    free = needed if least is None else f"nobody needs a server from {least:.2g} of the target's time on"
    return "; ".join([*parts, free])


def gates(by_task: Mapping[str, Sequence[Way]]) -> str:
    """Gates against the random gate with the same privileges: the contrasts that are significant over the whole study.

    Paired over the episodes of all training seeds, exact McNemar; Holm's correction over all gates, drafts, rates and
    tasks.
    """
    tests = []
    for task, of_task in by_task.items():
        ways = {(way.draft, way.method, way.asked): way for way in of_task}
        for (draft, gate, asked), way in ways.items():
            if gate in ("adahi", "uncertainty", "learned"):
                of_adahi = ways.get((draft, "random", asked)) if gate == "adahi" else None
                chance = of_adahi or ways[draft, "random_learned", asked]
                tests.append((task, way, chance, contrast(_outcomes(way), _outcomes(chance))))
    corrected, gains, rows = holm([one.p for *_, one in tests]), [], []
    for (task, way, chance, _), p in sorted(zip(tests, corrected, strict=True), key=lambda item: item[1]):
        gained = behind(chance, way)
        if p < 0.05 and gained is not None:
            gains.append(gained.mean)
            names = task, way.draft, f"{way.method} {way.asked:g}"
            rows.append([*names, _success(way), _success(chance), interval_text(vars(gained), 2, "+"), f"{p:.2g}"])
    table = markdown(["task", "draft", "gate", "success", "at random", "difference", "p (Holm)"], rows)
    positive = sum(gain > 0.0 for gain in gains)
    return f"{table}\n\n{len(gains)} of {len(tests)} contrasts, {positive} of them in favour of the gate."


def costs(results: Kept, by_task: Mapping[str, Sequence[Way]]) -> str:
    """Parameters, milliseconds of an inference, and time as a share of the target's."""
    methods = ("draft", "random_learned", "adahi", "uncertainty", "learned", HEAD_DRAFT)
    rows = []
    for task, drafts in results["parameters"].items():
        parts = results["times"][task]["parts"]
        target = next(iter(drafts.values()))["target"]
        rows.append([task, "target", f"{target:,}", "100%", f"{parts['1']['target']:.3f}", "1", *["-"] * 5])
        for draft, counts in drafts.items():
            cost = {way.method: f"{way.cost:.2f}" for way in by_task.get(task, ()) if way.draft == draft}
            share, ms = counts["draft"] / counts["target"], parts[draft.rpartition("x")[2]]["draft"]
            cells = [cost.get(method, "-") for method in methods]
            rows.append([task, draft, f"{counts['draft']:,}", f"{share:.2%}", f"{ms:.3f}", *cells])
    heads = (
        "task", "policy", "parameters", "of the target's", "ms", "alone", "random", "adahi", "uncertainty", "learned",
        "head alone",
    )  # fmt: skip
    return markdown(heads, rows)


def targets_table(targets: Mapping[str, Any]) -> str:
    """Times of target and draft, and the share of this core below which the target cannot keep up."""
    rows = []
    for name, of in sorted(targets["pairs"].items(), key=lambda item: item[1]["target_ms"] / item[1]["chunk_ms"]):
        target, draft, chunk = of["target_ms"], of["draft_ms"], of["chunk_ms"]
        drafts = ("-", "-") if draft is None else (f"{draft:.2f}", f"{draft / target:.3f}")
        rows.append([f"`{name}`", f"{target:.2f}", *drafts, f"{chunk:g}", f"{target / chunk:.2%} of this core"])
    heads = (
        "pair", "target, ms", "draft, ms", "of the target's", "a chunk lasts, ms", "the target does not fit below",
    )  # fmt: skip
    return markdown(heads, rows)


def _sample_sizes(ways: Sequence[Way]) -> str:
    """The numbers of seeds, episodes and ways."""
    seeds = sorted({seed for way in ways for seed in way.successes})
    each = sorted({way.episodes // len(way.successes) for way in ways})
    trained = f"training seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return f"{trained}, {'/'.join(map(str, each))} episodes each, {len(ways)} ways"


def _choices(task: str, ways: Sequence[Way]) -> str:
    """The recommended way at each budget (rows) and maximum transmission rate (columns)."""
    rates = sorted({way.asked for way in ways} | {0.0, 1.0})
    rows: list[list[str]] = []
    for budget in BUDGETS:
        found = [choose(ways, budget, rate) for rate in rates]
        cells = ["-" if one is None else f"{_label(one.way)}: {_success(one.way)}" for one in found]
        if not rows or rows[-1][1:] != cells:
            rows.append([f"from {budget:g}", *cells])
    return markdown([f"{task}: device budget", *(f"at most {rate:g} sent" for rate in rates)], rows)


def _successes(task: str, ways: Sequence[Way]) -> str:
    """The success of every way, with its interval."""
    order = list(METHODS)
    columns = sorted({(way.asked, order.index(way.method), way.method) for way in ways})
    rows = []
    for draft in dict.fromkeys(way.draft for way in ways):
        found = {(way.asked, way.method): _success(way) for way in ways if way.draft == draft}
        rows.append([draft or "target", *(found.get((asked, method), "") for asked, _, method in columns)])
    return markdown([task, *(f"{method}, {asked:g}" for asked, _, method in columns)], rows)


def _outcomes(way: Way) -> NDArray[np.float64]:
    """The success of every episode of all training seeds, in order."""
    won = [way.successes[seed][name] for seed in sorted(way.successes) for name in sorted(way.successes[seed])]
    return np.array(won, np.float64)


def _label(way: Way) -> str:
    """Draft, method, and the rate of gated methods."""
    rate = f" {way.asked:g}" if 0.0 < way.asked < 1.0 else ""
    return f"{way.draft}, {way.method}{rate}" if way.draft else way.method


def _success(way: Way) -> str:
    return interval_text(vars(way.success))


def draw_budget(task: str, ways: Sequence[Way]) -> Figure:
    """Success over cost: a panel per transmission rate, plain drafts above, distilled ones below.

    Points are ways with their 95 % intervals; lines join the draft sizes of one method. The vertical line is the
    target's own cost on the device, the horizontal one its success.
    """
    rates = sorted({way.asked for way in ways})
    target = next((way for way in ways if way.method == "target_on_device"), None)
    figure = Figure(figsize=(2.5 * len(rates) + 0.8, 6.2), layout="constrained")
    panels = figure.subplots(2, len(rates), sharex=True, sharey=True, squeeze=False)
    labelled = set[str]()
    for line, distilled in zip(panels, (False, True), strict=True):
        for axes, rate in zip(line, rates, strict=True):
            selected = [w for w in ways if w.asked == rate and w.draft and w.draft.startswith("distilled") == distilled]
            for method in dict.fromkeys(way.method for way in selected):
                points = sorted((way for way in selected if way.method == method), key=lambda way: way.cost)
                success = [way.success for way in points]
                bars = [one.mean - one.low for one in success], [one.high - one.mean for one in success]
                style = style_of(method)
                axes.errorbar(
                    [way.cost for way in points], [one.mean for one in success], bars, marker=style.marker,
                    color=style.colour, markersize=5, linewidth=1, elinewidth=0.8,
                    label=None if method in labelled else method.replace("_", " "),
                )  # fmt: skip
                labelled.add(method)
            if target is not None:
                colour = style_of("target_on_device").colour
                axes.axhline(target.success.mean, color=colour, linewidth=1, linestyle=":")
                about = None if "target" in labelled else "target (level: its success, line: its cost)"
                axes.axvline(1.0, color=colour, linewidth=1, label=about)
                labelled.add("target")
            axes.set(ylim=(-0.02, 1.04))
            if not distilled:
                sent = {0.0: "nothing sent", 1.0: "every inference sent"}.get(rate, f"{rate:.0%} asked for")
                axes.set_title(sent, fontsize=10, color=INK)
        line[0].set_ylabel(f"success, {'distilled' if distilled else 'plain'} drafts")
    panels[-1, len(rates) // 2].set_xlabel("device time of an inference, as a share of the target's")
    figure.suptitle(task, fontsize=11)
    legend_below(figure, columns=4)
    return figure
