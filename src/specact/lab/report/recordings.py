"""The report's tables and figures of a recording of ``specact run --record``: actions, their origins, and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from specact.lab.data.recordings import Recorded
from specact.lab.report.figures import MUTED, Drawing, blank, legend_below, style_of
from specact.lab.report.tables import NONE, Rows, Table
from specact.lab.rollout.steps import STAGES
from specact.types import Origin

_MOST_LINES = 6  # dimensions of an action in one figure
# The colour of an origin is that of the method with only that origin.
_STYLES = {
    "drafted": "draft", "accepted": "target", "replaced": "adahi", "compensated": "uncertainty",
    "retrieved": "learned_action", "fallback": "random",
}  # fmt: skip


def gaps_of_recording(recorded: Recorded) -> list[str]:
    """What a recording lacks."""
    judged = len(recorded.judged)
    candidates = (
        (not judged, "whether episodes succeeded: nobody judges what a real robot does, so nothing of it is recorded"),
        (0 < judged < len(recorded.episodes), f"whether every episode succeeded: {judged} were judged"),
        (not recorded.whole, "the end: the file is cut off, and what comes before that is shown"),
        (recorded.dropped > 0, f"{recorded.dropped} control steps that were dropped while it was written"),
        (not recorded.inferences and not _chunks(recorded), "inferences: none is recorded"),
        (True, "what the target would have said of skipped steps: true skip ratio and losses need a simulated run"),
    )
    return [what for missing, what in candidates if missing]


def tables_of(recorded: Recorded) -> Iterator[Table]:
    """Tables of a recording: control, inferences and their times, and origins of actions."""
    controls, rate_hz = [step.control for step in recorded.steps], recorded.about["rate_hz"]
    late, stall = (max((control[name] for control in controls), default=0.0) for name in ("late_s", "stall_s"))
    lost = int(sum(control["late_s"] for control in controls) * rate_hz + 1e-9)
    known = all("held" in control for control in controls)  # not in recordings of earlier versions
    still = (lost + sum(control.get("held", 0) for control in controls)) / max(1, lost + len(controls))
    scores = [verdict["score"] for verdict in recorded.judged.values()]
    won = sum(bool(verdict["success"]) for verdict in recorded.judged.values())
    yield _facts("control", f"Control, at {rate_hz:g} Hz", {
        "episodes": str(len(recorded.episodes)),
        "succeeded": f"{won} of {len(scores)}, mean score {np.mean(scores):.3f}" if scores else NONE,
        "periods": f"{len(controls):,}, {recorded.dropped} more were dropped from the recording",
        "lost periods": str(lost),
        "stood still": f"{still:.3f} of all periods" if known else NONE,
        "longest stall": f"{1e3 * stall:.1f} ms",
        "longest lateness": f"{1e3 * late:.1f} ms",
        "unusable observations": _counted(controls, "unusable"),
        "too old": f"{sum(not control['acted'] for control in controls)} actions, which were not sent to the robot",
    })  # fmt: skip
    if inferences := recorded.inferences:
        sent, verified, accepted = (
            sum(inference[name] for inference in inferences) for name in ("transmit", "verified", "accepted")
        )
        yield _facts("inferences", "Inferences", {
            "inferences": f"{len(inferences):,}",
            "sent": f"{sent:,}, {sent / len(inferences):.3f} of all",
            "why": _counted(inferences, "reason"),
            "missed": _counted(inferences, "miss"),
            "verified units": f"{verified:,}, {accepted / verified:.3f} accepted" if verified else NONE,
        })  # fmt: skip
        times = {stage: np.array([inference[f"{stage}_s"] for inference in inferences]) for stage in STAGES}
        yield _times({**times, "all": np.sum(list(times.values()), axis=0)})
    elif chunks := _chunks(recorded):
        taken = np.array([chunk["took_s"] for chunk in chunks if not chunk["miss"]])
        facts = {"inferences": f"{len(taken):,}", "missed": _counted(chunks, "miss")}
        yield _facts("inferences", "Inferences of a policy alone", facts)
        if len(taken):
            yield _times({"all": taken})
    origins = Counter(step.origin for step in recorded.steps if step.action is not None)
    names = [origin.name.lower() for origin in Origin if origins[origin.name.lower()]]
    rows = [(name, f"{origins[name]:,}", f"{origins[name] / origins.total():.3f}") for name in names]
    yield Table("origins", "Where executed actions came from", ["origin", "actions", "share"], rows)


def _facts(name: str, caption: str, facts: Mapping[str, str]) -> Table:
    return Table(name, caption, ["", "recorded"], list(facts.items()))


def _times(seconds: Mapping[str, Any]) -> Table:
    rows = [
        [stage, *(f"{1e3 * value:.3f}" for value in (np.mean(values), *np.quantile(values, (0.5, 0.95, 0.99))))]
        for stage, values in seconds.items()
    ]
    caption = "Times of an inference as it was waited for [ms]"
    return Table("stages", caption, ["stage", "mean", "p50", "p95", "p99"], rows)


def _counted(messages: list[dict[str, Any]], name: str) -> str:
    counts = Counter(message[name] for message in messages if message[name])
    return ", ".join(f"{value} {count}" for value, count in counts.items()) or "none"


def _chunks(recorded: Recorded) -> list[dict[str, Any]]:
    return [step.chunk for step in recorded.steps if step.chunk is not None]


def draw_recording(recorded: Recorded) -> Iterator[Drawing]:
    """Figures of the first episode's actions over time, and for pairs of the gate's scores."""
    if recorded.steps:
        yield _draw_actions(recorded)
    if recorded.inferences:
        yield _draw_scores(recorded)


def _draw_actions(recorded: Recorded) -> Drawing:
    steps = [step for step in recorded.episodes[0] if step.action is not None]
    actions = np.array([step.action for step in steps])
    time_s = np.array([step.at_s for step in steps]) - recorded.steps[0].at_s
    figure, axes = blank()
    width = actions.shape[1] if len(steps) else 0
    count = min(_MOST_LINES, width)
    for i in range(count):
        axes.plot(time_s, actions[:, i], color=MUTED, linewidth=0.8, alpha=1.0 - 0.12 * i)
    for origin, method in _STYLES.items():
        at = np.array([step.origin == origin for step in steps], bool)
        for i in range(count if at.any() else 0):
            label = None if i else origin
            axes.plot(time_s[at], actions[at, i], ".", color=style_of(method).colour, markersize=3, label=label)
    axes.set(xlabel="time [s]", ylabel="action, in the environment's units")
    legend_below(figure)
    caption = (
        f"{count} dimensions of {width}, every executed action of the first episode, coloured by where it came from. "
        "The CSV file holds every control step of the recording."
    )
    return Drawing("steps", "Actions and their origins", caption, figure, _steps(recorded))


def _steps(recorded: Recorded) -> Rows:
    """Every control step with its action, the action's origin, and its inference."""
    rows = []
    for step in recorded.steps:
        row: dict[str, Any] = {"step": step.number, "time_s": step.at_s - recorded.steps[0].at_s, **step.control}
        row |= {"origin": step.origin}
        row |= {f"action_{i}": float(value) for i, value in enumerate(() if step.action is None else step.action)}
        inference = {**(step.inference or {}), **(step.chunk or {})}
        row |= {f"inference.{name}": value for name, value in inference.items() if not isinstance(value, np.ndarray)}
        rows.append(row)
    return rows


def _draw_scores(recorded: Recorded) -> Drawing:
    inferences = recorded.inferences
    number = np.arange(len(inferences))
    scores, thresholds = (np.array([row[name] for row in inferences]) for name in ("score", "threshold"))
    sent, missed = (np.array([bool(row[name]) for row in inferences]) for name in ("transmit", "miss"))
    figure, axes = blank()
    for label, at, method in (
        ("skipped", ~sent, "draft"),
        ("sent", sent & ~missed, "adahi"),
        ("missed", missed, "random"),
    ):
        colour, marker = style_of(method)
        axes.plot(number[at], scores[at], marker, color=colour, markersize=4, label=label)
    # The gates never and always have infinite thresholds.
    axes.plot(number, np.where(np.isfinite(thresholds), thresholds, np.nan), "--", color=MUTED, label="threshold")
    axes.set(xlabel="inference", ylabel="score of the gate")
    legend_below(figure, columns=2)
    gate = recorded.about.get("gate", "unknown")
    caption = f"Gate {gate}: an inference asks above the threshold, and where it must."
    names = ("episode", "step", "score", "threshold", "reason", "transmit", "miss")
    rows = [{name: row[name] for name in names} for row in inferences]
    return Drawing("scores", "Scores of the gate", caption, figure, rows)
