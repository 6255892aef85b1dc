"""Ways to decode tokens side by side: what there is to gain on the target's path, and what it does to the task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from specact.families.tokens.decoding import DECODINGS
from specact.lab.report.drawing import INK, name_points
from specact.lab.report.tables import contrast_table

_FAMILIES = (
    ("greedy decoding", ("ar", "strict", "strict_last", "strict_bigram", "strict_draft"), "o"),
    ("Spec-VLA", ("specvla", "specvla_5", "specvla_15", "specvla_20", "specvla_uniform"), "s"),
    ("other drafters", ("last", "filter", "bigram", "draft_9", "random_tokens"), "v"),
    ("KERV", ("kerv", "kerv_printed", "kerv_fixed", "kerv_walk", "kerv_last", "kerv_no_tail"), "D"),
    ("HeiSD, memory", ("heisd", "heisd_verified", "heisd_fixed", "heisd_no_switch", "heisd_random", "retrieval"), "^"),
    ("unverified controls", ("last_fixed", "draft_fixed", "last_random"), "x"),
)


def gain_table(gain: Mapping[str, Any]) -> str:
    """Passes, accepted tokens and time of every decoding on the same inferences, as Markdown."""
    rows = [
        "| decoding | passes | accepted | without gripper | read | greedy's chunk | time of greedy decoding's |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in gain["decodings"].items():
        rows.append(
            f"| `{name}` | {found['passes']:.2f} | {found['accepted']:.2f} | {found['accepted_free']:.2f} | "
            f"{found['read']:.1f} | {found['greedy']:.2f} | {found['relative']:.2f} [{found['relative_low']:.2f}, "
            f"{found['relative_high']:.2f}] |"
        )
    return "\n".join(rows)


def loop_table(summary: Mapping[str, Any]) -> str:
    """Success, and what it took, of every method in closed loop, as Markdown."""
    rows = [
        "| method | success | verified | passes per inference | accepted per pass | compensated |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in summary["methods"].items():
        success = found["success"]
        rows.append(
            f"| `{name}` | {success['rate']:.2f} [{success['low']:.2f}, {success['high']:.2f}] | "
            f"{found['transmission_rate']:.2f} | {found['passes']:.2f} | {found['accepted_per_pass']:.2f} | "
            f"{found['compensated']:.2f} |"
        )
    return "\n".join(rows)


def told(summary: Mapping[str, Any], gain: Mapping[str, Any]) -> Iterator[str]:
    """The tables of one policy, with what they are of."""
    inferences = next(iter(gain["decodings"].values()))["inferences"]
    yield f"### {summary['bundle']}: {gain['tokens']} tokens for a chunk\n"
    yield f"On the target's own path, {inferences} inferences in {gain['episodes']} episodes (seed {gain['seed']}):\n"
    yield gain_table(gain) + "\n"
    yield f"In closed loop, {summary['episodes']} paired episodes each (seed {summary['seed']}):\n"
    yield loop_table(summary) + "\n"
    yield contrast_table(summary) + "\n"


def draw_tokens(summary: Mapping[str, Any]) -> Figure:
    """Success over passes of the target per inference, with 95 % intervals."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    marked: list[tuple[float, float, str]] = []
    for number, (label, names, marker) in enumerate(_FAMILIES):
        there = [name for name in names if name in summary["methods"]]
        points = [summary["methods"][name] for name in there]
        rates = [point["success"]["rate"] for point in points]
        reach = (
            [point["success"]["rate"] - point["success"]["low"] for point in points],
            [point["success"]["high"] - point["success"]["rate"] for point in points],
        )
        passes = [point["passes"] for point in points]
        if there:
            axes.errorbar(
                passes, rates, reach, fmt=marker, color=f"C{number}", markersize=6, elinewidth=0.7, label=label
            )
        marked += zip(passes, rates, there, strict=True)
    name_points(axes, marked)
    axes.set(xlabel="passes of the target's decoder per inference", ylabel="success", ylim=(-0.02, 1.04))
    axes.set_title(f"{summary['env']}, {summary['episodes']} paired episodes", fontsize=10, color=INK.light)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def legend() -> str:
    """What every decoding is, as Markdown."""
    return "\n".join(["| | |", "|---|---|", *(f"| `{name}` | {how.about} |" for name, how in DECODINGS.items())])
