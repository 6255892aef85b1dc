"""Offline calibration and evaluation: open loop on held-out demonstrations, without a simulator.

Actions have no effect on the next observation, so success is not measured: only the distances to the demonstrated
actions and to the target's, and the transmission rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specact.errors import ConfigError, DataError
from specact.files import write_json
from specact.gates.calibration import Calibration
from specact.gates.settings import BUNDLE_DEFAULTS, GateChoices, GateSettings, load_gate
from specact.lab.data.episodes import Episodes
from specact.lab.data.locks import locked
from specact.lab.evaluation.calibrate import find_threshold
from specact.lab.evaluation.chance import gate_at_rate_of_rival, uncalibrated_gate
from specact.lab.evaluation.imitation import OpenLoopJob, OpenLoopResult, run_open_loop
from specact.lab.evaluation.metrics import contrasts, step_metrics
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import HYBRID, Method, load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.steps import Table
from specact.lab.statistics import mean_interval
from specact.pair import Pair

Progress = Callable[[str, int, int], None]
ROUNDS = 2


def calibrate_offline(
    pair: Pair[Any],
    gate: GateSettings,
    rate: float,
    demonstrations: Episodes,
    pool: Pool,
    progress: Progress,
    *,
    method: Method = HYBRID,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Calibration:
    """Finds a gate's threshold for a rate on demonstrations, and checks it on others.

    Args:
        pair: the policies.
        gate: without its threshold.
        rate: wanted transmission rate, in (0, 1).
        demonstrations: every other episode is kept for the check.
        pool: worker pool.
        progress: called with (stage, done, total).
        method: how the pair drafts, and verifies where the gate asks for it.
        rounds: thresholds to try, because the scores of a gate that sees executed actions depend on its threshold.
        seed: random seed.

    Raises:
        ConfigError: for a rate that the gate's limit on skips does not allow.
        DataError: if there are fewer than two episodes.
    """
    if len(demonstrations) < 2:
        raise DataError("at least two demonstrations are needed: one to calibrate on and one to check on")
    numbers = np.arange(len(demonstrations))
    parts = demonstrations.select(numbers[::2]), demonstrations.select(numbers[1::2])
    stage, done = f"calibrating {gate.name}", 0

    def roll(settings: GateSettings, number: int) -> Table:
        nonlocal done
        checking = number > rounds
        progress(stage, done, rounds + 2)
        table = _run(pair, method, settings, parts[checking], pool, seed).steps
        done += 1
        progress(stage, done, rounds + 2)
        return table

    search = find_threshold(gate, rate, rounds, roll)
    provenance = {"along": "demonstrations", "episodes": len(demonstrations), "rounds": rounds, "seed": seed}
    return search.calibration(pair, rate, len(parts[1]), provenance, pair.source.decoding)


def evaluate_offline(
    pair: Pair[Any],
    methods: Sequence[str | Method],
    demonstrations: Episodes,
    rate: float,
    out: Path,
    pool: Pool,
    progress: Progress,
    *,
    gates: GateChoices = BUNDLE_DEFAULTS,
    seed: int = 0,
    command: str = "",
) -> dict[str, Any]:
    """Evaluates methods open loop on the same demonstrations and writes ``summary.json``.

    Gates are calibrated on a third of the episodes; methods are compared on the rest.

    Args:
        pair: the policies.
        methods: to compare.
        demonstrations: held out in the training of both policies.
        rate: transmission rate that gates are calibrated for.
        out: run folder.
        pool, progress: as for :func:`calibrate_offline`.
        gates: readings that the papers leave open.
        seed: random seed.
        command: recorded in the summary.

    Returns:
        The summary: for each method ``error`` (mean squared error to the demonstrated actions, normalised, with a 95 %
        interval over episodes), ``raw`` in the environment's units, ``transmission_rate``, and the
        :func:`~specact.lab.evaluation.metrics.step_metrics`; paired ``contrasts`` of the error with Holm's correction
        over all of them.

    Raises:
        ConfigError: for a method that this pair does not have, or a folder that is locked or holds another run.
        DataError: if there are too few episodes.
    """
    if not 0.0 < rate < 1.0:
        raise ConfigError(f"rate must lie strictly between 0 and 1, got {rate}")
    ran = [*map(load_method, methods)]
    for method in ran:
        rollout_of(pair, method)
    if len(demonstrations) < 6:
        raise DataError(
            f"there are {len(demonstrations)} held-out demonstrations; at least 6 are needed to calibrate and compare"
        )
    if (out / "summary.json").exists():
        raise ConfigError(f"{out} holds a finished run; choose another --out")
    numbers = np.arange(len(demonstrations))
    calibration_set = demonstrations.select(numbers[numbers % 3 == 0])
    held_out = demonstrations.select(numbers[numbers % 3 != 0])
    results: dict[str, OpenLoopResult] = {}
    settings: dict[str, GateSettings] = {}
    with locked(out):
        for done, method in enumerate(sorted(ran, key=lambda method: method.rate_of is not None)):
            progress("methods", done, len(methods))
            name = method.name
            settings[name] = _gate(method, pair, rate, gates, calibration_set, results, pool, progress, seed)
            results[name] = _run(pair, method, settings[name], held_out, pool, seed)
        progress("methods", len(methods), len(methods))
        rows = {
            method.name: {
                "error": dataclasses.asdict(mean_interval(results[method.name].error)),
                "raw": float(results[method.name].raw.mean()),
                **step_metrics(results[method.name].steps, sends=not method.on_device),
            }
            for method in ran
        }
        summary = {
            "kind": "offline",
            "command": command,
            "bundle": pair.name,
            "episodes": len(held_out),
            "calibrated_on": len(calibration_set),
            "rate": rate,
            "seed": seed,
            "methods": rows,
            "gates": {method.name: dataclasses.asdict(settings[method.name]) for method in ran},
            "contrasts": contrasts(
                ran, {name: {"error": result.error} for name, result in results.items()}, ("error",)
            ),
        }
        write_json(out / "summary.json", summary)
    return summary


def _gate(
    method: Method,
    pair: Pair[Any],
    rate: float,
    gates: GateChoices,
    calibration_set: Episodes,
    results: dict[str, OpenLoopResult],
    pool: Pool,
    progress: Progress,
    seed: int,
) -> GateSettings:
    initial = uncalibrated_gate(method, gates, pair)
    if method.rate_of is not None:
        steps = {ran: result.steps for ran, result in results.items()}
        return gate_at_rate_of_rival(method, initial, rate, steps)
    if not load_gate(method.gate).calibrated:
        return initial
    return calibrate_offline(pair, initial, rate, calibration_set, pool, progress, method=method, seed=seed).settings


def _run(
    pair: Pair[Any], method: Method, gate: GateSettings, demonstrations: Episodes, pool: Pool, seed: int
) -> OpenLoopResult:
    """Splits the demonstrations among the workers; results do not depend on their number."""
    parts = np.array_split(np.arange(len(demonstrations)), min(pool.workers, len(demonstrations)))
    jobs = [OpenLoopJob(pair.source, demonstrations.select(part), method, gate, seed, int(part[0])) for part in parts]
    by_first = {job.first: result for job, result in pool.each(run_open_loop, jobs)}
    results = [by_first[first] for first in sorted(by_first)]
    steps = {name: np.concatenate([result.steps[name] for result in results]) for name in results[0].steps}
    return dataclasses.replace(
        results[0],
        error=np.concatenate([result.error for result in results]),
        raw=np.concatenate([result.raw for result in results]),
        steps=steps,
    )
