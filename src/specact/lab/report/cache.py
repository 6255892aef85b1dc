"""Tables and figures of FreqCache and its controls: reuse, error, time and success."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from specact.families.flash.rounds import ROUNDS
from specact.lab.evaluation.cache_study import METHODS, VARIANTS
from specact.lab.report.drawing import INK
from specact.lab.report.tables import contrast_table, relative_text, success_text


def parts_table(reuse: Mapping[str, Any]) -> str:
    """The times of a full inference's parts, as Markdown; reuse saves a part of the prefix at most."""
    labels = {"encoder": "encoder", "prefix": "prefix", "expert": "one step of the expert", "full_10": "all, 10 steps"}
    rows = ["| part | ms (median) | of an inference in 10 steps |", "|---|---|---|"]
    rows += [
        f"| {label} | {reuse['costs'][name]['ms']:.2f} | {relative_text(reuse['costs'][name])} |"
        for name, label in labels.items()
    ]
    return "\n".join(rows)


def reuse_table(reuse: Mapping[str, Any]) -> str:
    """Reuse, error and time of each variant on the same observations, as Markdown."""
    rows = [
        "| | tokens reused | cosine of the cache | distance of the chunk | prefix, ms | inference, ms | of `full` |",
        "|---|---|---|---|---|---|---|",
    ]
    costs = reuse["costs"]
    for name in ("full_10", "full_5", "full_3", "full_2"):
        label = "full" if name == "full_10" else name
        spent = costs[name]
        rows.append(
            f"| `{label}` | 0 | 1 | - | {costs['prefix']['ms']:.2f} | {spent['ms']:.2f} | {relative_text(spent)} |"
        )
    for name in VARIANTS:
        variant, spent = reuse["variants"][name], costs[name]
        rows.append(
            f"| `{name}` | {variant['reused']:.2f} | {variant['cosine']:.3f} | {variant['distance']:.3f} | "
            f"{costs[f'{name}:prefix']['ms']:.2f} | {spent['ms']:.2f} | {relative_text(spent)} |"
        )
    return "\n".join(rows)


def closed_loop_table(summary: Mapping[str, Any]) -> str:
    """Success and reuse of every method in closed loop, as Markdown."""
    rows = [
        "| method | success | tokens reused | distance to `full` | actions per inference |",
        "|---|---|---|---|---|",
    ]
    for name, metrics in summary["methods"].items():
        rows.append(
            f"| `{name}` | {success_text(metrics)} | "
            f"{metrics['reused']:.2f} | {metrics['distance']:.3f} | {metrics['actions_per_round']:.1f} |"
        )
    return "\n".join(rows)


def report_markdown(summary: Mapping[str, Any], reuse: Mapping[str, Any]) -> Iterator[str]:
    """The section of one policy, as pieces of Markdown."""
    yield f"### {summary['bundle']}\n"
    for name, interval in (
        ("inference", "an inference every {execute} control steps"),
        ("step", "at every control step"),
    ):
        measured = reuse[name]
        yield (
            f"On the target's own path, {interval.format(execute=measured['execute'])} ({measured['inferences']} "
            f"inferences in {reuse['episodes']} episodes, seed {reuse['seed']}, without the first of each):\n"
        )
        if name == "inference":
            yield parts_table(measured) + "\n"
        yield (
            "; ".join(
                f"`{camera}` moves with confidence in {shares['confident']:.0%} of them, by half a patch or more in "
                f"{shares['moved']:.0%}"
                for camera, shares in measured["cameras"].items()
            )
            + ".\n"
        )
        yield reuse_table(measured) + "\n"
    yield f"In closed loop, {summary['episodes']} paired episodes each (seed {summary['seed']}):\n"
    yield closed_loop_table(summary) + "\n"
    yield contrast_table(summary) + "\n"


def draw_cache(summary: Mapping[str, Any], reuse: Mapping[str, Any]) -> Figure:
    """Success over the time of an inference, with 95 % intervals."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes, costs = figure.subplots(), reuse["inference"]["costs"]
    for number, (name, metrics) in enumerate(summary["methods"].items()):
        x = costs.get("full_10" if name == "full" else name)
        if x is None:
            continue
        point, marker = metrics["success"], "o" if name.startswith("full") else "s"
        error_bars = ([point["rate"] - point["low"]], [point["high"] - point["rate"]])
        axes.errorbar(
            [x["relative"]],
            [point["rate"]],
            error_bars,
            fmt=marker,
            color=f"C{number % 10}",
            markersize=6,
            elinewidth=0.7,
        )
        axes.annotate(
            name, (x["relative"], point["rate"]), (4, 4), textcoords="offset points", fontsize=7, color=INK.light
        )
    axes.set(xlabel="time of an inference, of one in 10 steps with a new prefix", ylabel="success", ylim=(-0.02, 1.04))
    axes.set_xlim(left=0.0)
    axes.set_title(f"{summary['env']}, {summary['episodes']} paired episodes", fontsize=10, color=INK.light)
    return figure


def methods_table() -> str:
    """The description of every method, as Markdown."""
    return "\n".join(["| | |", "|---|---|", *(f"| `{name}` | {ROUNDS[name].about} |" for name in METHODS)])
