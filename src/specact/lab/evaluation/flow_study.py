"""The study of FLASH and its controls as a list of runs, and the cost of each kind of round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from specact.errors import ConfigError
from specact.families.chunks.sources import load_policy
from specact.families.flash.bundle import FLASH, load_flash
from specact.families.flash.check import Check
from specact.families.flash.pair import FlashPair
from specact.families.flash.rounds import ROUNDS, Rounds
from specact.families.flash.verify import RoundRequest
from specact.families.load import load_pair
from specact.files import write_json
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot, play
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.rollout.rollout import episode_seed
from specact.lab.statistics import mean_interval
from specact.observation import ObservationHistory, Window
from specact.rng import Role, StepAddress, stream

_METHODS = (
    "full", "full_5", "full_3", "full_2", "full_1", "flash", "flash_fitted", "flash_shuffled",
    "flash_fitted_shuffled", "flash_unguarded", "flash_stale",
    "flash_last", "flash_last_fitted", "block", "unchecked", "unchecked_fitted",
)  # fmt: skip
# Episodes that are used for neither training, calibration nor evaluation.
_FIRST_EPISODE = 40_000_000
_NEVER, _ALWAYS = Check(within=0.0, guarded=False), Check(within=1e9, guarded=False)


@dataclass(frozen=True)
class FlowStudy:
    """The study of one flow policy.

    Attributes:
        evaluation: its evaluation in closed loop.
        on_path: episodes on which rounds are timed.
    """

    evaluation: Evaluation
    on_path: int

    @property
    def folder(self) -> str:
        """Its folder below the study's."""
        return self.evaluation.bundle


def plan_flow(*, seed: int, quick: bool) -> list[FlowStudy]:
    """The flow policies that come with the package and have a block, cheap ones first.

    Args:
        seed: random seed.
        quick: few episodes of each, for a smoke test.
    """
    push = Evaluation("pusht-flow", None, _METHODS, 200, seed=seed, shard=20)
    arm = Evaluation("metaworld-flow", None, _METHODS, 200, seed=seed, shard=10)
    studies = [FlowStudy(push, 4), FlowStudy(arm, 10)]
    if quick:
        return [
            replace(study, evaluation=replace(study.evaluation, episodes=10, shard=10), on_path=1) for study in studies
        ]
    return studies


def target_observations(pair: FlashPair, env: str, episodes: int, seed: int) -> list[list[Window]]:
    """The observations of each episode of the target's own rollouts, with full rounds."""
    robot, history = SimulatedRobot(load_task(env, pair.observation)), ObservationHistory(pair.observation)
    paths: list[list[Window]] = []
    for episode in range(_FIRST_EPISODE, _FIRST_EPISODE + episodes):
        history.reset()
        robot.start(episode_seed(seed, episode, robot.task))
        paths.append(windows := [])
        while not robot.done:
            windows.append(history.push(robot.observe()))
            chunk = pair.policy.infer(pair.policy.spec.observation.select(windows[-1]), stream(seed, Role.DRAFT))
            play(robot, history, chunk[: pair.execute])
    return paths


def measure_costs(
    pair: FlashPair, windows: list[Window], seed: int, progress: Callable[[int, int], None]
) -> dict[str, dict[str, float]]:
    """The time of each kind of round on the same observations, in random order.

    Args:
        pair: with a block.
        windows: observations.
        seed: of the order.
        progress: called with (done, total).

    Returns:
        For ``full_N``, a full round of N steps, ``check``, a block's draft that is accepted, ``failed``, one that is
        not, with the full round behind it, ``given``, the check of a chunk that is there, ``given_failed``, and
        ``stale``, the check on another window's cache, and ``block``, the draft alone: ``ms``, the median, and
        ``relative``, the geometric mean of the ratio to ``full_10`` with its interval from ``relative_low`` to
        ``relative_high``.
    """
    target, order = pair.target, stream(seed, Role.GATE)
    cache = pair.policy.networks.cache([pair.policy.spec.observation.select(windows[0])])
    middle = pair.units.to_environment(np.zeros((pair.policy.spec.chunk, pair.policy.spec.actions), np.float32))
    kinds = {f"full_{steps}": RoundRequest(True, steps=steps) for steps in (1, 2, 3, 5, 10)} | {
        "check": RoundRequest(False, check=_ALWAYS),
        "failed": RoundRequest(False, check=_NEVER),
        "given": RoundRequest(False, middle, _ALWAYS),
        "given_failed": RoundRequest(False, middle, _NEVER),
        "stale": RoundRequest(False, check=_ALWAYS, stale=True, cache=cache),
    }
    drafter = pair.drafter_of(ROUNDS["block"])
    seconds: dict[str, list[float]] = {name: [] for name in (*kinds, "block")}
    for number, window in enumerate(windows):
        address = StepAddress(seed, 0, 0, number)
        for name in order.permutation(list(seconds)).tolist():
            started = time.perf_counter()
            if name == "block":
                drafter.propose(window, order)
            else:
                target.answer(window, address).round(kinds[name])
            seconds[name].append(time.perf_counter() - started)
        progress(number + 1, len(windows))
    return relative_costs(seconds, seconds["full_10"])


def relative_costs(seconds: Mapping[str, Sequence[float]], baseline: Sequence[float]) -> dict[str, dict[str, float]]:
    """The cost of each kind of work, beside that of a baseline on the same observations in the same order.

    Args:
        seconds: by name, of each observation.
        baseline: likewise.

    Returns:
        By name ``ms``, the median, and ``relative``, the geometric mean of the ratio to the baseline, with its interval
        from ``relative_low`` to ``relative_high``.
    """
    costs = {}
    for name, spent in seconds.items():
        # Of logarithms, because one outlier would dominate the mean of ratios.
        ratio = mean_interval(np.log(spent) - np.log(baseline))
        low, mean, high = (math.exp(value) for value in (ratio.low, ratio.mean, ratio.high))
        costs[name] = {
            "ms": 1e3 * float(np.median(spent)), "relative": mean, "relative_low": low, "relative_high": high,
        }  # fmt: skip
    return costs


def cost_of(rounds: Rounds, metrics: Mapping[str, Any], costs: Mapping[str, Mapping[str, float]]) -> float:
    """Milliseconds per executed action: every round at the measured cost of its kind, failed ones at full cost.

    Args:
        rounds: the composition.
        metrics: of its rollouts, see :func:`~specact.lab.evaluation.metrics.method_metrics`.
        costs: see :func:`measure_costs`.
    """
    ms = {name: cost["ms"] for name, cost in costs.items()}
    full, failed, sent = metrics["full"], metrics["failed"], metrics["transmission_rate"]
    drafts_block = rounds.proposes == "block" and not rounds.on_device
    check, failed_check = (ms["check"], ms["failed"]) if drafts_block else (ms["given"], ms["given_failed"])
    spent = (full - failed) * ms[f"full_{rounds.steps}"] + failed * failed_check
    spent += (sent - full) * (ms["stale"] if rounds.stale else check)
    if rounds.on_device:
        spent += ms["block"]
    return float(spent / metrics["actions_per_round"])


def acceptance(pair: FlashPair, windows: list[Window], seed: int) -> dict[str, dict[str, float]]:
    """The mean accepted share of the executed actions of the block's drafts, with images and with blank ones.

    Drafts from blank images are blind, so a check that uses the images would accept fewer of their actions.

    Returns:
        For ``flash`` and ``flash_fitted``: ``seen``; for targets with cameras also ``blank``, and ``blind``, where
        the draft alone sees blank images.
    """
    target, shares = pair.target, {}
    for name in ("flash", "flash_fitted"):
        rounds = ROUNDS[name]
        within = pair.settings.within if rounds.within is None else rounds.within
        question = RoundRequest(False, check=Check(rounds.levels or pair.settings.levels, within, guarded=False))
        accepted = {
            "seen": [target.answer(w, _address(seed, n)).round(question).accepted for n, w in enumerate(windows)]
        }
        if pair.policy.spec.observation.images:
            accepted["blank"] = [
                target.answer(blank(w, pair), _address(seed, n)).round(question).accepted for n, w in enumerate(windows)
            ]
            drafter = pair.drafter_of(ROUNDS["block"])
            drafted = [
                pair.units.to_environment(drafter.propose(blank(w, pair), stream(seed, Role.DRAFT)).actions)
                for w in windows
            ]
            accepted["blind"] = [
                target.answer(w, _address(seed, n)).round(replace(question, drafted=chunk)).accepted
                for n, (w, chunk) in enumerate(zip(windows, drafted, strict=True))
            ]
        shares[name] = {kind: float(np.mean(lengths)) / pair.execute for kind, lengths in accepted.items()}
    return shares


def _address(seed: int, number: int) -> StepAddress:
    return StepAddress(seed, 0, 1, number)


def blank(window: Window, pair: FlashPair) -> Window:
    """The window with its images replaced by mid-grey."""
    images = set(pair.policy.spec.observation.images)
    arrays = {name: np.full_like(array, 128) if name in images else array for name, array in window.arrays.items()}
    return Window(arrays, window.instruction)


def write_rounds(study: FlowStudy, out: Path, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Measures costs and acceptance, and writes them to ``out`` with the check's figures from the block's bundle.

    Raises:
        ConfigError: if the policy has no block.
    """
    evaluation = study.evaluation
    pair = load_pair(evaluation.bundle)
    if not isinstance(pair, FlashPair) or pair.block is None or pair.path is None:
        raise ConfigError(
            f"{evaluation.bundle} is no flow policy with a block; train one: specact train with a recipe of kind = "
            '"flash"'
        )
    block = load_flash(pair.path / FLASH, load_policy(str(pair.path)))

    def update(done: int, total: int) -> None:
        progress("costs of rounds", done, total)

    windows = list(
        chain.from_iterable(target_observations(pair, evaluation.env or pair.env, study.on_path, evaluation.seed))
    )
    summary = {
        "bundle": pair.name, "fingerprint": pair.fingerprint, "inferences": len(windows), "episodes": study.on_path,
        "seed": evaluation.seed, "levels": list(pair.settings.levels), "within": pair.settings.within,
        "check": block.manifest["check"], "acceptance": acceptance(pair, windows, evaluation.seed),
        "costs": measure_costs(pair, windows, evaluation.seed, update),
    }  # fmt: skip
    write_json(out, summary)
    return summary
