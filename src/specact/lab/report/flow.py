"""FLASH beside its controls: what its check tells, what each round costs, and what both do to the task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from specact.families.flash.rounds import ROUNDS
from specact.lab.evaluation.flow_study import cost_of
from specact.lab.report.drawing import INK, name_points
from specact.lab.report.tables import contrast_table

_FAMILIES = (
    ("fewer steps", ("full", "full_5", "full_3", "full_2", "full_1"), "o"),
    ("FLASH", ("flash", "flash_fitted", "flash_unguarded", "flash_stale"), "s"),
    ("other drafts, checked", ("flash_last", "flash_last_fitted"), "v"),
    ("unchecked", ("block", "unchecked", "unchecked_fitted"), "x"),
)


def check_table(check: Mapping[str, Any]) -> str:
    """What the deviation says of the true error at each share of noise, as Markdown."""
    rows = [
        "| noise | slope | correlation | AUROC | passes .15: the target's own | the block's | another scene's |",
        "|---|---|---|---|---|---|---|",
    ]
    for level, found in check["levels"].items():
        rows.append(
            f"| {level} | {found['slope']:.2f} | {found['correlation']:.2f} | {found['auroc']:.2f} | "
            f"{found['accepted_own']:.2f} | {found['accepted_block']:.2f} | {found['accepted_wrong']:.2f} |"
        )
    return "\n".join(rows)


def costs_table(rounds: Mapping[str, Any]) -> str:
    """What each kind of round takes, as Markdown."""
    names = {
        "full_10": "full, 10 steps", "full_5": "full, 5 steps", "full_3": "full, 3 steps", "full_2": "full, 2 steps",
        "full_1": "full, 1 step", "check": "draft and check, accepted", "failed": "draft and check, then full",
        "given": "check of a chunk that is there", "stale": "draft and check on an old cache",
        "block": "encoder and draft alone",
    }  # fmt: skip
    rows = ["| round | ms (median) | of a full one |", "|---|---|---|"]
    for name, label in names.items():
        found = rounds["costs"][name]
        rows.append(
            f"| {label} | {found['ms']:.2f} | {found['relative']:.2f} [{found['relative_low']:.2f}, "
            f"{found['relative_high']:.2f}] |"
        )
    return "\n".join(rows)


def loop_table(summary: Mapping[str, Any], rounds: Mapping[str, Any]) -> str:
    """Success, and what it took, of every method in closed loop, as Markdown."""
    rows = [
        "| method | success | full rounds | failed checks | accepted per check | actions per round | ms per action | "
        "of `full` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = cost_of(ROUNDS["full"], summary["methods"]["full"], rounds["costs"])
    for name, found in summary["methods"].items():
        success, cost = found["success"], cost_of(ROUNDS[name], found, rounds["costs"])
        accepted = "-" if found["accepted"] is None else f"{found['accepted']:.1f}"
        rows.append(
            f"| `{name}` | {success['rate']:.2f} [{success['low']:.2f}, {success['high']:.2f}] | {found['full']:.2f} | "
            f"{found['failed']:.2f} | {accepted} | {found['actions_per_round']:.1f} | {cost:.3f} | {cost / base:.2f} |"
        )
    return "\n".join(rows)


def acceptance_table(rounds: Mapping[str, Any]) -> str:
    """Which share of the block's actions passes, as Markdown."""
    kinds = {
        "seen": "draft and flow see", "blank": "both see blank cameras", "blind": "the draft alone sees blank cameras",
    }  # fmt: skip
    there = [kind for kind in kinds if kind in rounds["acceptance"]["flash"]]
    rows = ["| check | " + " | ".join(kinds[kind] for kind in there) + " |", "|---" * (1 + len(there)) + "|"]
    for name, found in rounds["acceptance"].items():
        rows.append(f"| `{name}` | " + " | ".join(f"{found[kind]:.2f}" for kind in there) + " |")
    return "\n".join(rows)


def told(summary: Mapping[str, Any], rounds: Mapping[str, Any]) -> Iterator[str]:
    """The tables of one policy, with what they are of."""
    check, errors = rounds["check"], rounds["check"]["error"]
    yield f"### {summary['bundle']}\n"
    yield (
        f"The check on {check['windows']} held-out observations. Distances to the target's noiseless chunk in the "
        f"flow's units: its own samples {errors['own']:.2f}, the block's drafts {errors['block']:.2f}, its chunks for "
        f"another scene {errors['wrong']:.2f}. Fitted: {rounds['levels'][0]:g} of noise, within "
        f"{rounds['within']:.2f}.\n"
    )
    yield check_table(check) + "\n"
    yield (
        f"Accepted share of the executed actions, and the cost of rounds, on the target's own path "
        f"({rounds['inferences']} inferences in {rounds['episodes']} episodes, seed {summary['seed']}):\n"
    )
    yield acceptance_table(rounds) + "\n"
    yield costs_table(rounds) + "\n"
    yield f"In closed loop, {summary['episodes']} paired episodes each (seed {summary['seed']}):\n"
    yield loop_table(summary, rounds) + "\n"
    yield contrast_table(summary) + "\n"


def draw_flow(summary: Mapping[str, Any], rounds: Mapping[str, Any]) -> Figure:
    """Success over milliseconds per executed action, with 95 % intervals."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    marked: list[tuple[float, float, str]] = []
    for number, (label, names, marker) in enumerate(_FAMILIES):
        there = [name for name in names if name in summary["methods"]]
        points = [summary["methods"][name]["success"] for name in there]
        cost = [cost_of(ROUNDS[name], summary["methods"][name], rounds["costs"]) for name in there]
        reach = ([p["rate"] - p["low"] for p in points], [p["high"] - p["rate"] for p in points])
        if there:
            axes.errorbar(
                cost, [p["rate"] for p in points], reach, fmt=marker, color=f"C{number}", markersize=6,
                elinewidth=0.7, label=label,
            )  # fmt: skip
        marked += zip(cost, [point["rate"] for point in points], there, strict=True)
    name_points(axes, marked)
    axes.set(xlabel="ms per executed action (one core, one machine)", ylabel="success", ylim=(-0.02, 1.04))
    axes.margins(x=0.12)
    axes.set_xlim(left=0.0)
    axes.set_title(f"{summary['env']}, {summary['episodes']} paired episodes", fontsize=10, color=INK.light)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def legend() -> str:
    """What every way to a chunk is, as Markdown; those that keep a cache have a page of their own."""
    return "\n".join(
        ["| | |", "|---|---|", *(f"| `{name}` | {how.about} |" for name, how in ROUNDS.items() if how.reuse is None)]
    )
