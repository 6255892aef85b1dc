"""TISED: what a faster step does to the task, as sweeps over methods, links and levers (docs/results/tised.md).

``--data`` is the folder with ``network/``, the recorded links; without it these are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.grid import Cell, Run, specact
from experiments.measure import interleaved, relative_costs
from experiments.tised.findings import compare_methods, find_all
from experiments.tised.tables import report as report
from specact.lab.tised.analysis import contrasts_of, neighbours_of, read_sweeps, sort_curves
from specact.lab.tised.levers import settings_of, subject_of
from specact.lab.train.variants import BundleVariants
from specact.rng import Role, stream

STEADY = [f"loopback+delay={ms}" for ms in (1, 20, 50, 100, 200)]
# Recordings of Wi-Fi and an internet provider between a real robot and its operator, and of an LTE phone.
RECORDED = [
    "rtt:network/telerobot_rtt/tyrell_roundtrip024.csv",
    "mahimahi:network/mahimahi/TMobile-LTE-short.up,network/mahimahi/TMobile-LTE-short.down",
]
# A draft at 50 times its stored time, and a server whose target takes what a 12-layer, 768-wide transformer takes on
# two cores.
FAR = "--hardware vla-rtx-4070 --target-ms 38"
SLOW = "--hardware agx-50w vla-rtx-4070"
# Networks as strengths of quantisation.
QUANTISED = {"float32": 0.0, "W8A8": 4.0, "W4A8": 8.0}

# Options of the sweep, and its episodes. The lever "alone" is of methods without a server: the target, and the learned
# gate's head.
SWEEPS: dict[str, tuple[str, int]] = {
    "frontier-ball": (
        "--bundle ball --levers verification=1,0.6,0 late=1,0.6 chance=0.6 remote remote_async=2 alone=0,1 "
        f"--paces 0 0.02 --idle last neutral {FAR} --calibration-episodes 15", 40,
    ),
    # One link, more episodes: what the robot does while it waits. The task's holding action is the last one.
    "idle-ball": (
        "--bundle ball --levers verification=1,0 late=0.6 remote_async=2 alone=0,1 --paces 0 --idle last neutral "
        f"{FAR} --links loopback+delay=100", 200,
    ),
    # Every lever of a flow policy, and of its execution, on a moving goal.
    "chase": (
        "--bundle ball-chase-flow --levers steps naive=0,1,2,3,4 aligned=0,2 roll_forward=0,2 inpainting=0,2 "
        f"quantisation=0,4,8 --paces 0.1 {SLOW}", 100,
    ),
    "flash-chase": (f"--bundle ball-chase-flow --levers flash --paces 0.1 {SLOW}", 100),
    # A device on which the target takes 50 and 485 times as long as here, and a server on which it takes 2 ms.
    "split-ball": (
        "--bundle ball --levers split --paces 0 --idle last --hardware vla-rtx-4070 vla-agx-50w --target-ms 2 "
        f"--links {' '.join(STEADY[:3])}", 100,
    ),
    # The paper's asynchronous model where the world waits; latencies are absolute, in the order of half a chunk.
    "naive-pusht": ("--bundle pusht-flow --steps 2 --levers naive=0,1,2,3,4 --hardware 480ms", 200),
    "naive-metaworld": ("--bundle metaworld-flow --levers naive=0,1,2,3,4 --hardware 100ms", 120),
    "naive-peg": ("--bundle peg --levers naive=0,1,2,3,4 --hardware 40ms", 100),
    # Steps with the latencies that the paper has for them: most of an inference is not steps.
    "steps-pusht": ("--bundle pusht-flow --levers steps --hardware pi05-rtx-4070 pi05-agx-30w", 100),
    "jerk-steps": ("--bundle pusht-flow --levers steps --hardware this-machine", 100),
    "jerk-window": ("--bundle pusht --levers window --hardware this-machine", 100),
}  # fmt: skip


def plan(run: Run) -> Iterator[Cell]:
    """A cell per sweep, and one of times that need a quiet machine."""
    for name in SWEEPS:
        yield Cell(name, partial(swept, name))
    yield Cell("quantised", quantised)


def swept(name: str, folder: Path, run: Run) -> dict[str, Any]:
    """Runs a sweep and analyses it."""
    words, episodes = SWEEPS[name][0].split(), run.few(SWEEPS[name][1])
    recorded = run.data is not None and (run.data / "network").is_dir()
    if name.startswith("frontier"):
        words += ["--links", *(STEADY[:1] if run.quick else STEADY), *(RECORDED if recorded else ())]
    if run.quick:
        words += ["--calibration-episodes", "2"]
    command = ["tised", "sweep", *words, "--episodes", str(episodes), "--seed", str(run.seed)]
    out = (folder / "sweep").resolve()
    specact(*command, "--out", out, folder=run.data if recorded else None)
    table, baselines, _ = read_sweeps([out])
    return {
        "command": " ".join(["specact", *command]),
        **{part: list(map(plain, rows)) for part, rows in analyse(table, baselines).items()},
    }  # fmt: skip


def analyse(table: dict[str, np.ndarray], baselines: dict[str, float]) -> dict[str, Sequence[Any]]:
    """Cells, contrasts, pairs of methods, and findings of a sweep."""
    curves = sort_curves(table, baselines)
    contrasts = contrasts_of(curves)
    return {
        "cells": [cell for curve in curves for cell in curve.cells], "contrasts": contrasts,
        "neighbours": neighbours_of(curves), "methods": compare_methods(table),
        "findings": find_all(curves, contrasts),
    }  # fmt: skip


def plain(value: Any) -> dict[str, Any]:
    """A part of an analysis as plain values, the conditions of its place beside the others."""
    row: dict[str, Any] = value if isinstance(value, dict) else asdict(value)
    return {**row.pop("place", {}), **row}


def quantised(folder: Path, run: Run) -> dict[str, Any]:
    """Time of an inference of the chasing policy with quantised networks over that with float32, in turns."""
    variants = partial(BundleVariants, folder=folder / "variants")
    subject = subject_of("ball-chase-flow", variants, None, "", None, 10)
    drivers = {name: settings_of("quantisation", subject, (bits,))[-1].driver for name, bits in QUANTISED.items()}
    subject.variants.make()
    calls = {name: driver.call("inference") for name, driver in drivers.items()}
    kinds = {name: lambda item, call=call: call() for name, call in calls.items()}
    for rounds in (10, run.few(1000)):  # the first ones warm up
        seconds = interleaved(kinds, range(rounds), stream(run.seed, Role.GATE))
    return relative_costs(seconds, seconds["float32"])
