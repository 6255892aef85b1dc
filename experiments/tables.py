"""The Markdown of every page: tables, and how numbers, intervals and contrasts are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Metrics = Mapping[str, Any]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as Markdown."""
    lines = [[str(cell) for cell in row] for row in (heads, *rows)]
    texts = ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines]
    return "\n".join([texts[0], "|" + "---|" * len(heads), *texts[1:]])


def interval_text(interval: Metrics, digits: int = 2, sign: str = "") -> str:
    """A rate, mean or difference with its interval."""
    mean = next(interval[key] for key in ("rate", "mean", "difference") if key in interval)
    low, high = interval["low"], interval["high"]
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


def difference_table(
    rows: Iterable[Metrics], names: str = "`{first}` - `{second}`", of: str = "difference of success"
) -> str:
    """Contrasts as Markdown, each with ``first``, ``second``, its ``difference`` and ``p_holm``."""
    cells = [[names.format_map(row), interval_text(row["difference"], 3, "+"), f"{row['p_holm']:.2g}"] for row in rows]
    return markdown(["", of, "p (Holm)"], cells)


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
