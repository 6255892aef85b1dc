"""The tables of a report: formatted for the page, and unrounded for CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specact.lab.evaluation.runs import Run, Study
from specact.lab.rollout.methods import METHODS

Metrics = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

NONE = "\N{EN DASH}"
# Lines, each with a note below it.
Noted = tuple[tuple[str, str], ...]
Cell = str | Noted


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        name: part of the name of its file; caption: above it.
        heads, rows: of its columns, and cells.
        data: the rows of its file; the cells if empty.
        hints: explanations of columns, by heading.
    """

    name: str
    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    data: Rows = ()
    hints: Mapping[str, str] = field(default_factory=dict)

    @property
    def csv(self) -> Rows:
        """The rows of its file."""
        return self.data or [dict(zip(self.heads, row, strict=True)) for row in self.rows]


def as_csv(rows: Rows) -> bytes:
    """Rows with the union of their columns, in order of occurrence; a missing value is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def networks_of(methods: Iterable[Metrics]) -> dict[str, str]:
    """Parameters, and time of one inference at batch 1, of the networks that methods evaluate, each as the first says.

    Returns:
        A text such as ``8.42 k, 0.081 ms``, by ``draft``, ``head`` and ``target``.
    """
    costs = [metrics.get("cost", {}) for metrics in methods]
    networks = {}
    for part in ("draft", "head", "target"):
        if cost := next((cost for cost in costs if cost.get(f"{part}_parameters")), None):
            networks[part] = f"{_in_short(cost[f'{part}_parameters'])}, {cost[f'{part}_ms']:.2g} ms"
    return networks


def _in_short(parameters: int) -> str:
    """Three digits with a unit: 8.42 k, 119 k, 1.02 M."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if parameters >= 0.9995 * size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)


def _number(path: str, digits: int = 3) -> Callable[[Metrics], Cell]:
    """A cell of the number at a dotted path."""

    def cell(metrics: Metrics) -> Cell:
        value: Any = metrics
        for name in path.split("."):
            value = None if value is None else value.get(name)
        return NONE if value is None else f"{value:,.{digits}f}"

    return cell


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _interval(interval: Metrics, after: str = "") -> Noted:
    mean = interval["rate"] if "rate" in interval else interval["mean"]
    return ((f"{mean:.3f}{after}", f"{interval['low']:.3f} to {interval['high']:.3f}"),)


def _rates(name: str, text: str) -> Callable[[Metrics], Cell]:
    def cell(metrics: Metrics) -> Cell:
        rates = metrics.get(name, {})
        return tuple(pair for key, rate in rates.items() for pair in _interval(rate, f" {text}{key}")) or NONE

    return cell


def _networks(metrics: Metrics) -> Cell:
    lines = [f"{name} {text}" for name, text in networks_of([metrics]).items()]
    if gate_ms := metrics.get("cost", {}).get("gate_ms"):
        lines.append(f"gate {gate_ms:.2g} ms")
    return tuple(("", line) for line in lines) or NONE


# Heading, explanation and cell of every column of the table of methods; those that a run has no value for are left out.
COLUMNS: tuple[tuple[str, str, Callable[[Metrics], Cell]], ...] = (
    ("success", "share of episodes that succeeded, with Wilson's 95 % interval", lambda m: _interval(m["success"])),
    ("success at", "the same for another threshold on the score", _rates("success_at", "above ")),
    ("tasks", "the same for each task of a suite", _rates("tasks", "")),
    ("score", "mean score of an episode, with a 95 % interval", lambda m: _interval(m["score"])),
    (
        "MSE", "squared error along held-out demonstrations, summed over the action's dimensions, in normalised units",
        lambda m: _interval(m["mse"]) if m.get("mse") else NONE,
    ),
    (
        "networks", "parameters, and milliseconds of one inference at batch 1, of every network that the method "
        "evaluates; the gate's are those of one decision", _networks,
    ),
    ("sent", "share of inferences that asked the target (transmission rate, TR)", _number("sent")),
    (
        "true skip", "true skip ratio (TSR): share of skipped steps whose codes the target would have kept",
        _number("true_skip_ratio"),
    ),
    ("accepted", "share of all steps whose codes the target keeps, or would have kept", _number("acceptance.all")),
    (
        "gated loss", "share of steps that were not verified and would have been rejected, (1 - TR)(1 - TSR)",
        _number("gated_loss"),
    ),
    (
        "gate efficiency",
        "(loss of random - loss) / (loss of random - loss of the oracle) at equal rate: 0 is chance, 1 the oracle",
        _number("gate_efficiency", 2),
    ),
    (
        "choice", "the same among the steps that the gate itself met: 0 is chance, 1 the best choice of as many skips",
        _number("choice_efficiency", 2),
    ),
    ("distance", "mean distance of the draft's chunk to the target's", _number("distance")),
    ("prefix", "actions of the draft before the first one outside the target's tolerance", _number("prefix", 2)),
    ("passes", "of the target's decoder per inference", _number("passes", 2)),
    ("accepted per pass", "drafted tokens that a pass accepts, after the one over the prefix",
     _number("accepted_per_pass", 2)),
    ("greedy", "share of verified inferences that equal greedy decoding of the target", _number("greedy")),
    ("compensated", "share of inferences with compensated tokens", _number("compensated")),
    ("tolerance", "bins by which an accepted token may differ from the target's", _number("tolerance", 2)),
    ("full", "share of rounds that denoised", _number("full")),
    ("failed", "share of rounds that denoised after a check that accepted nothing", _number("failed")),
    ("actions per round", "of the chunk that a round gives", _number("actions_per_round", 2)),
    ("reused", "share of the cameras' tokens that were taken from the cache", _number("reused")),
    (
        "action change", "action change loss: mean distance, over skipped steps, to the action verification would have "
        "given", _number("action_change_loss"),
    ),
    ("ms per action", "time spent on choosing actions / actions", lambda m: _ms(m["latency"]["per_action_ms"])),
    ("actions/s", "its inverse", _number("latency.actions_per_s", 1)),
    (
        "p50 / p99 ms", "quantiles of the time of one inference",
        lambda m: f"{_ms(m['latency']['inference_p50_ms'])} / {_ms(m['latency']['inference_p99_ms'])}",
    ),
)  # fmt: skip
SUMMARY_METHODS = (
    "draft", "head_draft", "random", "adahi", "learned", "hybrid", "target", "target_on_device", "ar", "specvla",
    "kerv", "heisd", "full", "full_2", "flash", "freqcache",
)  # fmt: skip


def methods_table(run: Run) -> Table:
    """All methods of a run; empty columns are left out."""
    columns: dict[str, list[Cell]] = {}
    for head, _, cell in COLUMNS:
        cells = [cell(metrics) for metrics in run.methods.values()]
        if set(cells) != {NONE} and not (head == "score" and run.binary):
            columns[head] = cells
    names = [((name, METHODS[name].about if name in METHODS else ""),) for name in run.methods]
    caption = f"Methods, on the same {run.summary['episodes']} episodes. Score: {run.summary['score']}."
    rows, hints = list(zip(names, *columns.values(), strict=True)), {head: hint for head, hint, _ in COLUMNS}
    return Table("methods", caption, ["method", *columns], rows, methods_rows(run), hints)


def methods_rows(run: Run) -> Rows:
    """Every number of every method, as in summary.json."""
    return [{"method": method, **flat(metrics)} for method, metrics in run.methods.items()]


def contrasts_table(run: Run) -> Table:
    """Paired contrasts of a run; of p-values the corrected one, and as its note the uncorrected one with its test."""
    ends = ("success",) if run.binary else ("success", "score")
    rows: list[list[Cell]] = []
    for row in run.summary["contrasts"]:
        cells: list[Cell] = [f"{row['first']} \N{MINUS SIGN} {row['second']}"]
        for test in (row[end] for end in ends):
            cells.append(((f"{test['difference']:+.3f}", f"{test['low']:+.3f} to {test['high']:+.3f}"),))
            cells.append(((f"p = {test['p_holm']:.2g}", f"alone {test['p']:.2g}, {test['test']}"),))
        rows.append(cells)
    heads = [head for end in ends for head in (f"{end}, difference and 95 % interval", "paired test, Holm")]
    caption = f"Paired contrasts, episode by episode; p after Holm's correction over the {len(rows)} of this table"
    return Table("contrasts", caption, ["contrast", *heads], rows, [flat(row) for row in run.summary["contrasts"]])


def summary_table(studies: Sequence[Study]) -> Table:
    """A row per pair: success of the methods that pairs of its family are compared by."""
    present = [name for name in SUMMARY_METHODS if any(name in study.table.methods for study in studies)]
    rows: list[list[Cell]] = []
    data: list[dict[str, Any]] = []
    for study in studies:
        methods, evaluation = study.table.methods, study.table.evaluation
        cells = [_interval(methods[name]["success"]) if name in methods else NONE for name in present]
        rows.append([f"{study.title}, {study.table.summary['episodes']}", *cells])
        about = {"bundle": study.title, "env": evaluation["env"], "seed": evaluation["seed"]}
        data += [{**about, **row} for row in methods_rows(study.table)]
    return Table("summary", "Success of every bundle, with 95 % intervals", ["bundle, episodes", *present], rows, data)


def runs_table(study: Study) -> Table:
    """The runs of a study."""
    heads = ["folder", "rate", "episodes", "seed", "link", "methods", "command"]
    rows = [
        [
            str(run.folder), f"{run.summary['rate']:g}", str(run.summary["episodes"]), str(run.evaluation["seed"]),
            run.summary["link"], ", ".join(run.methods), run.manifest["command"] or NONE,
        ]
        for run in study.runs
    ]  # fmt: skip
    return Table("runs", "Runs", heads, rows)


def flat(value: Mapping[str, Any] | Sequence[Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted names: ``{"a": {"b": [1, 2]}}`` becomes ``{"a.b.0": 1, "a.b.1": 2}``."""
    entries = value.items() if isinstance(value, Mapping) else enumerate(value)
    result: dict[str, Any] = {}
    for key, entry in entries:
        nested = isinstance(entry, Mapping | list | tuple)
        result |= flat(entry, f"{prefix}{key}.") if nested else {f"{prefix}{key}": entry}
    return result
