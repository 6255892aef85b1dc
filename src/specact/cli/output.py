"""Output of commands: tables, progress bars and JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from specact.files import to_json
from specact.lab.report.networks import all_networks

T = TypeVar("T")
# A dataclass whose fields are parsed as options of the command itself.
Flat = Annotated[T, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes]

# Progress and remarks go to stderr, so that stdout holds the result and nothing else.
# Printed as plain text: names, paths and messages of servers may contain brackets.
remarks = Console(stderr=True, markup=False, emoji=False)
results = Console(markup=False, emoji=False)


def print_error(message: str) -> None:
    """Prints an error message on stderr."""
    remarks.print(Text.assemble(("specact:", "bold red"), f" {message}"), soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints a result as JSON on stdout; NaN becomes null, which every parser accepts."""
    print(to_json(value))


def command_line() -> str:
    """The command as it was typed, for a manifest."""
    return shlex.join(["specact", *sys.argv[1:]])


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars by name; yields ``update(name, done, total)``."""
    columns = (
        TextColumn("{task.description:22}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=remarks) as bars:
        tasks: dict[str, TaskID] = {}

        def update(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield update


# Shown for a number that a method does not have.
_MISSING = "-"


def summary_table(summary: dict[str, Any]) -> Table:
    """The methods of an evaluation side by side, narrow enough for 80 columns; without columns that no method has."""
    methods = summary["methods"]
    binary = all(m["score"]["mean"] == m["success"]["rate"] for m in methods.values())
    title = f"{summary['env']}: {summary['episodes']} paired episodes, link {summary['link']}"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0))
    how = "measured over real sockets" if summary["realtime"] else "draft, link and target in virtual time"
    how = "measured in one process" if summary["link"] == "none" else how
    columns: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
        ("success", "", lambda m: f"{m['success']['rate']:.3f}"),
        ("95 %", "", lambda m: f"{m['success']['low']:.2f}-{m['success']['high']:.2f}"),
        ("score", "", lambda m: _MISSING if binary else f"{m['score']['mean']:.3f}"),
        ("sent", "transmission rate", lambda m: f"{m['transmission_rate']:.2f}"),
        (
            "true skip",
            "share of skipped steps that the target would have accepted",
            lambda m: _optional(m.get("true_skip_ratio")),
        ),
        (
            "loss",
            "gated loss, skipped and would have been rejected",
            lambda m: f"{m['gated_loss']:.3f}" if "gated_loss" in m else _MISSING,
        ),
        (
            "change",
            "mean change of the action that verification of a skipped step would have made",
            lambda m: _optional(m["action_change_loss"]),
        ),
        ("passes", "of the target's decoder per inference", lambda m: _optional(m.get("passes"))),
        ("accepted", "drafted tokens per pass", lambda m: _optional(m.get("accepted_per_pass"))),
        ("full", "share of rounds that denoised", lambda m: _optional(m.get("full"))),
        ("ms/action", how, lambda m: f"{m['latency']['per_action_ms']:.2f}"),
    ]
    rows = {name: [value(m) for _, _, value in columns] for name, m in methods.items()}
    shown = [place for place in range(len(columns)) if any(row[place] != _MISSING for row in rows.values())]
    table.add_column("method", no_wrap=True)
    for place in shown:
        table.add_column(columns[place][0], justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(name, *(row[place] for place in shown))
    told = (columns[place] for place in shown)
    table.caption = " · ".join(f"{head}: {meaning}" for head, meaning, _ in told if meaning)
    networks = [
        f"{network.name} {network.parameters:,} ({network.ms:.2g} ms)" for network in all_networks(methods.values())
    ]
    if networks:
        table.caption += f" · parameters and time at batch 1: {', '.join(networks)}"
    for least in next(iter(methods.values())).get("success_at", {}):
        shares = ", ".join(f"{name} {m['success_at'][least]['rate']:.3f}" for name, m in methods.items())
        table.caption += f" · success with a score above {least}: {shares}"
    return table


def offline_table(summary: dict[str, Any]) -> Table:
    """The methods of an evaluation along demonstrations side by side."""
    table = Table(title=f"{summary['bundle']}: {summary['episodes']} demonstrations", box=None, padding=(0, 2, 0, 0))
    table.add_column("method", no_wrap=True)
    for name in ("error", "95 %", "sent", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, m in summary["methods"].items():
        error = m["error"]
        table.add_row(
            name,
            f"{error['mean']:.4f}",
            f"{error['low']:.3f}-{error['high']:.3f}",
            f"{m['transmission_rate']:.2f}",
            _optional(m["action_change_loss"]),
        )
    table.caption = (
        "error: mean squared error to the demonstrated actions, normalised · sent: transmission rate · change: mean "
        "change of the action that verification of a skipped step would have made"
    )
    return table


def contrast_lines(summary: dict[str, Any]) -> list[str]:
    """The paired contrasts as text; p values after Holm's correction over all of them."""
    lines = []
    for row in summary["contrasts"]:
        parts = []
        for end_point in ("error",) if "error" in row else ("success", "score"):
            c = row[end_point]
            parts.append(
                f"{end_point} {c['difference']:+.3f} [{c['low']:+.3f}, {c['high']:+.3f}], "
                f"p = {c['p_holm']:.2g} ({c['test']})"
            )
            if row.get("score") == row.get("success"):
                break
        lines.append(f"{row['first']} - {row['second']}: " + "; ".join(parts))
    if lines:
        lines.append(f"p is after Holm's correction over all contrasts above ({len(lines)}).")
    return lines


def _optional(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.2f}"
