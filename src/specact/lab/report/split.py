"""Tables of split targets: latency over real sockets and in virtual time, bandwidth forecasts, precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NAMES = {
    "device": "everything on the device",
    "server": "everything on the server",
    "static": "static cut",
    "roboecc": "RoboECC's rule, forecast",
    "roboecc_oracle": "RoboECC's rule, oracle",
    "smallest_last": "smallest total, last value",
    "smallest": "smallest total, forecast",
    "smallest_apart": "smallest total, forecast, latency apart",
    "smallest_oracle": "smallest total, oracle",
    "smallest_printed": "smallest total as printed, forecast",
    "hybrid": "hybrid",
    "adahi": "ADAHI",
    "late": "target asked, nobody waits",
    "adahi_placed": "ADAHI, its target at the smallest total",
}


def latency_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Methods by links, as Markdown: mean, median and p95 of an inference [ms], switches, missed answers.

    Args:
        cells: each with ``link``, ``method`` and its results.
    """
    links = list(dict.fromkeys(cell["link"] for cell in cells))
    by_method = {(cell["method"], cell["link"]): cell for cell in cells}
    rows = ["| | " + " | ".join(links) + " |", "|---" * (1 + len(links)) + "|"]
    for method in dict.fromkeys(cell["method"] for cell in cells):
        entries = [_entry(by_method.get((method, link))) for link in links]
        rows.append(f"| {NAMES[method]} | " + " | ".join(entries) + " |")
    return "\n".join(rows)


def _entry(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    parts = [f"{cell['mean_ms']:.0f} / {cell['median_ms']:.0f} / {cell['p95_ms']:.0f}"]
    if cell["switches"]:
        parts.append(f"{cell['switches']} switches")
    if cell["missed"]:
        parts.append(f"{cell['missed']} missed")
    return ", ".join(parts)


def forecast_table(errors: Mapping[str, Mapping[str, float]]) -> str:
    """Errors of one-step forecasts on the held-out part of each recording, as Markdown [kB/s]."""
    rows = [
        "| link | inferences | mean | MAE: LSTM | last value | RMSE: LSTM | last value | mean of the past |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for link, row in errors.items():
        names = ("mean", "forecast_mae", "last_mae", "forecast_rmse", "last_rmse", "mean_rmse")
        numbers = " | ".join(f"{row[name] / 1e3:.3g}" for name in names)
        rows.append(f"| {link} | {row['inferences']:.0f} | {numbers} |")
    return "\n".join(rows)


def precision_table(errors: Sequence[Mapping[str, Any]]) -> str:
    """The change of the target's answers at lower precision on the wire, as Markdown."""
    rows = [
        "| cut | bytes down: float32 | float16 | uint8 | largest change of a probability: float16 | uint8 | "
        "most likely code changes: float16 | uint8 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in errors:
        sizes = " | ".join(str(row["bytes"][name]) for name in ("float32", "float16", "uint8"))
        errs = " | ".join(f"{row[name]['probability']:.1e}" for name in ("float16", "uint8"))
        codes = " | ".join(f"{row[name]['codes']:.3f}" for name in ("float16", "uint8"))
        rows.append(f"| {row['cut']} | {sizes} | {errs} | {codes} |")
    return "\n".join(rows)


def report_markdown(results: Mapping[str, Any]) -> Iterator[str]:
    """The whole page of a study, as pieces of Markdown."""
    for factor, cells in results["sockets"].items():
        yield f"### Over real sockets, device {factor} times slower\n\n{latency_table(cells)}\n"
    for title, cells in results["simulated"].items():
        yield f"### In virtual time, {title}\n\n{latency_table(cells)}\n"
    yield f"### Forecasts\n\n{forecast_table(results['forecasts'])}\n"
    yield f"### Precision\n\n{precision_table(results['precision'])}\n"
