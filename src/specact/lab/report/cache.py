"""FreqCache beside its controls: what it reuses and changes, what that takes, and what both do to the task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from specact.families.flash.rounds import ROUNDS
from specact.lab.evaluation.cache_study import METHODS, VARIANTS
from specact.lab.report.drawing import INK
from specact.lab.report.tables import contrast_table


def parts_table(found: Mapping[str, Any]) -> str:
    """What the parts of a full inference take, as Markdown: reuse saves a part of the prefix at most."""
    labels = {"encoder": "encoder", "prefix": "prefix", "expert": "one step of the expert", "full_10": "all, 10 steps"}
    rows = ["| part | ms (median) | of an inference in 10 steps |", "|---|---|---|"]
    rows += [
        f"| {label} | {found['costs'][name]['ms']:.2f} | {_ratio(found['costs'][name])} |"
        for name, label in labels.items()
    ]
    return "\n".join(rows)


def reuse_table(found: Mapping[str, Any]) -> str:
    """What each variant reuses, changes and takes on the same observations, as Markdown."""
    rows = [
        "| | tokens reused | cosine of the cache | distance of the chunk | prefix, ms | inference, ms | of `full` |",
        "|---|---|---|---|---|---|---|",
    ]
    costs = found["costs"]
    for name in ("full_10", "full_5", "full_3", "full_2"):
        called = "full" if name == "full_10" else name
        spent = costs[name]
        rows.append(f"| `{called}` | 0 | 1 | - | {costs['prefix']['ms']:.2f} | {spent['ms']:.2f} | {_ratio(spent)} |")
    for name in VARIANTS:
        told, spent = found["variants"][name], costs[name]
        rows.append(
            f"| `{name}` | {told['reused']:.2f} | {told['cosine']:.3f} | {told['distance']:.3f} | "
            f"{costs[f'{name}:prefix']['ms']:.2f} | {spent['ms']:.2f} | {_ratio(spent)} |"
        )
    return "\n".join(rows)


def loop_table(summary: Mapping[str, Any]) -> str:
    """Success, and what was reused, of every method in closed loop, as Markdown."""
    rows = [
        "| method | success | tokens reused | distance to `full` | actions per inference |",
        "|---|---|---|---|---|",
    ]
    for name, found in summary["methods"].items():
        success = found["success"]
        rows.append(
            f"| `{name}` | {success['rate']:.2f} [{success['low']:.2f}, {success['high']:.2f}] | "
            f"{found['reused']:.2f} | {found['distance']:.3f} | {found['actions_per_round']:.1f} |"
        )
    return "\n".join(rows)


def told(summary: Mapping[str, Any], reuse: Mapping[str, Any]) -> Iterator[str]:
    """The tables of one policy, with what they are of."""
    yield f"### {summary['bundle']}\n"
    for name, every in (("inference", "an inference every {execute} control steps"), ("step", "at every control step")):
        found = reuse[name]
        yield (
            f"On the target's own path, {every.format(execute=found['execute'])} ({found['inferences']} inferences in "
            f"{reuse['episodes']} episodes, seed {reuse['seed']}, without the first of each):\n"
        )
        if name == "inference":
            yield parts_table(found) + "\n"
        yield (
            "; ".join(
                f"`{camera}` moves with confidence in {told['confident']:.0%} of them, by half a patch or more in "
                f"{told['moved']:.0%}"
                for camera, told in found["cameras"].items()
            )
            + ".\n"
        )
        yield reuse_table(found) + "\n"
    yield f"In closed loop, {summary['episodes']} paired episodes each (seed {summary['seed']}):\n"
    yield loop_table(summary) + "\n"
    yield contrast_table(summary) + "\n"


def draw_cache(summary: Mapping[str, Any], reuse: Mapping[str, Any]) -> Figure:
    """Success over the time of an inference, with 95 % intervals."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes, costs = figure.subplots(), reuse["inference"]["costs"]
    for number, (name, found) in enumerate(summary["methods"].items()):
        x = costs.get("full_10" if name == "full" else name)
        if x is None:
            continue
        point, marker = found["success"], "o" if name.startswith("full") else "s"
        reach = ([point["rate"] - point["low"]], [point["high"] - point["rate"]])
        axes.errorbar(
            [x["relative"]], [point["rate"]], reach, fmt=marker, color=f"C{number % 10}", markersize=6, elinewidth=0.7
        )
        axes.annotate(
            name, (x["relative"], point["rate"]), (4, 4), textcoords="offset points", fontsize=7, color=INK.light
        )
    axes.set(xlabel="time of an inference, of one in 10 steps with a new prefix", ylabel="success", ylim=(-0.02, 1.04))
    axes.set_xlim(left=0.0)
    axes.set_title(f"{summary['env']}, {summary['episodes']} paired episodes", fontsize=10, color=INK.light)
    return figure


def legend() -> str:
    """What every method is, as Markdown."""
    return "\n".join(["| | |", "|---|---|", *(f"| `{name}` | {ROUNDS[name].about} |" for name in METHODS)])


def _ratio(found: Mapping[str, float]) -> str:
    return f"{found['relative']:.2f} [{found['relative_low']:.2f}, {found['relative_high']:.2f}]"
