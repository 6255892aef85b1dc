"""FLASH as a list of runs beside the controls that could make it unnecessary, and what each kind of round costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
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
from specact.families.flash.verify import Question
from specact.families.load import load_pair
from specact.files import write_json
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot, play
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.rollout.rollout import start_of
from specact.lab.statistics import mean_interval
from specact.observation import ObservationHistory, Window
from specact.rng import Role, StepAddress, stream

_METHODS = (
    "full", "full_5", "full_3", "full_2", "full_1", "flash", "flash_fitted", "flash_shuffled",
    "flash_fitted_shuffled", "flash_unguarded", "flash_stale",
    "flash_last", "flash_last_fitted", "block", "unchecked", "unchecked_fitted",
)  # fmt: skip
# Numbers that nobody trains, calibrates or evaluates on.
_FIRST_EPISODE = 40_000_000
_NEVER, _ALWAYS = Check(within=0.0, guarded=False), Check(within=1e9, guarded=False)


@dataclass(frozen=True)
class FlowChapter:
    """One flow policy.

    Attributes:
        what: its table.
        on_path: episodes on which rounds are timed.
    """

    what: Evaluation
    on_path: int

    @property
    def folder(self) -> str:
        """Below the study's."""
        return self.what.bundle


def plan_flow(*, seed: int, quick: bool) -> list[FlowChapter]:
    """The flow policies that come with the package and have a block, cheap ones first.

    Args:
        seed: of everything random.
        quick: few episodes of each, to see that everything works.
    """
    push = Evaluation("pusht-flow", None, _METHODS, 200, seed=seed, shard=20)
    arm = Evaluation("metaworld-flow", None, _METHODS, 200, seed=seed, shard=10)
    chapters = [FlowChapter(push, 4), FlowChapter(arm, 10)]
    if quick:
        return [replace(chapter, what=replace(chapter.what, episodes=10, shard=10), on_path=1) for chapter in chapters]
    return chapters


def path_of(pair: FlashPair, env: str, episodes: int, seed: int) -> list[list[Window]]:
    """The observations that the target meets where it leads, with full rounds, of each episode."""
    robot, history = SimulatedRobot(load_task(env, pair.observation)), ObservationHistory(pair.observation)
    paths: list[list[Window]] = []
    for episode in range(_FIRST_EPISODE, _FIRST_EPISODE + episodes):
        history.reset()
        robot.start(start_of(seed, episode, robot.task))
        paths.append(seen := [])
        while not robot.done:
            seen.append(history.push(robot.observe()))
            chunk = pair.policy.infer(pair.policy.spec.observation.select(seen[-1]), stream(seed, Role.DRAFT))
            play(robot, history, chunk[: pair.execute])
    return paths


def measure_costs(
    pair: FlashPair, seen: list[Window], seed: int, progress: Callable[[int, int], None]
) -> dict[str, dict[str, float]]:
    """What each kind of round takes, one after the other on the same observations, in random order.

    Args:
        pair: with a block.
        seen: observations.
        seed: of the order.
        progress: told (done, in all).

    Returns:
        For ``full_N``, a full round of N steps, ``check``, a block's draft that is accepted, ``failed``, one that is
        not, with the full round behind it, ``given``, the check of a chunk that is there, ``given_failed``, and
        ``stale``, the check on another window's cache, and ``block``, the draft alone: ``ms``, the median, and
        ``relative``, the geometric mean of the ratio to ``full_10`` with its interval from ``relative_low`` to
        ``relative_high``.
    """
    target, order = pair.target, stream(seed, Role.GATE)
    cache = pair.policy.networks.cache([pair.policy.spec.observation.select(seen[0])])
    middle = pair.units.to_environment(np.zeros((pair.policy.spec.chunk, pair.policy.spec.actions), np.float32))
    kinds = {f"full_{steps}": Question(True, steps=steps) for steps in (1, 2, 3, 5, 10)} | {
        "check": Question(False, check=_ALWAYS),
        "failed": Question(False, check=_NEVER),
        "given": Question(False, middle, _ALWAYS),
        "given_failed": Question(False, middle, _NEVER),
        "stale": Question(False, check=_ALWAYS, stale=True, cache=cache),
    }
    drafter = pair.drafter_of(ROUNDS["block"])
    seconds: dict[str, list[float]] = {name: [] for name in (*kinds, "block")}
    for number, window in enumerate(seen):
        address = StepAddress(seed, 0, 0, number)
        for name in order.permutation(list(seconds)).tolist():
            started = time.perf_counter()
            if name == "block":
                drafter.propose(window, order)
            else:
                target.answer(window, address).round(kinds[name])
            seconds[name].append(time.perf_counter() - started)
        progress(number + 1, len(seen))
    base, found = np.log(seconds["full_10"]), {}
    for name, spent in seconds.items():
        # Logarithms: one inference that was held up would decide the mean of ratios.
        ratio = mean_interval(np.log(spent) - base)
        low, mean, high = (math.exp(value) for value in (ratio.low, ratio.mean, ratio.high))
        found[name] = {
            "ms": 1e3 * float(np.median(spent)), "relative": mean, "relative_low": low, "relative_high": high,
        }  # fmt: skip
    return found


def cost_of(rounds: Rounds, metrics: Mapping[str, Any], costs: Mapping[str, Mapping[str, float]]) -> float:
    """Milliseconds for each executed action: every round at the measured cost of its kind, failed ones in full.

    Args:
        rounds: the composition.
        metrics: of its rollouts, see :func:`~specact.lab.evaluation.metrics.method_metrics`.
        costs: see :func:`measure_costs`.
    """
    ms = {name: found["ms"] for name, found in costs.items()}
    full, failed, sent = metrics["full"], metrics["failed"], metrics["transmission_rate"]
    own = rounds.proposes == "block" and not rounds.on_device
    check, in_vain = (ms["check"], ms["failed"]) if own else (ms["given"], ms["given_failed"])
    spent = (full - failed) * ms[f"full_{rounds.steps}"] + failed * in_vain
    spent += (sent - full) * (ms["stale"] if rounds.stale else check)
    if rounds.on_device:
        spent += ms["block"]
    return float(spent / metrics["actions_per_round"])


def acceptance(pair: FlashPair, seen: list[Window], seed: int) -> dict[str, dict[str, float]]:
    """The mean accepted length of the block's drafts over what is executed, with and without the cameras.

    Where the images are blank, drafts are blind, and a check that looks would accept less of them.

    Returns:
        For ``flash`` and ``flash_fitted``: ``seen``, ``blank`` (for targets with cameras), and ``blind``, where the
        draft alone sees blank images.
    """
    target, found = pair.target, {}
    for name in ("flash", "flash_fitted"):
        rounds = ROUNDS[name]
        within = pair.settings.within if rounds.within is None else rounds.within
        question = Question(False, check=Check(rounds.levels or pair.settings.levels, within, guarded=False))
        told = {"seen": [target.answer(w, _at(seed, n)).round(question).accepted for n, w in enumerate(seen)]}
        if pair.policy.spec.observation.images:
            told["blank"] = [
                target.answer(blank(w, pair), _at(seed, n)).round(question).accepted for n, w in enumerate(seen)
            ]
            drafter = pair.drafter_of(ROUNDS["block"])
            drafted = [
                pair.units.to_environment(drafter.propose(blank(w, pair), stream(seed, Role.DRAFT)).actions)
                for w in seen
            ]
            told["blind"] = [
                target.answer(w, _at(seed, n)).round(replace(question, drafted=chunk)).accepted
                for n, (w, chunk) in enumerate(zip(seen, drafted, strict=True))
            ]
        found[name] = {kind: float(np.mean(lengths)) / pair.execute for kind, lengths in told.items()}
    return found


def _at(seed: int, number: int) -> StepAddress:
    return StepAddress(seed, 0, 1, number)


def blank(window: Window, pair: FlashPair) -> Window:
    """The same with images in the middle of their range."""
    images = set(pair.policy.spec.observation.images)
    arrays = {name: np.full_like(array, 128) if name in images else array for name, array in window.arrays.items()}
    return Window(arrays, window.instruction)


def rounds_of(chapter: FlowChapter, out: Path, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Measures costs and acceptance, and writes them to ``out`` with what the block's bundle says of the check.

    Raises:
        ConfigError: if the chapter's policy has no block.
    """
    what = chapter.what
    pair = load_pair(what.bundle)
    if not isinstance(pair, FlashPair) or pair.block is None or pair.path is None:
        raise ConfigError(
            f'{what.bundle} is no flow policy with a block; train one: specact train with a recipe of kind = "flash"'
        )
    made = load_flash(pair.path / FLASH, load_policy(str(pair.path)))
    seen = list(chain.from_iterable(path_of(pair, what.env or pair.env, chapter.on_path, what.seed)))
    found = {
        "bundle": pair.name, "fingerprint": pair.fingerprint, "inferences": len(seen), "episodes": chapter.on_path,
        "seed": what.seed, "levels": list(pair.settings.levels), "within": pair.settings.within,
        "check": made.manifest["check"], "acceptance": acceptance(pair, seen, what.seed),
        "costs": measure_costs(pair, seen, what.seed, lambda done, total: progress("costs of rounds", done, total)),
    }  # fmt: skip
    write_json(out, found)
    return found
