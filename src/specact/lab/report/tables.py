"""The tables of a report: formatted for the page, and unrounded for CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specact.lab.report.drawing import Rows
from specact.lab.report.networks import networks_of
from specact.lab.report.runs import Run, Study
from specact.lab.statistics import holm

Metrics = Mapping[str, Any]

NONE = "\N{EN DASH}"
# Lines, each with a note below it.
Noted = tuple[tuple[str, str], ...]
Cell = str | Noted


@dataclass(frozen=True)
class Column:
    """A column of the table of methods.

    Attributes:
        head, description: its heading, and the explanation of it.
        cell: makes its cell from a method's metrics.
    """

    head: str
    description: str
    cell: Callable[[Metrics], Cell]


COLUMNS = (
    Column(
        "success", "share of episodes that succeeded, with Wilson's 95 % interval", lambda m: _interval(m["success"])
    ),
    Column(
        "success at",
        "share of episodes with a score above another threshold than that of success, with Wilson's 95 % interval",
        lambda m: tuple(
            pair for least, found in m.get("success_at", {}).items() for pair in _interval(found, f" above {least}")
        ),
    ),
    Column("score", "mean score of an episode, with a 95 % interval", lambda m: _interval(m["score"])),
    Column(
        "MSE",
        "squared error along held-out demonstrations, summed over the action's dimensions, in normalised units",
        lambda m: _interval(m["mse"]) if m.get("mse") else NONE,
    ),
    Column(
        "networks",
        "parameters, and milliseconds of one inference at batch 1, of every network that the method evaluates; the "
        "gate's are those of one decision",
        lambda m: _networks(m),
    ),
    Column("sent", "transmission rate (TR): transmitted / inferences", lambda m: _number(m["transmission_rate"])),
    Column(
        "true skip",
        "true skip ratio (TSR): share of skipped steps whose codes the target would have kept",
        lambda m: _number(m["true_skip_ratio"]),
    ),
    Column(
        "accepted",
        "share of all steps whose codes the target keeps, or would have kept",
        lambda m: _number(m["acceptance"]["all"]),
    ),
    Column(
        "gated loss",
        "share of steps that were not verified and would have been rejected, (1 - TR)(1 - TSR)",
        lambda m: _number(m["gated_loss"]),
    ),
    Column(
        "gate efficiency",
        "(loss of random - loss) / (loss of random - loss of the oracle) at equal rate: 0 is chance, 1 the oracle",
        lambda m: _number(m["gate_efficiency"], 2),
    ),
    Column(
        "choice",
        "the same among the steps that the gate itself met: 0 is chance, 1 the best choice of as many skips",
        lambda m: _number(m["choice_efficiency"], 2),
    ),
    Column(
        "action change",
        "action change loss: mean distance, over skipped steps, to the action verification would have given",
        lambda m: _number(m["action_change_loss"]),
    ),
    Column("ms per action", "time spent on choosing actions / actions", lambda m: _ms(m["latency"]["per_action_ms"])),
    Column("actions/s", "its inverse", lambda m: f"{m['latency']['actions_per_s']:,.1f}"),
    Column(
        "p50 / p99 ms",
        "quantiles of the time of one inference",
        lambda m: f"{_ms(m['latency']['inference_p50_ms'])} / {_ms(m['latency']['inference_p99_ms'])}",
    ),
)
SUMMARY_METHODS = ("draft", "head_draft", "random", "adahi", "learned", "hybrid", "target", "target_on_device")


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        caption: above it.
        heads: of its columns.
        rows: the first cell of each, and the others.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[tuple[Any, Sequence[Cell]]]


def methods_table(run: Run) -> Table:
    """All methods of a run; empty columns are left out."""
    shown: dict[str, list[Cell]] = {}
    for column in COLUMNS:
        cells = [column.cell(metrics) for metrics in run.methods.values()]
        if any(cell not in (NONE, ()) for cell in cells) and not (column.head == "score" and run.binary):
            shown[column.head] = cells
    how = "measured over real sockets" if run.summary["realtime"] else "in virtual time"
    caption = f"Methods, on the same {run.summary['episodes']} episodes; times {how}"
    return Table(caption, ["method", *shown], list(zip(run.methods, zip(*shown.values(), strict=True), strict=True)))


def contrasts_table(run: Run) -> Table:
    """Paired contrasts of a run."""
    ends = ("success",) if run.binary else ("success", "score")
    rows = [
        (
            f"{row['first']} \N{MINUS SIGN} {row['second']}",
            [cell for end in ends for cell in (_difference(row[end]), _p(row[end], row[end]["p_holm"]))],
        )
        for row in run.summary["contrasts"]
    ]
    heads = [head for end in ends for head in (f"{end}, difference and 95 % interval", "paired test, Holm")]
    caption = f"Paired contrasts, episode by episode; p after Holm's correction over the {len(rows)} of this table"
    return Table(caption, ["contrast", *heads], rows)


def summary_table(studies: Sequence[Study]) -> Table:
    """One row per bundle: success, and the score where it is not binary."""
    differences = [_contrast_of(study.table, "adahi", "random") for study in studies]
    corrected = iter(holm([one["p"] for one in differences if one is not None]))
    rows = []
    for study, difference in zip(studies, differences, strict=True):
        run = study.table
        sent = _number(run.methods["adahi"]["transmission_rate"]) if "adahi" in run.methods else NONE
        compared = NONE if difference is None else (*_difference(difference), *_p(difference, next(corrected)))
        results = [_result(run, method) for method in SUMMARY_METHODS]
        rows.append((study, [*results, compared, sent, _time_saved(study)]))
    heads = [
        "bundle, episodes", *SUMMARY_METHODS, "adahi \N{MINUS SIGN} random", "sent by adahi",
        "time per action, adahi against hybrid",
    ]  # fmt: skip
    return Table("Success of every bundle; p after Holm's correction over the contrasts of this table", heads, rows)


def _contrast_of(run: Run, first: str, second: str) -> Metrics | None:
    """The contrast of two methods in success; None where they were not compared."""
    for row in run.summary["contrasts"]:
        if (row["first"], row["second"]) == (first, second):
            return dict(row["success"])
    return None


def csv_rows(table: Table) -> Rows:
    """The cells of a table by heading, for CSV."""
    return [dict(zip(table.heads, [head, *cells], strict=True)) for head, cells in table.rows]


def methods_rows(run: Run) -> Rows:
    """Every number of every method, as in summary.json."""
    return [{"method": method, **flat(metrics)} for method, metrics in run.methods.items()]


def contrasts_rows(run: Run) -> Rows:
    """Every number of every contrast, as in summary.json."""
    return [flat(row) for row in run.summary["contrasts"]]


def summary_rows(studies: Sequence[Study]) -> Rows:
    """Every number of every method of every bundle's table."""
    return [
        {"bundle": study.title, "env": study.table.evaluation["env"], "seed": study.table.evaluation["seed"], **row}
        for study in studies
        for row in methods_rows(study.table)
    ]


def flat(value: Mapping[str, Any] | Sequence[Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted names: ``{"a": {"b": [1, 2]}}`` becomes ``{"a.b.0": 1, "a.b.1": 2}``."""
    entries = value.items() if isinstance(value, Mapping) else enumerate(value)
    result: dict[str, Any] = {}
    for key, entry in entries:
        nested = isinstance(entry, Mapping | list | tuple)
        result |= flat(entry, f"{prefix}{key}.") if nested else {f"{prefix}{key}": entry}
    return result


def _result(run: Run, method: str) -> Cell:
    if method not in run.methods:
        return NONE
    metrics = run.methods[method]
    score = () if run.binary else (("", f"score {metrics['score']['mean']:.3f}"),)
    return (*_interval(metrics["success"]), *score)


def _time_saved(study: Study) -> Cell:
    methods = study.timed.methods
    if not {"adahi", "hybrid"} <= methods.keys():
        return NONE
    adahi, hybrid = (methods[name]["latency"]["per_action_ms"] for name in ("adahi", "hybrid"))
    how = "real sockets" if study.timed.summary["realtime"] else "virtual time"
    return ((f"{adahi / hybrid - 1:+.0%}", f"{_ms(adahi)} / {_ms(hybrid)} ms, {how}"),)


def _interval(interval: Metrics, after: str = "") -> Noted:
    mean = interval["rate"] if "rate" in interval else interval["mean"]
    return ((f"{mean:.3f}{after}", f"{interval['low']:.3f} to {interval['high']:.3f}"),)


def _networks(metrics: Metrics) -> Noted:
    gate_ms = metrics.get("cost", {}).get("gate_ms")
    lines = [*map(str, networks_of(metrics)), *([f"gate {gate_ms:.2g} ms"] if gate_ms else [])]
    return tuple(("", line) for line in lines)


def _difference(difference: Metrics) -> Noted:
    return ((f"{difference['difference']:+.3f}", f"{difference['low']:+.3f} to {difference['high']:+.3f}"),)


def _p(difference: Metrics, corrected: float) -> Noted:
    """The corrected p-value; as its note the uncorrected one with its test."""
    return ((f"p = {corrected:.2g}", f"alone {difference['p']:.2g}, {difference['test']}"),)


def _number(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as Markdown."""
    lines = [[str(cell) for cell in row] for row in (heads, *rows)]
    texts = ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines]
    return "\n".join([texts[0], "|" + "---|" * len(heads), *texts[1:]])


def interval_text(found: Metrics, digits: int = 2, sign: str = "") -> str:
    """A rate, mean or difference with its interval."""
    mean = next(found[key] for key in ("rate", "mean", "difference") if key in found)
    low, high = found["low"], found["high"]
    return f"{mean:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def optional_text(value: float | None, digits: int = 3, none: str = "-") -> str:
    """A number, or what stands for one that is missing."""
    return none if value is None else f"{value:.{digits}f}"


def about_table(about: Mapping[str, str]) -> str:
    """Methods and their descriptions, as Markdown."""
    return markdown(["", ""], [[f"`{name}`", text] for name, text in about.items()])


def success_text(metrics: Metrics) -> str:
    """The success rate of a method with its interval."""
    return interval_text(metrics["success"])


def relative_text(cost: Metrics) -> str:
    """A relative cost with its interval."""
    return interval_text({"mean": cost["relative"], "low": cost["relative_low"], "high": cost["relative_high"]})


def contrast_table(summary: Mapping[str, Any], measures: Sequence[str] = ("success",)) -> str:
    """Paired differences as Markdown; p-values with Holm's correction over the contrasts of each measure.

    Args:
        summary: of a run.
        measures: ``success``, ``score`` or both.
    """
    heads = [head for measure in measures for head in (f"difference of {measure}", "p (Holm)")]
    rows = [
        [
            f"`{row['first']}` - `{row['second']}`",
            *(cell for each in measures for cell in (interval_text(row[each], 3, "+"), f"{row[each]['p_holm']:.2g}")),
        ]
        for row in summary["contrasts"]
    ]
    return markdown(["", *heads], rows)
