"""ADAHI's equations 9 and 10 as written: which rate a threshold through the inverted fit of equation 6 leads to.

F in ``rate = 1 - F(r_th)`` is the distribution of the rejection probability: of the primary code that was sampled, its
expectation over the draft's codes, or of any sampled code; or of the fitted rejection, which leads to the quantile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from experiments.grid import Run
from specact.errors import ConfigError
from specact.gates.calibration import TOLERANCE, threshold_for_rate
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.envs import env_of
from specact.lab.evaluation.calibrate import fit_rejection, rejection_threshold
from specact.lab.rollout.methods import HYBRID
from specact.lab.rollout.rollout import EpisodeRange, Shard
from specact.lab.rollout.steps import Table, free_steps
from specact.load import load_pair
from specact.systems.adahi import Reading

RATE, SHARD = 0.6, 10
# Episodes with everything verified, for the fits, and as many others for the rate that each threshold leads to.
EPISODES = {"ball": 100, "swarm": 100, "peg": 30, "pusht": 40, "relocate": 30, "kitchen": 4}
REJECTIONS = {"sampled": "rejection_0", "expected": "tv_0", "any": "rejection"}


def thresholds(name: str, folder: Path, run: Run) -> list[dict[str, Any]]:
    """A row per reading of the deviation, distribution F and fit: threshold, outcome and rate.

    The rate is that of the steps that the score decided, without a limit on skips; where no score lies beyond the
    threshold it is 1 or 0 without a rollout.
    """
    pair, count, rows = load_pair(name), run.few(EPISODES[name]), list[dict[str, Any]]()

    def roll(gate: GateSettings, part: EpisodeRange) -> Table:
        numbers = part.episodes(count)
        chunks = [numbers[at : at + SHARD] for at in range(0, count, SHARD)]
        shards = [Shard.of(pair, env_of(pair.env), HYBRID, gate, chunk, run.seed) for chunk in chunks]
        tables = {shard.episodes[0]: table for shard, (_, table) in run.pool.run(shards)}
        steps = {key: np.concatenate([tables[first][key] for first in sorted(tables)]) for key in tables[numbers[0]]}
        free = free_steps(steps)
        return {key: column[free] for key, column in steps.items()}

    for reading in get_args(Reading):
        gate = gate_settings("adahi", pair, (f"reading={reading}", "max_skips=unlimited"))
        steps = roll(replace(gate, threshold=-np.inf), EpisodeRange.CALIBRATION)
        scores, labels = steps["score"], {"reading": reading}

        def rate_at(gate: GateSettings) -> float:
            return float(roll(gate, EpisodeRange.HELD_OUT)["transmitted"].mean())

        for rejection, column in REJECTIONS.items():
            model, wanted = fit_rejection(scores, steps[column]), rejection_threshold(steps[column], RATE)
            for kind, fit in (("linear", model.linear), ("logarithmic", model.logarithmic)):
                row = {**labels, "rejection": rejection, "fit": kind, "slope": fit.slope, "r2": fit.r2, "r_th": wanted}
                try:
                    threshold = fit.inverse(wanted)
                except ConfigError:
                    rows.append({**row, "threshold": None, "outcome": "undefined", "rate": None})
                    continue
                outcome = "always" if threshold < scores.min() else "never" if threshold > scores.max() else "threshold"
                rate = {"always": 1.0, "never": 0.0}.get(outcome)
                rate = rate_at(replace(gate, threshold=threshold)) if rate is None else rate
                rows.append({**row, "threshold": threshold, "outcome": outcome, "rate": rate})
            run.update(f"{name}, {reading}", len(rows), 7 * len(get_args(Reading)))
        threshold, tie = threshold_for_rate(scores, RATE)
        rate = rate_at(replace(gate, threshold=threshold, tie_probability=tie))
        rows.append({**labels, "rejection": "fitted", "fit": "quantile", "threshold": threshold, "outcome": "threshold",
                     "rate": rate})  # fmt: skip
    return rows


def spread(rows: Mapping[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """A row per pair: the least and largest rate over readings and fits; outcomes where F is as written."""
    for pair, fits in rows.items():
        written = [fit for fit in fits if fit["rejection"] != "fitted"]
        row: dict[str, Any] = {
            "pair": pair, "of": len(written), "undefined": sum(fit["rate"] is None for fit in written),
            "met": sum(fit["rate"] is not None and abs(fit["rate"] - RATE) <= TOLERANCE for fit in written),
        }  # fmt: skip
        for rejection in (*REJECTIONS, "fitted"):
            rates = [fit["rate"] for fit in fits if fit["rejection"] == rejection and fit["rate"] is not None]
            row[rejection] = {"low": min(rates, default=None), "high": max(rates, default=None)}
        yield row
