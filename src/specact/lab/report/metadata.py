"""What a reader has to know of a run: how it was made, on what, and with which choices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specact.lab.report.html import Html, fill, html, items, join, table
from specact.lab.report.runs import Run
from specact.lab.report.studies import Study
from specact.lab.report.tradeoff import time_of

NONE = "\N{EN DASH}"


def run_metadata(study: Study) -> Html:
    """The conditions of the table of methods."""
    run = study.table
    evaluation, machine = run.evaluation, run.manifest["machine"]
    entries = {
        "environment": evaluation["env"],
        "episodes": f"{evaluation['episodes']} per method, the same for all",
        "seed": evaluation["seed"],
        "rate": f"gates calibrated for {evaluation['rate']:g}",
        "link": evaluation["link"],
        "weights": evaluation["fingerprint"],
        "machine": ", ".join(f"{name} {value}" for name, value in machine.items()),
        "run folder": run.folder,
    }
    long = {
        "gates": items(_gate(calibration) for calibration in run.calibrations.values()) or NONE,
        "times in the figures": time_of(study.timed),
        "command": Html(f"<code>{html(run.manifest['command'] or NONE)}</code>"),
    }
    return join([_entries(entries), _entries(long, "wide")])


def _gate(calibration: dict[str, Any]) -> Html:
    """A calibrated gate in a line: its reading, threshold and limit, and the rate it holds."""
    settings, checked = calibration["settings"], calibration["held_out"]
    options = ", ".join(f"{name} {value}" for name, value in settings["options"])
    limit = settings["max_skips"]
    return html(
        f"{settings['name']}: {options}; transmits above {settings['threshold']:.4g}, "
        f"{'at most ' + str(limit) + ' skips in a row' if limit else 'no limit on skips in a row'}; rate "
        f"{checked['rate']:.3f} on {checked['episodes']} held-out episodes"
    )


def _entries(entries: Mapping[str, object], kind: str = "") -> Html:
    return join(
        Html(f'<div class="{kind}"><dt>{html(name)}</dt><dd>{html(value)}</dd></div>')
        for name, value in entries.items()
    )


def runs_table(study: Study) -> Html:
    """All runs of a study, and what each is used for."""
    rows = [
        [
            run.folder,
            _use(run, study),
            f"{run.summary['rate']:g}",
            run.summary["episodes"],
            run.evaluation["seed"],
            run.summary["link"],
            ", ".join(run.methods),
            Html(f"<code>{html(run.manifest['command'] or NONE)}</code>"),
        ]
        for run in study.runs
    ]
    heads = ["folder", "shown as", "rate", "episodes", "seed", "link", "methods", "command"]
    return table("Runs", heads, rows)


def manifests(study: Study) -> Html:
    """Manifest and calibrations of the runs behind table and times, as JSON."""
    told = {"Manifest of the table's run": study.table}
    if study.realtime not in (None, study.table):
        told["Manifest of the run over real sockets"] = study.timed
    return join(
        fill("manifest.html", title=title, folder=run.folder, text=json.dumps(_all_of(run), indent=2))
        for title, run in told.items()
    )


def _all_of(run: Run) -> dict[str, Any]:
    return {**run.manifest, "calibration": run.calibrations}


def _use(run: Run, study: Study) -> str:
    uses = {
        "table": run is study.table,
        "times": run is study.timed,
        "rejections": run is study.rejections,
        "rates": len(study.sweep) > 1 and any(run is one for one in study.sweep),
    }
    return ", ".join(use for use, true in uses.items() if true) or "not shown, another run has more"
