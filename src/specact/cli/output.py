"""Output of commands: results on stdout, remarks and progress on stderr."""

from __future__ import annotations

import select
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from specact.files import to_json


class _Remarks(Console):
    """Stderr, which falls silent where its reader is gone: that must not stop a robot, nor lose a result."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


# Printed as plain text: names, paths and messages of servers may contain brackets.
remarks = _Remarks(stderr=True, markup=False, emoji=False)
results = Console(markup=False, emoji=False)


def say(result: str | Table) -> None:
    """Prints a part of the result on stdout: a line, which is not wrapped, or a table."""
    results.print(result, highlight=False, soft_wrap=isinstance(result, str))


def remark(line: str, *, warn: bool = False) -> None:
    """Prints a line on stderr, so that stdout holds the result and nothing else."""
    try:
        remarks.print(line, style="yellow" if warn else None, highlight=False, soft_wrap=True)
    except OSError:  # its terminal was closed
        remarks.quiet = True


def print_error(message: str) -> None:
    """Prints an error message on stderr."""
    remarks.print(Text.assemble(("specact:", "bold red"), f" {message}"), soft_wrap=True)


def print_result(json: bool, value: Any, lines: Iterable[str | Table] | None = None) -> None:
    """Prints a result as lines, its own by default, or as JSON, where NaN is null, which every parser accepts."""
    if json:
        print(to_json(value))
        return
    for line in lines_of(value) if lines is None else lines:
        say(line)


def rows_of(values: Mapping[str, Any], width: int = 10) -> list[str]:
    """Lines that begin with a name."""
    return [f"{name:{width}} {text}" for name, text in values.items()]


def lines_of(values: Mapping[str, Any], width: int = 22) -> list[str]:
    """Plain values as lines that begin with a name in words and end with the unit; those that are None are left out."""
    known = {name: value for name, value in values.items() if value is not None}
    words = {name: name.removesuffix("_ms").replace("_", " ") for name in known}
    return rows_of({words[name]: text_of(known[name]) + " ms" * name.endswith("_ms") for name in known}, width)


def text_of(value: Any, digits: int = 4) -> str:
    """A plain value as text: numbers with so many digits; nested lists and mappings on lines of their own."""
    if isinstance(value, Mapping):
        known = {name: entry for name, entry in value.items() if entry is not None}
        if any(isinstance(entry, list | Mapping) for entry in known.values()):
            return "".join(f"\n  {name:>20} {text_of(entry)}" for name, entry in known.items())
        return ", ".join(f"{name} {text_of(entry)}" for name, entry in known.items()) or "none"
    if isinstance(value, list):
        return (", " if value and isinstance(value[0], str | list) else " ").join(map(text_of, value)) or "none"
    if isinstance(value, float):
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
    return str(value)


def table_of(title: str, rows: Iterable[Mapping[str, Any]], headings: Mapping[str, str], caption: str = "") -> Table:
    """A table of plain values: ``headings`` by their names, ``mean.low`` for what is nested."""
    table = Table(title=title, caption=caption, box=None, padding=(0, 2, 0, 0))
    for number, head in enumerate(headings.values()):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*("-" if (value := value_at(row, name)) is None else text_of(value, 3) for name in headings))
    return table


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """The value of a name, ``mean.low`` for what is nested; None where there is none."""
    first, _, rest = name.partition(".")
    return value_at(row.get(first) or {}, rest) if rest else row.get(first)


def command_line() -> str:
    """The command as it was typed, for a manifest."""
    return shlex.join(["specact", *sys.argv[1:]])


def progress_lines(every_s: float = 5.0) -> Callable[[str, int, int], None]:
    """Progress as a line every few seconds, dropped where nobody reads them: a robot must not wait for its output."""
    last_s = time.monotonic()

    def update(name: str, done: int, total: int) -> None:
        nonlocal last_s
        now = time.monotonic()
        if now - last_s >= every_s and sys.stderr is not None and select.select([], [2], [], 0.0)[1]:
            last_s = now
            remark(f"{name}: {done} of {total}")

    return update


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars by name, or in a pipe :func:`progress_lines`; yields ``update(name, done, total)``."""
    if not remarks.is_terminal:
        yield progress_lines()
        return
    title = TextColumn("{task.description:22}", markup=False)
    with Progress(title, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=remarks) as bars:
        tasks: dict[str, TaskID] = {}

        def update(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield update
