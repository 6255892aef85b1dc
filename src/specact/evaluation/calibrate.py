"""Calibration on policy: a gate shifts the states it later sees, so its threshold is taken where it leads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specact.calibration import Calibration, threshold_for_rate
from specact.errors import ConfigError
from specact.evaluation.audit import REASONS
from specact.evaluation.methods import METHODS
from specact.evaluation.pool import Pool
from specact.evaluation.rejection import fit_rejection
from specact.evaluation.rollout import Shard
from specact.gates.settings import GateSettings
from specact.policies.bundle import Bundle

# Episode numbers nobody evaluates on: calibration and its held-out check start here.
_FIRST_EPISODE, _FIRST_HELD_OUT = 1_000_000, 2_000_000
TOLERANCE = 0.03


@dataclass(frozen=True)
class CalibrationRun:
    """How to calibrate.

    Attributes:
        rate: wanted transmission rate, in (0, 1).
        episodes: per round, and again for the held-out check.
        rounds: on states of the gated policy; at least 3, because the first ones chase their own feedback.
        seed: of everything random.
        shard: episodes that run in one batch.
    """

    rate: float
    episodes: int = 40
    rounds: int = 4
    seed: int = 0
    shard: int = 20

    def __post_init__(self) -> None:
        if not 0.0 < self.rate < 1.0:
            raise ConfigError(f"a rate to calibrate for lies strictly between 0 and 1, got {self.rate}")
        if self.rounds < 1 or self.episodes < 1:
            raise ConfigError("calibration needs at least one round and one episode")


def calibrate(
    bundle: Bundle, env: str, gate: GateSettings, run: CalibrationRun, pool: Pool, advance: Callable[[int], None]
) -> Calibration:
    """Finds a gate's threshold for a rate and checks it on held-out episodes.

    The first round transmits everything and reads the scores on the target's own states. Every further round takes
    the quantile of the scores met under the last threshold and goes half of the way there.

    Args:
        bundle: the policies.
        env: the environment's name.
        gate: without its threshold, see :class:`~specact.gates.settings.GateChoices`.
        run: how.
        pool: where.
        advance: told the number of episodes finished so far, out of ``episodes * (rounds + 2)``.
    """
    method = next(name for name, method in METHODS.items() if method.gate == gate.name)
    finished = 0

    def roll(settings: GateSettings, first: int) -> dict[str, np.ndarray]:
        nonlocal finished
        numbers = range(first, first + run.episodes)
        shards = [
            Shard(
                str(bundle.path),
                bundle.fingerprint,
                env,
                method,
                settings,
                tuple(numbers[i : i + run.shard]),
                run.seed,
                "loopback",
                0,
                0,
            )
            for i in range(0, run.episodes, run.shard)
        ]
        tables = {}
        for shard, (_, table) in pool.run(shards):
            tables[shard.episodes[0]] = table
            finished += len(shard.episodes)
            advance(finished)
        return {name: np.concatenate([tables[key][name] for key in sorted(tables)]) for name in table}

    settings = dataclasses.replace(gate, threshold=-np.inf)
    table = roll(settings, _FIRST_EPISODE)
    rounds: list[dict[str, float]] = []
    for number in range(1, run.rounds + 1):
        settings = _next(settings, table, run.rate)
        table = roll(settings, _FIRST_EPISODE + number * run.episodes)
        rounds.append({"threshold": settings.threshold, "rate": float(table["transmitted"].mean())})
    settings = _next(settings, table, run.rate)
    checked = roll(settings, _FIRST_HELD_OUT)
    free = _free(checked)
    return Calibration(
        fingerprint=bundle.fingerprint,
        rate=run.rate,
        settings=settings,
        held_out={
            "rate": float(checked["transmitted"].mean()),
            "episodes": run.episodes,
            "inferences": len(checked["transmitted"]),
        },
        rounds=rounds,
        model=dataclasses.asdict(fit_rejection(checked["score"][free], checked["rejection"][free])),
        made_by={"env": env, **dataclasses.asdict(run)},
    )


def _next(settings: GateSettings, table: dict[str, np.ndarray], rate: float) -> GateSettings:
    free = _free(table)
    threshold, tie = threshold_for_rate(table["score"][free], rate, forced=int((~free).sum()))
    if np.isfinite(settings.threshold) and threshold != settings.threshold:
        threshold, tie = (threshold + settings.threshold) / 2, 0.0
    return dataclasses.replace(settings, threshold=threshold, tie_probability=tie)


def _free(table: dict[str, np.ndarray]) -> np.ndarray:
    """Steps whose score decided; the first step's score knows nothing."""
    forced = [REASONS.index("first"), REASONS.index("max_skips")]
    return ~np.isin(table["reason"], forced)
