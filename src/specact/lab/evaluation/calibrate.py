"""Calibration on policy: a gate shifts the states it later sees, so its threshold is taken where it leads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from specact.gates.calibration import Calibration, threshold_for_rate
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.envs import env_of
from specact.lab.evaluation.rejection import rejection_models
from specact.lab.rollout.methods import HYBRID, Method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import EpisodeRange, Shard
from specact.lab.rollout.steps import REASONS, free_steps
from specact.observation import Window
from specact.pair import Pair
from specact.policy import SpeculativePolicy
from specact.records import Count, InsideUnit, Seed, check_fields
from specact.types import StepRecord

TOLERANCE = 0.03


@dataclass(frozen=True)
class CalibrationRun:
    """How to calibrate.

    Attributes:
        rate: wanted transmission rate, in (0, 1).
        episodes: per round, and again for the held-out check.
        rounds: on states of the gated policy; 3 or more, because a gate shifts the states it later sees.
        seed: of everything random.
        shard: episodes that run in one batch.
    """

    rate: InsideUnit
    episodes: Count = 40
    rounds: Count = 4
    seed: Seed = 0
    shard: Count = 10

    def __post_init__(self) -> None:
        check_fields(self)


def calibrate(
    bundle: Pair[Any],
    gate: str | GateSettings,
    run: CalibrationRun,
    *,
    method: Method = HYBRID,
    env: str | None = None,
    pool: Pool | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> Calibration:
    """Finds a gate's threshold for a rate and checks it on held-out episodes.

    The first round transmits everything and reads the scores on the target's own states. Every further round tries a
    threshold on the states it leads to, and the next one is chosen from what all of them achieved.

    Args:
        bundle: the policies.
        gate: its name, with the options that the bundle recommends; or its settings without a threshold, see
            :class:`~specact.gates.settings.gate_settings`.
        run: how.
        method: how the pair drafts, and verifies where the gate asks for it.
        env: the environment's name; the bundle's own if not given.
        pool: where; in this process if not given.
        advance: told the number of episodes finished so far, out of ``episodes * (rounds + 2)``.

    Raises:
        ConfigError: for an unknown gate, or a rate that the gate's limit on skips does not allow.
    """
    settings = gate_settings(gate, bundle) if isinstance(gate, str) else gate
    world, finished = env or env_of(bundle, None), 0
    decoding = method.decoding or bundle.source.decoding

    def roll(tried: GateSettings, number: int) -> dict[str, np.ndarray]:
        nonlocal finished
        numbers = calibration_episodes(number, run.rounds, run.episodes)
        shards = [
            Shard.of(bundle, world, method, tried, numbers[i : i + run.shard], run.seed)
            for i in range(0, run.episodes, run.shard)
        ]
        tables = {}
        for shard, (_, table) in workers.run(shards):
            tables[shard.episodes[0]] = table
            finished += len(shard.episodes)
            advance(finished)
        return {name: np.concatenate([tables[key][name] for key in sorted(tables)]) for name in table}

    with Pool(1) if pool is None else nullcontext(pool) as workers:
        found = find_threshold(settings, run.rate, run.rounds, roll)
    return found.calibration(bundle, run.rate, run.episodes, {"env": world, **dataclasses.asdict(run)}, decoding)


def calibrate_along(pair: Pair[Any], path: Sequence[tuple[int, Window]], rate: float, seed: int) -> GateSettings:
    """The deviation gate with its threshold for a rate along these observations, each with its episode's number."""

    def roll(tried: GateSettings, number: int) -> dict[str, np.ndarray]:
        policy, decisions = SpeculativePolicy(pair, tried.build(pair), seed=seed), []
        for episode, window in path:
            decisions.append(infer(policy, episode, window).decision)
        columns = {"score": [d.score for d in decisions], "reason": [REASONS.index(d.reason) for d in decisions]}
        return {name: np.array(values) for name, values in columns.items()} | {
            "transmitted": np.array([decision.transmit for decision in decisions])
        }

    return find_threshold(gate_settings("deviation", pair), rate, 6, roll).settings


def infer(policy: SpeculativePolicy, episode: int, window: Window) -> StepRecord:
    """One inference on an observation; the rest of its chunk is executed without waiting."""
    if policy.record is None or policy.record.address.episode != episode:
        policy.reset(episode)
    policy.act_on(window)
    record = policy.record
    assert record is not None
    while not policy.wants_inference:
        policy.act_on(window)
    return record


def score_model(steps: dict[str, np.ndarray]) -> dict[str, Any]:
    """How the score goes with what verification would change: a rejection, or where nothing is rejected the action."""
    if "rejection" in steps:
        return rejection_models({name: steps[name] for name in ("score", "rejection", "rejection_0")})
    distance = steps.get("drafted_distance", steps.get("distance"))
    return {"spearman": float(stats.spearmanr(steps["score"], distance).statistic)}


@dataclass(frozen=True)
class Round:
    """One round of calibration: the gate, its rate over the steps it was free to decide, and over all steps."""

    settings: GateSettings
    free_rate: float
    rate: float


@dataclass(frozen=True)
class Found:
    """A calibrated gate, the rounds that led to it, and the steps of the held-out check."""

    settings: GateSettings
    rounds: list[Round]
    checked: dict[str, np.ndarray]

    def calibration(
        self, pair: Pair[Any], rate: float, episodes: int, made_by: dict[str, Any], decoding: str
    ) -> Calibration:
        """For a pair under a decoding and a rate, checked on so many held-out episodes."""
        sent, free = self.checked["transmitted"], free_steps(self.checked)
        return Calibration(
            fingerprint=pair.fingerprint,
            rate=rate,
            settings=self.settings,
            held_out={"rate": float(sent.mean()), "episodes": episodes, "inferences": len(sent)},
            rounds=[{"threshold": made.settings.threshold, "rate": made.rate} for made in self.rounds],
            model=score_model({name: column[free] for name, column in self.checked.items()}),
            made_by=made_by,
            decoding=decoding,
        )


def calibration_episodes(number: int, rounds: int, episodes: int) -> range:
    """The episodes of round ``number`` of so many; ``rounds + 1`` is the held-out check. Nobody evaluates on them."""
    if number > rounds:
        return EpisodeRange.HELD_OUT.episodes(episodes)
    return EpisodeRange.CALIBRATION.episodes(episodes, number * episodes)


def find_threshold(
    gate: GateSettings, rate: float, rounds: int, roll: Callable[[GateSettings, int], dict[str, np.ndarray]]
) -> Found:
    """Finds the threshold at which a gate holds a rate on the states it leads to.

    Args:
        gate: without its threshold.
        rate: wanted transmission rate, in (0, 1).
        rounds: thresholds to try, at least 1.
        roll: runs the episodes of a round (0, which transmits everything, to ``rounds``, and ``rounds + 1`` for the
            held-out check) with a gate; a row per inference with ``score``, ``reason`` (index into
            :data:`~specact.lab.rollout.steps.REASONS`) and ``transmitted``.

    Raises:
        ConfigError: for a rate that the gate's limit on skips does not allow.
    """
    gate.check_rate(rate)
    settings = dataclasses.replace(gate, threshold=-np.inf)
    table = roll(settings, 0)
    scores, tried = table["score"][free_steps(table)], list[Round]()
    for number in range(1, rounds + 1):
        settings = _next(settings, scores, tried, _wanted_of_free(table, rate))
        table = roll(settings, number)
        free = free_steps(table)
        scores = np.concatenate([scores, table["score"][free]])
        tried.append(Round(settings, float(table["transmitted"][free].mean()), float(table["transmitted"].mean())))
    settings = _next(settings, scores, tried, _wanted_of_free(table, rate))
    return Found(settings, tried, roll(settings, rounds + 1))


def _next(settings: GateSettings, scores: NDArray[np.float64], rounds: Sequence[Round], wanted: float) -> GateSettings:
    """The gate to try next, from all scores met so far and what the gates tried so far achieved.

    Every gate is put in terms of the share of those scores it would transmit. On its own states it transmits another
    share; the line through these pairs says which share to ask for. Working with shares and not with thresholds keeps
    the ties of discrete scores exact.
    """
    share = wanted
    if rounds:
        asked = np.array([_share(scores, made.settings) for made in rounds])
        got = np.array([made.free_rate for made in rounds])
        spread = float(np.var(asked))
        # Between a gate that damps its own feedback and one that triples it; outside that range it is noise.
        slope = float(np.clip(np.cov(asked, got, ddof=0)[0, 1] / spread, 0.5, 3.0)) if spread > 1e-4 else 1.0
        share = float(np.clip(asked.mean() + (wanted - got.mean()) / slope, 0.01, 0.99))
    threshold, tie = threshold_for_rate(scores, share)
    return dataclasses.replace(settings, threshold=threshold, tie_probability=tie)


def _share(scores: NDArray[np.float64], settings: GateSettings) -> float:
    tied = np.mean(scores == settings.threshold)
    return float(np.mean(scores > settings.threshold) + settings.tie_probability * tied)


def _wanted_of_free(table: dict[str, np.ndarray], rate: float) -> float:
    """The share of freely decided steps that makes the wanted rate, given how many are transmitted by force."""
    free = free_steps(table)
    return float(np.clip((rate * len(free) - (~free).sum()) / max(1, free.sum()), 0.0, 1.0))
