"""The report of an experiment: prose whose numbers are filled in, tables as CSV and HTML, pictures, and their stamp.

The prose is the experiment's ``report.md``: ``{gain:+ci2}`` is a fact of the report with its interval,
``{gain:verdict}`` what its test says, ``{tables[success]}`` a table. No number of a result is typed there.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from specact.lab.rollout.statistics import holm

Metrics = Mapping[str, Any]

RESULTS = Path(__file__).parents[1] / "docs" / "results"
LONG = 200  # rows
_TABLE = "<p>{}</p>\n<div><table>\n<thead>{}</thead>\n<tbody>\n{}\n</tbody>\n</table></div>"
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>specact: tables of {name}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;margin:1.5rem;color:#1b222b}}section{{margin:2rem 0}}
p{{max-width:45rem}}div{{overflow-x:auto}}table{{border-collapse:collapse}}td,th{{padding:.25rem .6rem;text-align:left;
border-bottom:1px solid #dfe3e8;white-space:nowrap;vertical-align:top}}:is(td,th):first-child{{position:sticky;left:0;
background:#fff;white-space:normal;min-width:8rem}}</style>
<h1>Tables of <a href="../{name}.html">{name}</a></h1>
{body}
</html>
"""


@dataclass(frozen=True)
class Table:
    """Rows that stand on the page, and in a file, with all their digits, as CSV.

    Attributes:
        name: of its file.
        about: a sentence: what a row is, of how many episodes, and, of contrasts, the family of the correction.
        heads: of its columns, between bars; without them it stands in its file alone.
        cells: of a row, as of :func:`fields`.
        rows: of its file, and in that order on the page.
        across: of a long table what the page shows of it, as three cells: a row for each of the first, a column for
            each of the second, and in it the third.
    """

    name: str
    about: str
    heads: str = ""
    cells: str = ""
    rows: Sequence[Metrics] = ()
    across: str = ""

    def grid(self) -> str:
        """The rows alone."""
        heads, rows = [head.strip() for head in self.heads.split("|")], [fields(self.cells, row) for row in self.rows]
        if self.across:
            grid = {(name, column): cell for name, column, cell in (fields(self.across, row) for row in self.rows)}
            names, columns = (list(dict.fromkeys(key[axis] for key in grid)) for axis in (0, 1))
            heads, rows = ["", *columns], [[name, *(grid.get((name, at), "") for at in columns)] for name in names]
        return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows))

    def markdown(self, link: str) -> str:
        return f"{self.grid()}\n\n*{self.about}* [CSV]({link})"

    def csv(self, stamp: str) -> str:
        """All digits, below a line that says where they come from."""
        rows = [dict(_flat(row)) for row in self.rows]
        text = io.StringIO(f"# {stamp}. {self.about}\n")
        text.seek(0, io.SEEK_END)
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(text, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def html(self, link: str) -> str:
        """A section of the page of all tables: the table, or the link to its file if it is long."""
        if not self.heads or len(self.rows) > LONG:
            about = _plain(self.about)
            return f'<section><p>{about} <a href="{link}">{len(self.rows):,} rows, CSV</a></p></section>'
        heads = "".join(f"<th>{_plain(head.strip())}</th>" for head in self.heads.split("|"))
        cells = ([_plain(cell) for cell in fields(self.cells, row)] for row in self.rows)
        body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in cells)
        return f"<section>{_TABLE.format(_plain(self.about), heads, body)}</section>"


@dataclass(frozen=True)
class Picture:
    """A figure, or a film with its ``savefig``, drawn when it is written, and its file in the folder of reports."""

    file: str
    draw: Callable[[], Any]


@dataclass(frozen=True)
class Report:
    """What an experiment says.

    Attributes:
        tables: all of them; those that the prose names stand on the page, the others in their files alone.
        facts: what the prose names.
        pictures: of the page.
        elsewhere: provenance of cells of other experiments that the report shows.
        also: text of further files that are made from the results, by file.
    """

    tables: Sequence[Table]
    facts: Metrics = field(default_factory=dict)
    pictures: Sequence[Picture] = ()
    elsewhere: Mapping[str, Metrics] = field(default_factory=dict)
    also: Mapping[Path, str] = field(default_factory=dict)

    def files(self, name: str, prose: str, provenance: Mapping[str, Metrics]) -> dict[Path, str]:
        """The text of its page and tables, by file.

        Args:
            name: of the experiment.
            prose: with the names of facts.
            provenance: of its cells.
        """
        tables = {table.name: table.markdown(f"tables/{name}/{table.name}.csv") for table in self.tables}
        text = filled(prose, {**self.facts, "tables": tables})
        stamps = grouped({**self.elsewhere, **provenance})
        measured = Table("", "", "cells | seeds | commit | machine | load | date", _STAMP, stamps)
        stamp = f"specact, experiment {name}: " + "; ".join(" ".join(fields(_STAMP, row)) for row in measured.rows)
        page = (
            f"{text.rstrip()}\n\n## How it was measured\n\n`python -m experiments {name} run --out results/{name}`; "
            f"`table` stores what it finds, `page` writes this page. [All tables](tables/{name}.html).\n\n"
            f"{measured.grid()}\n"
        )
        body = "\n".join(table.html(f"{name}/{table.name}.csv") for table in [*self.tables, measured])
        return {
            **self.also,
            RESULTS / f"{name}.md": page,
            RESULTS / "tables" / f"{name}.html": _PAGE.format(name=name, body=body),
            **{RESULTS / "tables" / name / f"{table.name}.csv": table.csv(stamp) for table in self.tables},
        }


def _plain(text: str) -> str:
    """Without the marks of Markdown, as HTML."""
    return html.escape(text.replace("`", "").replace("**", ""))


_STAMP = "{cells} | {seeds} | {commit} | {machine} | {load} | {date}"


def grouped(provenance: Mapping[str, Metrics]) -> list[dict[str, Any]]:
    """A row per commit, machine and seed, with the names of its cells."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for cell, row in provenance.items():
        groups.setdefault(tuple(row[key] for key in ("seeds", "commit", "machine")), []).append(cell)
    return [
        {
            "cells": ", ".join(_shortened(cells)), "seeds": seeds, "commit": commit, "machine": machine,
            **{key: _span([provenance[cell][key] for cell in cells]) for key in ("load", "date")},
        }
        for (seeds, commit, machine), cells in groups.items()
    ]  # fmt: skip


def _shortened(cells: Sequence[str], most: int = 3) -> Iterable[str]:
    """Names of cells; many of one group as their number."""
    groups: dict[str, list[str]] = {}
    for cell in cells:
        groups.setdefault(cell.rpartition("/")[0], []).append(cell)
    for group, names in groups.items():
        yield from names if len(names) <= most else [f"{group}/* ({len(names)})".removeprefix("/")]


def _span(values: Sequence[Any]) -> str:
    present = sorted({value for value in values if value is not None})
    return " to ".join(str(value) for value in dict.fromkeys((present[0], present[-1]))) if present else "not recorded"


def one_family(contrasts: Iterable[Metrics]) -> list[dict[str, Any]]:
    """The contrasts of a report, with p corrected once (Holm) over all of them.

    Args:
        contrasts: each with ``on`` (pair and condition), ``measure``, ``first``, ``second``, ``p``, and ``difference``,
            ``low`` and ``high``, or these within ``difference`` or within the name of the measure.
    """
    rows = []
    for row in contrasts:
        test = row.get(row["measure"], row)
        inner = test["difference"]
        interval = inner if isinstance(inner, Mapping) else {"mean": inner, "low": test["low"], "high": test["high"]}
        rows.append({
            **{key: row[key] for key in ("on", "measure", "first", "second")}, "difference": interval["mean"],
            "low": interval["low"], "high": interval["high"], "p": test["p"],
        })  # fmt: skip
    return [{**row, "p_holm": p} for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True)]


def contrast_table(rows: Sequence[Metrics], name: str = "contrasts", family: str = "this table") -> Table:
    """The table of :func:`one_family`, or of a part of it."""
    about = (
        f"Paired differences with 95 % intervals; p after Holm's correction over the {len(rows)} contrasts of {family}."
    )
    cells = "{on} | {measure} | `{first}` - `{second}` | {difference:+.3f} [{low:+.3f}, {high:+.3f}] | {p_holm:.2g}"
    return Table(name, about, "on | measure | contrast | difference | p (Holm)", cells, rows)


def significant(rows: Iterable[Metrics], sign: int = 0) -> list[Metrics]:
    """The contrasts whose corrected test shows a difference, of this sign if it is not 0."""
    return [row for row in rows if row["p_holm"] < 0.05 and (not sign or row["difference"] * sign > 0)]


def under(on: str, rows: Iterable[Metrics], measure: str = "success") -> list[dict[str, Any]]:
    """Contrasts, each with the pair and condition that it was measured on."""
    return [{**row, "on": on, "measure": measure} for row in rows]


def between(rows: Iterable[Metrics], on: str, first: str, second: str, measure: str = "success") -> Metrics:
    """The contrast of two methods.

    Raises:
        StopIteration: if it is not there.
    """
    key = (on, first, second, measure)
    return next(row for row in rows if (row["on"], row["first"], row["second"], row["measure"]) == key)


def filled(prose: str, facts: Metrics) -> str:
    """Prose with the facts that it names.

    Raises:
        KeyError: for a fact that there is none of.
    """
    return _Cells().vformat(prose, (), facts)


def marked(page: str, name: str, text: str) -> str:
    """A page with a new text between the marks of a name."""
    opening, closing = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = page.split(opening)
    return f"{before}{opening}{text.strip()}\n{closing}{rest.partition(closing)[2]}"


def fields(cells: str, row: Metrics) -> list[str]:
    """The cells of a row, from format strings between bars: ``{name} | {ms:.1f} | {success:ci2} | {gain:+ci3}``.

    ``ci3`` is an interval, or the difference of a contrast, with three digits; ``verdict`` says in words what the test
    of a contrast shows; ``{0}`` is the row itself. None is a dash, or what follows a question mark: ``{rate:.2f?}`` is
    empty without a rate.
    """
    return [_Cells().vformat(cell.strip(), (row,), row) for cell in cells.split("|")]


class _Cells(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        spec, _, none = format_spec.partition("?")
        sign, interval, digits = spec.partition("ci")
        if value is None:
            return none if "?" in format_spec else "-"
        if spec == "verdict":
            return verdict(value)
        if not interval:
            return format(value, spec)
        mean = next(value[key] for key in ("rate", "mean", "difference", "relative") if key in value)
        spec, (low, high) = f"{sign}.{digits}f", ends(value)
        return f"{mean:{spec}} [{low:{spec}}, {high:{spec}}]"


def verdict(contrast: Metrics) -> str:
    """What a corrected test says of the first method."""
    if not significant([contrast]):
        return "not shown to differ from"
    return "better than" if contrast["difference"] > 0 else "worse than"


def span(values: Iterable[float]) -> tuple[float, float]:
    """The smallest and the largest value."""
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def ends(interval: Metrics) -> tuple[float, float]:
    """Both ends of an interval."""
    low, high = (interval[end] if end in interval else interval[f"relative_{end}"] for end in ("low", "high"))
    return low, high


def named(values: Mapping[str, Metrics]) -> list[dict[str, Any]]:
    """The values as rows, each with its name."""
    return [{"name": name, **row} for name, row in values.items()]


def glossary(methods: Mapping[str, Any], name: str = "methods") -> Table:
    """What each method is."""
    rows = [{"name": key, "about": method.about} for key, method in methods.items()]
    return Table(name, "Every method.", "name | what it is", "`{name}` | {about}", rows)


def methods_of(summary: Metrics) -> list[dict[str, Any]]:
    """The methods of an evaluation, without the times of a rollout, which infers for many episodes at once."""
    left_out = ("latency", "cost", "sent_ahead")
    return [{k: v for k, v in row.items() if k not in left_out} for row in named(summary["methods"])]


def _flat(row: Metrics, before: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", " ".join(map(str, value)) if isinstance(value, list | tuple) else value
