"""The tables of a report: numbers as text for the page, and all of a summary's numbers, unrounded, for CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specact.lab.report.drawing import Rows
from specact.lab.report.html import Html, fill, html, join, table
from specact.lab.report.networks import networks_of
from specact.lab.report.runs import Run
from specact.lab.report.studies import Study
from specact.lab.report.style import style_of
from specact.lab.rollout.methods import METHODS
from specact.lab.statistics import holm

Metrics = Mapping[str, Any]

# Columns of the table of methods: heading, what it says, and a method's cell.
COLUMNS: tuple[tuple[str, str, Callable[[Metrics], object]], ...] = (
    ("success", "share of episodes that succeeded, with Wilson's 95 % interval", lambda m: _interval(m["success"])),
    (
        "success at",
        "share of episodes with a score above another threshold than that of success, with Wilson's 95 % interval",
        lambda m: join(
            Html(f"{html(_number(found['rate']))} above {html(least)}{_bounds(found)}")
            for least, found in m.get("success_at", {}).items()
        ),
    ),
    ("score", "mean score of an episode, with a 95 % interval", lambda m: _interval(m["score"])),
    (
        "MSE",
        "squared error along held-out demonstrations, summed over the action's dimensions, in normalised units",
        lambda m: _interval(m["mse"]) if m.get("mse") else "\N{EN DASH}",
    ),
    (
        "networks",
        "parameters, and milliseconds of one inference at batch 1, of every network that the method evaluates; the "
        "gate's are those of one decision",
        lambda m: join(Html(f"<small>{html(line)}</small>") for line in _networks(m)),
    ),
    ("sent", "transmission rate (TR): transmitted / inferences", lambda m: _number(m["transmission_rate"])),
    (
        "true skip",
        "true skip ratio (TSR): share of skipped steps whose codes the target would have kept",
        lambda m: _number(m["true_skip_ratio"]),
    ),
    (
        "accepted",
        "share of all steps whose codes the target keeps, or would have kept",
        lambda m: _number(m["acceptance"]["all"]),
    ),
    (
        "gated loss",
        "share of steps that were not verified and would have been rejected, (1 - TR)(1 - TSR)",
        lambda m: _number(m["gated_loss"]),
    ),
    (
        "gate efficiency",
        "(loss of random - loss) / (loss of random - loss of the oracle) at equal rate: 0 is chance, 1 the oracle",
        lambda m: _number(m["gate_efficiency"], 2),
    ),
    (
        "choice",
        "the same among the steps that the gate itself met: 0 is chance, 1 the best choice of as many skips",
        lambda m: _number(m["choice_efficiency"], 2),
    ),
    (
        "action change",
        "action change loss: mean distance, over skipped steps, to the action verification would have given",
        lambda m: _number(m["action_change_loss"]),
    ),
    ("ms per action", "time spent on choosing actions / actions", lambda m: _ms(m["latency"]["per_action_ms"])),
    ("actions/s", "its inverse", lambda m: f"{m['latency']['actions_per_s']:,.1f}"),
    (
        "p50 / p99 ms",
        "quantiles of the time of one inference",
        lambda m: f"{_ms(m['latency']['inference_p50_ms'])} / {_ms(m['latency']['inference_p99_ms'])}",
    ),
)
SUMMARY_METHODS = ("draft", "head_draft", "random", "adahi", "learned", "hybrid", "target", "target_on_device")


def name_of(method: str) -> Html:
    """A method's name behind a dot of its colour."""
    return fill("name.html", colour=style_of(method).light, name=method)


def methods_table(run: Run) -> Html:
    """All methods of a run; columns that say nothing here are left out."""
    shown = [column for column in COLUMNS if _says_something(column[0], run)]
    rows = []
    for method, metrics in run.methods.items():
        about = METHODS[method].about if method in METHODS else ""
        name = Html(f"{name_of(method)}<small>{html(about)}</small>")
        rows.append([name, *(cell(metrics) for _, _, cell in shown)])
    caption = f"Methods, on the same {run.summary['episodes']} episodes; times " + (
        "measured over real sockets" if run.summary["realtime"] else "in virtual time"
    )
    return table(caption, ["method", *(_head(head, says) for head, says, _ in shown)], rows)


def columns_explained(run: Run) -> Html:
    """What the columns of the table of methods say."""
    entries = [
        Html(f"<div><dt>{html(head)}</dt><dd>{html(says)}</dd></div>")
        for head, says, _ in COLUMNS
        if _says_something(head, run)
    ]
    score = Html(f"<div><dt>score measures</dt><dd>{html(run.summary['score'])}</dd></div>")
    return join([*entries, score])


def contrasts_table(run: Run) -> Html:
    """Paired contrasts of a run; nothing if it has none."""
    ends = ("success",) if run.binary else ("success", "score")
    rows = [
        [f"{row['first']} \N{MINUS SIGN} {row['second']}", *(cell for end in ends for cell in _contrast(row[end]))]
        for row in run.summary["contrasts"]
    ]
    heads = [head for end in ends for head in (f"{end}, difference and 95 % interval", "paired test, Holm")]
    caption = f"Paired contrasts, episode by episode; p after Holm's correction over the {len(rows)} of this table"
    return table(caption, ["contrast", *heads], rows) if rows else Html()


def summary_table(studies: Sequence[Study]) -> Html:
    """One line per bundle: success, below it the score where that is something else."""
    found = [_contrast_of(study.table, "adahi", "random") for study in studies]
    corrected = iter(holm([one["p"] for one in found if one is not None]))
    heads = ["bundle, episodes", *SUMMARY_METHODS, "adahi \N{MINUS SIGN} random", "sent by adahi"]
    rows = []
    for study, against in zip(studies, found, strict=True):
        run = study.table
        name = Html(f'<a href="#{study.slug}">{html(study.title)}</a>, {run.summary["episodes"]}')
        cells: list[object] = [name]
        cells += [_result(run, method) for method in SUMMARY_METHODS]
        if against is None:
            cells.append("\N{EN DASH}")
        else:
            cells.append(join([_contrast(against)[0], _p(against, next(corrected))]))
        cells.append(_number(run.methods["adahi"]["transmission_rate"]) if "adahi" in run.methods else "\N{EN DASH}")
        rows.append([*cells, _saved(study)])
    caption = "Success of every bundle; p after Holm's correction over the contrasts of this table"
    return table(caption, [*heads, "time per action, adahi against hybrid"], rows)


def _contrast_of(run: Run, first: str, second: str) -> Metrics | None:
    """The contrast of two methods in success; None where they were not compared."""
    for row in run.summary["contrasts"]:
        if (row["first"], row["second"]) == (first, second):
            return dict(row["success"])
    return None


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


def _says_something(head: str, run: Run) -> bool:
    metrics = run.summary["methods"].values()
    if head == "score":
        return not run.binary
    if head == "success at":
        return any(m.get("success_at") for m in metrics)
    if head == "networks":
        return any(m.get("cost") for m in metrics)
    if head == "MSE":
        return any(m.get("mse") is not None for m in metrics)
    if head in ("gate efficiency", "choice"):
        return any(m[f"{head.split()[0]}_efficiency"] is not None for m in metrics)
    return True


def _head(head: str, says: str) -> Html:
    return Html(f'<span title="{html(says)}">{html(head)}</span>')


def _result(run: Run, method: str) -> Html:
    if method not in run.methods:
        return html("\N{EN DASH}")
    metrics = run.methods[method]
    score = "" if run.binary else Html(f"<small>score {metrics['score']['mean']:.3f}</small>")
    return join([_interval(metrics["success"]), score])


def _saved(study: Study) -> Html:
    methods = study.timed.methods
    if not {"adahi", "hybrid"} <= methods.keys():
        return html("\N{EN DASH}")
    adahi, hybrid = (methods[name]["latency"]["per_action_ms"] for name in ("adahi", "hybrid"))
    how = "real sockets" if study.timed.summary["realtime"] else "virtual time"
    return Html(f"{adahi / hybrid - 1:+.0%}<small>{_ms(adahi)} / {_ms(hybrid)} ms, {how}</small>")


def _interval(found: Metrics) -> Html:
    mean = found["rate"] if "rate" in found else found["mean"]
    return Html(f"{mean:.3f}{_bounds(found)}")


def _bounds(found: Metrics) -> Html:
    return Html(f"<small>{found['low']:.3f} to {found['high']:.3f}</small>")


def _networks(metrics: Metrics) -> list[str]:
    gate_ms = metrics.get("cost", {}).get("gate_ms")
    return [*map(str, networks_of(metrics)), *([f"gate {gate_ms:.2g} ms"] if gate_ms else [])]


def _contrast(found: Metrics) -> tuple[Html, Html]:
    """The difference with its interval, and p among all contrasts of the table, below it p alone with its test."""
    difference = Html(f"{found['difference']:+.3f}<small>{found['low']:+.3f} to {found['high']:+.3f}</small>")
    return difference, _p(found, found["p_holm"])


def _p(found: Metrics, corrected: float) -> Html:
    return Html(f"p = {corrected:.2g}<small>alone {found['p']:.2g}, {html(found['test'])}</small>")


def _number(value: float | None, digits: int = 3) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.{digits}f}"


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
