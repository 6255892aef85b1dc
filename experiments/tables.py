"""The Markdown of every page: tables, and how numbers, intervals and contrasts are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

Metrics = Mapping[str, Any]


class _Cells(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        spec, _, none = format_spec.partition("?")
        sign, interval, digits = spec.partition("ci")
        if value is None:
            return none if "?" in format_spec else "-"
        return interval_text(value, int(digits), sign) if interval else format(value, spec)


def fields(cells: str, row: Metrics) -> list[str]:
    """The cells of a row, from format strings between bars: ``{name} | {ms:.1f} | {success:ci2} | {gain:+ci3}``.

    ``ci3`` is an interval, or the difference of a contrast, with three digits; ``{0}`` is the row itself. None is a
    dash, or what follows a question mark: ``{rate:.2f?}`` is empty without a rate.
    """
    return [_Cells().vformat(cell.strip(), (row,), row) for cell in cells.split("|")]


def table(heads: str, cells: str, rows: Iterable[Metrics]) -> str:
    """Rows as Markdown; heads, and :func:`fields`, between bars."""
    return markdown([head.strip() for head in heads.split("|")], [fields(cells, row) for row in rows])


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as Markdown."""
    lines = [[str(cell) for cell in row] for row in (heads, *rows)]
    texts = ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines]
    return "\n".join([texts[0], "|" + "---|" * len(heads), *texts[1:]])


def named(values: Mapping[str, Metrics]) -> list[dict[str, Any]]:
    """Rows that know their names."""
    return [{"name": name, **row} for name, row in values.items()]


def interval_text(interval: Metrics, digits: int = 2, sign: str = "") -> str:
    """A rate, mean or difference with its interval."""
    mean = next(interval[key] for key in ("rate", "mean", "difference", "relative") if key in interval)
    low, high = (interval[end] if end in interval else interval[f"relative_{end}"] for end in ("low", "high"))
    return f"{mean:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def optional_text(value: float | None, digits: int = 3, none: str = "-") -> str:
    """A number, or what stands for one that is missing."""
    return none if value is None else f"{value:.{digits}f}"


def about_table(methods: Mapping[str, Any]) -> str:
    """Methods and their descriptions."""
    return table(" | ", "`{name}` | {about}", ({"name": name, "about": of.about} for name, of in methods.items()))


def difference_table(
    rows: Iterable[Metrics], names: str = "`{first}` - `{second}`", of: str = "difference of success"
) -> str:
    """Contrasts, each with ``first``, ``second``, its ``difference`` and ``p_holm``."""
    return table(f" | {of} | p (Holm)", f"{names} | {{difference:+ci3}} | {{p_holm:.2g}}", rows)


def contrast_table(summary: Metrics, measures: Sequence[str] = ("success",)) -> str:
    """Paired differences of a run in ``success``, ``score`` or both; Holm's correction over those of each measure."""
    heads = "".join(f" | difference of {each} | p (Holm)" for each in measures)
    cells = "".join(f" | {{{each}:+ci3}} | {{{each}[p_holm]:.2g}}" for each in measures)
    return table(heads, f"`{{first}}` - `{{second}}`{cells}", summary["contrasts"])
