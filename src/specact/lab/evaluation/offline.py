"""Calibration and comparison of methods without a simulator: along demonstrations that no policy was trained on.

What a policy does has no effect on what it sees next, so that success cannot be told: only how far the actions are from
the demonstrated ones and from the target's, and what is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specact.errors import ConfigError, DataError
from specact.families.load import AnyPair, named_again
from specact.files import write_json
from specact.gates.calibration import Calibration
from specact.gates.settings import BUNDLES_OWN, GateChoices, GateSettings
from specact.lab.data.episodes import Episodes
from specact.lab.evaluation.calibrate import find_threshold
from specact.lab.evaluation.chance import asked_gate, at_rate
from specact.lab.evaluation.imitation import Along, Imitation, along
from specact.lab.evaluation.metrics import contrasts, step_metrics
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import COMPOSITION
from specact.lab.rollout.steps import Table
from specact.lab.statistics import mean_interval
from specact.locks import locked

Progress = Callable[[str, int, int], None]
ROUNDS = 2


def calibrate_along(
    pair: AnyPair,
    gate: GateSettings,
    rate: float,
    shown: Episodes,
    pool: Pool,
    progress: Progress,
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Calibration:
    """Finds a gate's threshold for a rate along demonstrations, and checks it on others.

    Args:
        pair: the policies.
        gate: without its threshold.
        rate: wanted transmission rate, in (0, 1).
        shown: demonstrations; every other episode is kept for the check.
        pool: where.
        progress: told (what is going on, done, in all).
        rounds: thresholds to try; a gate that looks at executed actions shifts its own scores.
        seed: of everything random.

    Raises:
        ConfigError: for a rate that the gate's limit on skips does not allow.
        DataError: if there are fewer than two episodes.
    """
    if len(shown) < 2:
        raise DataError("at least two demonstrations are needed: one to calibrate on and one to check on")
    numbers = np.arange(len(shown))
    parts = shown.select(numbers[::2]), shown.select(numbers[1::2])
    said, done = f"calibrating {gate.name}", 0

    def roll(settings: GateSettings, number: int) -> Table:
        nonlocal done
        checking = number > rounds
        progress(said, done, rounds + 2)
        table = _run(pair, COMPOSITION, settings, parts[checking], pool, seed).steps
        done += 1
        progress(said, done, rounds + 2)
        return table

    found = find_threshold(gate, rate, rounds, roll)
    made_by = {"along": "demonstrations", "episodes": len(shown), "rounds": rounds, "seed": seed}
    return found.calibration(pair, rate, len(parts[1]), made_by)


def evaluate_along(
    pair: AnyPair,
    methods: tuple[str, ...],
    shown: Episodes,
    rate: float,
    out: Path,
    pool: Pool,
    progress: Progress,
    *,
    gates: GateChoices = BUNDLES_OWN,
    seed: int = 0,
    command: str = "",
) -> dict[str, Any]:
    """Runs methods along the same demonstrations and writes ``summary.json``.

    Gates are calibrated on a third of the episodes, which no method is then compared on.

    Args:
        pair: the policies.
        methods: see :data:`~specact.lab.rollout.methods.METHODS`.
        shown: demonstrations that neither policy was trained on.
        rate: transmission rate that gates are calibrated for.
        out: run folder.
        pool, progress: as for :func:`calibrate_along`.
        gates: readings that the papers leave open.
        seed: of everything random.
        command: recorded in the summary.

    Returns:
        The summary: for each method ``error`` (mean squared error to the demonstrated actions, normalised, with a 95 %
        interval over episodes), ``raw`` in the environment's units, ``transmission_rate``, and what
        :func:`~specact.lab.evaluation.metrics.step_metrics` gives; paired ``contrasts`` of the error with Holm's
        correction over all of them.

    Raises:
        ConfigError: for a method that this pair does not have, or a folder that is in use or holds another run.
        DataError: if there are too few episodes.
    """
    if not 0.0 < rate < 1.0:
        raise ConfigError(f"rate must lie strictly between 0 and 1, got {rate}")
    for name in methods:
        rollout_of(pair, load_method(name))
    if len(shown) < 6:
        raise DataError(
            f"there are {len(shown)} held-out demonstrations; at least 6 are needed to calibrate and compare"
        )
    if (out / "summary.json").exists():
        raise ConfigError(f"{out} holds a finished run; choose another --out")
    numbers = np.arange(len(shown))
    kept = numbers % 3 == 0
    fitting, judged = shown.select(numbers[kept]), shown.select(numbers[~kept])
    found: dict[str, Along] = {}
    settings: dict[str, GateSettings] = {}
    with locked(out):
        for done, name in enumerate(sorted(methods, key=lambda name: load_method(name).rate_of is not None)):
            progress("methods", done, len(methods))
            settings[name] = _gate(name, pair, rate, gates, fitting, found, pool, progress, seed)
            found[name] = _run(pair, name, settings[name], judged, pool, seed)
        progress("methods", len(methods), len(methods))
        rows = {
            name: {
                "error": dataclasses.asdict(mean_interval(found[name].error)),
                "raw": float(found[name].raw.mean()),
                **step_metrics(found[name].steps, sends=not load_method(name).on_device),
            }
            for name in methods
        }
        summary = {
            "kind": "offline",
            "command": command,
            "bundle": pair.name,
            "episodes": len(judged),
            "calibrated_on": len(fitting),
            "rate": rate,
            "seed": seed,
            "methods": rows,
            "gates": {name: dataclasses.asdict(settings[name]) for name in methods},
            "contrasts": contrasts({name: {"error": result.error} for name, result in found.items()}, ("error",)),
        }
        write_json(out / "summary.json", summary)
    return summary


def _gate(
    name: str,
    pair: AnyPair,
    rate: float,
    gates: GateChoices,
    fitting: Episodes,
    found: dict[str, Along],
    pool: Pool,
    progress: Progress,
    seed: int,
) -> GateSettings:
    method, asked = load_method(name), asked_gate(name, gates, pair)
    if method.rate_of is not None:
        rival_run = found.get(method.rate_of)
        return at_rate(asked, rate, None if rival_run is None else rival_run.steps)
    if method.gate in ("always", "never"):
        return asked
    return calibrate_along(pair, asked, rate, fitting, pool, progress, seed=seed).settings


def _run(pair: AnyPair, method: str, gate: GateSettings, shown: Episodes, pool: Pool, seed: int) -> Along:
    """The demonstrations in as many parts as there are workers; results do not depend on their number."""
    parts = np.array_split(np.arange(len(shown)), min(pool.workers, len(shown)))
    work = [
        Imitation(pair.source, shown.select(part), method, gate, seed, named_again(pair), int(part[0]))
        for part in parts
    ]
    by_first = {item.first: result for item, result in pool.each(along, work)}
    results = [by_first[first] for first in sorted(by_first)]
    steps = {name: np.concatenate([result.steps[name] for result in results]) for name in results[0].steps}
    return dataclasses.replace(
        results[0],
        error=np.concatenate([result.error for result in results]),
        raw=np.concatenate([result.raw for result in results]),
        steps=steps,
    )
