"""Tables and figures of token decodings: speed-up on the target's own rollouts, and success in closed loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from specact.errors import DataError
from specact.families.tokens.decoding import DECODINGS
from specact.lab.report.drawing import INK, label_points
from specact.lab.report.tables import contrast_table, relative_text, success_text

_FEW = 9  # dimensions that fit a cell of a table
_FAMILIES = (
    ("greedy decoding", ("ar", "strict", "strict_last", "strict_bigram", "strict_draft"), "o"),
    ("Spec-VLA", ("specvla", "specvla_5", "specvla_15", "specvla_20", "specvla_uniform", "specvla_device"), "s"),
    ("other drafters", ("last", "filter", "bigram", "draft_9", "random_tokens", "perfect"), "v"),
    ("KERV", ("kerv", "kerv_printed", "kerv_fixed", "kerv_walk", "kerv_last", "kerv_no_tail"), "D"),
    ("HeiSD, memory", ("heisd", "heisd_verified", "heisd_fixed", "heisd_no_switch", "heisd_similar", "retrieval"), "^"),
    (
        "unverified controls",
        ("heisd_random", "heisd_fixed_random", "heisd_similar_random", "last_fixed", "draft_fixed", "last_random"),
        "x",
    ),
)


# Of the modelled link [ms].
ROUND_TRIP_MS = 20.0


def gain_table(gain: Mapping[str, Any]) -> str:
    """Passes, accepted tokens and time of every decoding on the same inferences, as Markdown.

    The last two columns are modelled: the measured times, plus a round trip for each inference, or for each pass, as a
    drafter needs it that reads the target's features on the other side of a link.
    """
    decodings = gain["decodings"]
    rows = [
        "| decoding | passes | accepted | without gripper | read | greedy's chunk | ms | time of greedy decoding's "
        f"| of it the proposal | with a round trip of {ROUND_TRIP_MS:g} ms | with one for each pass |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in decodings.items():
        rows.append(
            f"| `{name}` | {row['passes']:.2f} | {row['accepted']:.2f} | {row['accepted_free']:.2f} | "
            f"{row['read']:.1f} | {row['greedy']:.2f} | {row['ms']:.1f} | {relative_text(row)} | "
            f"{row['proposal']:.2f} | "
            f"{_over_link(row, decodings['ar'], each_pass=False):.2f} | "
            f"{_over_link(row, decodings['ar'], each_pass=True):.2f} |"
        )
    return "\n".join(rows)


def drafters_table(gain: Mapping[str, Any]) -> str:
    """Passes for a chunk with every drafter by itself at every tolerance, as Markdown.

    Raises:
        DataError: if they were not measured, as by earlier versions.
    """
    if "drafters" not in gain:
        raise DataError(
            f"the gain.json of {gain['bundle']} is of an earlier version, without drafters; remove it and run again"
        )
    tolerances = ["exact", *(f"{bins} bins" for bins in gain["tolerances"][1:])]
    rows = [f"| drafter | {' | '.join(tolerances)} |", "|---" * (len(tolerances) + 1) + "|"]
    for name, found in gain["drafters"].items():
        cells = zip(
            *(found[key] for key in ("passes", "passes_low", "passes_high", "accepted", "accepted_free")), strict=True
        )
        told = [
            f"{passes:.2f} [{low:.2f}, {high:.2f}]; {accepted:.1f}" + f", {free:.1f}" * bool(gain["strict"])
            for passes, low, high, accepted, free in cells
        ]
        rows.append(f"| {name} | {' | '.join(told)} |")
    return "\n".join(rows)


def _over_link(row: Mapping[str, float], greedy: Mapping[str, float], *, each_pass: bool) -> float:
    """Time of a decoding over that of greedy decoding, both with round trips."""
    times = [
        (one["passes"] if each_pass else 1.0) * ROUND_TRIP_MS + one["relative"] * greedy["ms"] for one in (row, greedy)
    ]
    return times[0] / times[1]


def closed_loop_table(summary: Mapping[str, Any]) -> str:
    """Success, score and passes of every method in closed loop, as Markdown."""
    scored = _has_score(summary)
    rows = [
        f"| method | success |{' score |' * scored} unverified | passes per inference | accepted per pass "
        "| compensated | tolerance [bins] | error of the tail, by dimension |",
        "|---" * (8 + scored) + "|",
    ]
    for name, metrics in summary["methods"].items():
        score = metrics["score"]
        mean = f"{score['mean']:.4g} [{score['low']:.4g}, {score['high']:.4g}] | "
        rows.append(
            f"| `{name}` | {success_text(metrics)} | {mean * scored}"
            f"{1.0 - metrics['transmission_rate']:.2f} | {metrics['passes']:.2f} | "
            f"{metrics['accepted_per_pass']:.2f} | {metrics['compensated']:.2f} | "
            f"{'' if metrics['tolerance'] is None else format(metrics['tolerance'], '.1f')} | "
            f"{_tail_text(metrics['tail_error'])} |"
        )
    return "\n".join(rows)


def _has_score(summary: Mapping[str, Any]) -> bool:
    """Whether an episode has a score besides its success."""
    return any(metrics["score"]["mean"] != metrics["success"]["rate"] for metrics in summary["methods"].values())


def _tail_text(errors: Sequence[float | None]) -> str:
    """Mean absolute errors of the dimensions (normalised units); of many their range."""
    known = [error for error in errors if error is not None]
    if not known:
        return ""
    if len(errors) > _FEW:
        return f"{min(known):.2f} to {max(known):.2f}"
    return " / ".join("-" if error is None else f"{error:.2f}" for error in errors)


def report_markdown(summary: Mapping[str, Any], gain: Mapping[str, Any]) -> Iterator[str]:
    """The section of one policy, as pieces of Markdown."""
    inferences = next(iter(gain["decodings"].values()))["inferences"]
    yield f"### {summary['bundle']}: {gain['tokens']} tokens for a chunk\n"
    yield f"On the target's own path, {inferences} inferences in {gain['episodes']} episodes (seed {gain['seed']}):\n"
    yield gain_table(gain) + "\n"
    without = " and accepted tokens other than the gripper's" if gain["strict"] else ""
    yield f"There, every drafter by itself at every tolerance: passes for a chunk; accepted tokens{without}:\n"
    yield drafters_table(gain) + "\n"
    yield f"In closed loop, {summary['episodes']} paired episodes each (seed {summary['seed']}):\n"
    yield closed_loop_table(summary) + "\n"
    yield contrast_table(summary, ("success", "score") if _has_score(summary) else ("success",)) + "\n"


def draw_tokens(summary: Mapping[str, Any]) -> Figure:
    """Success over passes of the target per inference, with 95 % intervals."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    labelled: list[tuple[float, float, str]] = []
    for number, (label, names, marker) in enumerate(_FAMILIES):
        present = [name for name in names if name in summary["methods"]]
        points = [summary["methods"][name] for name in present]
        rates = [point["success"]["rate"] for point in points]
        error_bars = (
            [point["success"]["rate"] - point["success"]["low"] for point in points],
            [point["success"]["high"] - point["success"]["rate"] for point in points],
        )
        passes = [point["passes"] for point in points]
        if present:
            axes.errorbar(
                passes, rates, error_bars, fmt=marker, color=f"C{number}", markersize=6, elinewidth=0.7, label=label
            )
        labelled += zip(passes, rates, present, strict=True)
    lowest = min(method["success"]["low"] for method in summary["methods"].values())
    axes.set(xlabel="passes of the target's decoder per inference", ylabel="success")
    # Labels need the space where all methods succeed often.
    axes.set_ylim(bottom=max(-0.02, lowest - 0.1), top=1.04)
    label_points(axes, labelled)
    axes.set_title(f"{summary['env']}, {summary['episodes']} paired episodes", fontsize=10, color=INK.light)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def methods_table() -> str:
    """The description of every decoding, as Markdown."""
    return "\n".join(
        ["| | |", "|---|---|", *(f"| `{name}` | {decoding.about} |" for name, decoding in DECODINGS.items())]
    )
