"""The report's tables and figures of a recording of ``specact run --record``: actions, their origins, and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specact.lab.data.recordings import Recorded
from specact.lab.report.drawing import MUTED, Drawing, Rows, blank, legend_below, style_of
from specact.lab.report.missing import Gap
from specact.lab.report.tables import NONE, Table
from specact.lab.rollout.steps import STAGES
from specact.types import Origin

_MOST_LINES = 6  # dimensions of an action in one figure
# The colour of an origin is that of the method with only that origin.
_STYLES = {
    "drafted": "draft", "accepted": "target", "replaced": "adahi", "compensated": "uncertainty",
    "retrieved": "learned_action", "fallback": "random",
}  # fmt: skip


def gaps_of_recording(recorded: Recorded) -> list[Gap]:
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
    return [Gap(what) for missing, what in candidates if missing]


def tables_of(recorded: Recorded) -> list[tuple[str, Table]]:
    """Tables of a recording, each with part of its file name."""
    tables = [("control", _control(recorded)), ("origins", _origins(recorded))]
    if recorded.inferences:
        tables += [("inferences", _inferences(recorded)), ("stages", _stages(recorded))]
    elif _chunks(recorded):
        tables.append(("inferences", _chunk_inferences(recorded)))
    return tables


def steps_rows(recorded: Recorded) -> Rows:
    """Every control step with its action, the action's origin, and its inference."""
    began = recorded.steps[0].at_s if recorded.steps else 0.0
    rows = []
    for step in recorded.steps:
        row: dict[str, Any] = {"step": step.number, "time_s": step.at_s - began, **step.control, "origin": step.origin}
        row |= {f"action_{i}": float(value) for i, value in enumerate(() if step.action is None else step.action)}
        for source in (step.inference, step.chunk):
            row |= {
                f"inference.{name}": value
                for name, value in (source or {}).items()
                if not isinstance(value, np.ndarray)
            }
        rows.append(row)
    return rows


def draw_recording(recorded: Recorded) -> Iterator[Drawing]:
    """Figures of the first episode's actions over time, and for pairs of the gate's scores."""
    if recorded.steps:
        yield _draw_actions(recorded)
    if recorded.inferences:
        yield _draw_scores(recorded)


def _control(recorded: Recorded) -> Table:
    controls = [step.control for step in recorded.steps]
    unusable = Counter(control["unusable"] for control in controls if control["unusable"])
    late, stall = (max((control[name] for control in controls), default=0.0) for name in ("late_s", "stall_s"))
    won = sum(bool(each["success"]) for each in recorded.judged.values())
    scores = [each["score"] for each in recorded.judged.values()]
    rows: list[tuple[str, list[str]]] = [
        ("episodes", [str(len(recorded.episodes))]),
        ("succeeded", [f"{won} of {len(scores)}, mean score {np.mean(scores):.3f}" if scores else NONE]),
        ("control steps", [f"{len(controls):,}, {recorded.dropped} more were dropped from the recording"]),
        ("longest lateness", [f"{1e3 * late:.1f} ms"]),
        ("longest wait for an action", [f"{1e3 * stall:.1f} ms"]),
        ("observations that could not be used", [_counted(unusable)]),
        ("actions too old to be sent", [str(sum(not control["acted"] for control in controls))]),
    ]
    return Table(f"Control, at {recorded.about['rate_hz']:g} Hz", ["", "recorded"], rows)


def _origins(recorded: Recorded) -> Table:
    count = Counter(step.origin for step in recorded.steps if step.action is not None)
    names = [origin.name.lower() for origin in Origin if count[origin.name.lower()]]
    rows = [(name, [f"{count[name]:,}", f"{count[name] / count.total():.3f}"]) for name in names]
    return Table("Where executed actions came from", ["origin", "actions", "share"], rows)


def _inferences(recorded: Recorded) -> Table:
    inferences = recorded.inferences
    sent = [each for each in inferences if each["transmit"]]
    verified, accepted = (sum(each[name] for each in inferences) for name in ("verified", "accepted"))
    rows: list[tuple[str, list[str]]] = [
        ("inferences", [f"{len(inferences):,}"]),
        ("transmitted", [f"{len(sent):,}, {len(sent) / len(inferences):.3f} of all"]),
        ("why", [_counted(Counter(each["reason"] for each in inferences))]),
        ("missed", [_counted(Counter(each["miss"] for each in inferences if each["miss"]))]),
        ("verified units", [f"{verified:,}, {accepted / verified:.3f} accepted" if verified else NONE]),
    ]
    return Table("Inferences", ["", "recorded"], rows)


def _stages(recorded: Recorded) -> Table:
    inferences = recorded.inferences
    times = {stage: np.array([each[f"{stage}_s"] for each in inferences]) for stage in STAGES}
    times["all"] = np.sum(list(times.values()), axis=0)
    rows = [(stage, _quantiles(seconds)) for stage, seconds in times.items()]
    return Table("Times of an inference as it was waited for [ms]", ["stage", "mean", "p50", "p95", "p99"], rows)


def _chunk_inferences(recorded: Recorded) -> Table:
    found = _chunks(recorded)
    taken = np.array([each["took_s"] for each in found if not each["miss"]])
    rows: list[tuple[str, list[str]]] = [
        ("inferences", [f"{len(taken):,}"]),
        ("missed", [_counted(Counter(each["miss"] for each in found if each["miss"]))]),
        ("mean, p50, p95, p99", [" / ".join(_quantiles(taken)) + " ms" if len(taken) else NONE]),
    ]
    return Table("Inferences of a policy alone", ["", "recorded"], rows)


def _chunks(recorded: Recorded) -> list[dict[str, Any]]:
    return [step.chunk for step in recorded.steps if step.chunk is not None]


def _draw_actions(recorded: Recorded) -> Drawing:
    steps = [step for step in recorded.episodes[0] if step.action is not None]
    actions = np.array([step.action for step in steps])
    time_s = np.array([step.at_s for step in steps]) - recorded.steps[0].at_s
    figure, axes = blank()
    shown = min(_MOST_LINES, actions.shape[1] if len(steps) else 0)
    for i in range(shown):
        axes.plot(time_s, actions[:, i], color=MUTED.light, linewidth=0.8, alpha=1.0 - 0.12 * i)
    for origin, method in _STYLES.items():
        at = np.array([step.origin == origin for step in steps], bool)
        for i in range(shown if at.any() else 0):
            axes.plot(
                time_s[at], actions[at, i], ".", color=style_of(method).light, markersize=3, label=None if i else origin
            )
    axes.set(xlabel="time [s]", ylabel="action, in the environment's units")
    legend_below(figure)
    caption = (
        f"{shown} dimensions of {actions.shape[1] if len(steps) else 0}, every executed action of the first episode, "
        "coloured by where it came from."
    )
    rows = [
        {"time_s": float(at), "origin": step.origin, **{f"action_{i}": float(a) for i, a in enumerate(action)}}
        for at, step, action in zip(time_s, steps, actions, strict=True)
    ]
    return Drawing("actions", "Actions and their origins", caption, figure, rows)


def _draw_scores(recorded: Recorded) -> Drawing:
    inferences = recorded.inferences
    number = np.arange(len(inferences))
    scores, thresholds = (np.array([each[name] for each in inferences]) for name in ("score", "threshold"))
    sent, missed = (np.array([bool(each[name]) for each in inferences]) for name in ("transmit", "miss"))
    figure, axes = blank()
    for label, at, method, marker in (
        ("skipped", ~sent, "draft", "v"),
        ("transmitted", sent & ~missed, "adahi", "o"),
        ("missed", missed, "random", "X"),
    ):
        axes.plot(number[at], scores[at], marker, color=style_of(method).light, markersize=4, label=label)
    # The gates never and always have infinite thresholds.
    axes.plot(number, np.where(np.isfinite(thresholds), thresholds, np.nan), "--", color=MUTED.light, label="threshold")
    axes.set(xlabel="inference", ylabel="score of the gate")
    legend_below(figure, columns=2)
    gate = recorded.about.get("gate", "unknown")
    caption = f"Gate {gate}: a step is transmitted above the threshold, and where it is forced."
    rows = [
        {name: each[name] for name in ("episode", "step", "score", "threshold", "reason", "transmit", "miss")}
        for each in inferences
    ]
    return Drawing("scores", "Scores of the gate", caption, figure, rows)


def _quantiles(seconds: Any) -> Sequence[str]:
    return [f"{1e3 * value:.3f}" for value in (np.mean(seconds), *np.quantile(seconds, (0.5, 0.95, 0.99)))]


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
