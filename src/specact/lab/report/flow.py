"""Tables and figures of FLASH and its controls: quality of the check, cost of rounds, and success."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from specact.families.flash.rounds import ROUNDS
from specact.lab.evaluation.flow_study import cost_of
from specact.lab.report.drawing import INK, label_points
from specact.lab.report.tables import contrast_table, relative_text, success_text

_FAMILIES = (
    ("fewer steps", ("full", "full_5", "full_3", "full_2", "full_1"), "o"),
    ("FLASH", ("flash", "flash_fitted", "flash_unguarded", "flash_stale"), "s"),
    ("other drafts, checked", ("flash_last", "flash_last_fitted"), "v"),
    ("unchecked", ("block", "unchecked", "unchecked_fitted"), "x"),
)


def check_table(check: Mapping[str, Any]) -> str:
    """How well the deviation predicts the true error at each noise level, as Markdown."""
    rows = [
        "| noise | slope | correlation | AUROC | passes .15: the target's own | the block's | another scene's |",
        "|---|---|---|---|---|---|---|",
    ]
    for level, row in check["levels"].items():
        rows.append(
            f"| {level} | {row['slope']:.2f} | {row['correlation']:.2f} | {row['auroc']:.2f} | "
            f"{row['accepted_own']:.2f} | {row['accepted_block']:.2f} | {row['accepted_wrong']:.2f} |"
        )
    return "\n".join(rows)


def costs_table(rounds: Mapping[str, Any]) -> str:
    """The time of each kind of round, as Markdown."""
    names = {
        "full_10": "full, 10 steps", "full_5": "full, 5 steps", "full_3": "full, 3 steps", "full_2": "full, 2 steps",
        "full_1": "full, 1 step", "check": "draft and check, accepted", "failed": "draft and check, then full",
        "given": "check of a chunk that is there", "stale": "draft and check on an old cache",
        "block": "encoder and draft alone",
    }  # fmt: skip
    rows = ["| round | ms (median) | of a full one |", "|---|---|---|"]
    for name, label in names.items():
        cost = rounds["costs"][name]
        rows.append(f"| {label} | {cost['ms']:.2f} | {relative_text(cost)} |")
    return "\n".join(rows)


def closed_loop_table(summary: Mapping[str, Any], rounds: Mapping[str, Any]) -> str:
    """Success, rounds and cost of every method in closed loop, as Markdown."""
    rows = [
        "| method | success | full rounds | failed checks | accepted per check | actions per round | ms per action | "
        "of `full` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = cost_of(ROUNDS["full"], summary["methods"]["full"], rounds["costs"])
    for name, metrics in summary["methods"].items():
        cost = cost_of(ROUNDS[name], metrics, rounds["costs"])
        accepted = "-" if metrics["accepted"] is None else f"{metrics['accepted']:.1f}"
        rows.append(
            f"| `{name}` | {success_text(metrics)} | {metrics['full']:.2f} | {metrics['failed']:.2f} | {accepted} | "
            f"{metrics['actions_per_round']:.1f} | {cost:.3f} | {cost / base:.2f} |"
        )
    return "\n".join(rows)


def acceptance_table(rounds: Mapping[str, Any]) -> str:
    """The accepted share of the block's actions, as Markdown."""
    kinds = {
        "seen": "draft and flow see", "blank": "both see blank cameras", "blind": "the draft alone sees blank cameras",
    }  # fmt: skip
    kinds_measured = [kind for kind in kinds if kind in rounds["acceptance"]["flash"]]
    rows = [
        "| check | " + " | ".join(kinds[kind] for kind in kinds_measured) + " |",
        "|---" * (1 + len(kinds_measured)) + "|",
    ]
    for name, shares in rounds["acceptance"].items():
        rows.append(f"| `{name}` | " + " | ".join(f"{shares[kind]:.2f}" for kind in kinds_measured) + " |")
    return "\n".join(rows)


def report_markdown(summary: Mapping[str, Any], rounds: Mapping[str, Any]) -> Iterator[str]:
    """The section of one policy, as pieces of Markdown."""
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
    yield closed_loop_table(summary, rounds) + "\n"
    yield contrast_table(summary) + "\n"


def draw_flow(summary: Mapping[str, Any], rounds: Mapping[str, Any]) -> Figure:
    """Success over milliseconds per executed action, with 95 % intervals."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    labelled: list[tuple[float, float, str]] = []
    for number, (label, names, marker) in enumerate(_FAMILIES):
        present = [name for name in names if name in summary["methods"]]
        points = [summary["methods"][name]["success"] for name in present]
        cost = [cost_of(ROUNDS[name], summary["methods"][name], rounds["costs"]) for name in present]
        error_bars = ([p["rate"] - p["low"] for p in points], [p["high"] - p["rate"] for p in points])
        if present:
            axes.errorbar(
                cost, [p["rate"] for p in points], error_bars, fmt=marker, color=f"C{number}", markersize=6,
                elinewidth=0.7, label=label,
            )  # fmt: skip
        labelled += zip(cost, [point["rate"] for point in points], present, strict=True)
    axes.set(xlabel="ms per executed action (one core, one machine)", ylabel="success", ylim=(-0.02, 1.04))
    label_points(axes, labelled)
    axes.margins(x=0.12)
    axes.set_xlim(left=0.0)
    axes.set_title(f"{summary['env']}, {summary['episodes']} paired episodes", fontsize=10, color=INK.light)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def methods_table() -> str:
    """The description of every method without a cache, as Markdown; those with one are in :mod:`.cache`."""
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            *(f"| `{name}` | {rounds.about} |" for name, rounds in ROUNDS.items() if rounds.reuse is None),
        ]
    )
