"""Pieces of HTML: what is not known to be HTML is escaped, so that no name in a manifest can become markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from string import Template


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def html(value: object) -> Html:
    """The value as HTML."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def fill(template: str, **values: object) -> Html:
    """A template of this package with every ``$name`` replaced, see ``templates/``."""
    return Html(_template(template).substitute({name: html(value) for name, value in values.items()}))


def join(pieces: Iterable[object]) -> Html:
    """Pieces one after the other."""
    return Html("".join(map(html, pieces)))


def items(texts: Iterable[object]) -> Html:
    """A list; nothing if there is nothing to list."""
    entries = join(Html(f"<li>{html(text)}</li>") for text in texts)
    return Html(f"<ul>{entries}</ul>") if entries else entries


def table(caption: str, head: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """A table that scrolls in a box of its own; the first cell of a row is its heading."""
    heads = join(Html(f'<th scope="col">{html(cell)}</th>') for cell in head)
    body = join(
        Html(f'<tr><th scope="row">{html(row[0])}</th>{join(Html(f"<td>{html(cell)}</td>") for cell in row[1:])}</tr>')
        for row in rows
    )
    return fill("table.html", caption=caption, head=heads, body=body)


@cache
def _template(name: str) -> Template:
    return Template(files("specact.lab.report").joinpath("templates", name).read_text(encoding="utf-8"))
