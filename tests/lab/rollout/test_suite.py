"""Suites: tasks take turns over the episodes, success is told by task, cameras are as policies want them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.lab import toys

from specact.errors import ConfigError
from specact.gates.settings import GateSettings
from specact.lab.data.checks import check_fit
from specact.lab.envs import load_task
from specact.lab.envs.task import Task
from specact.lab.evaluation.metrics import method_metrics
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.rollout import Outcome, Shard, episode_seed, run_shard
from specact.load import load_pair
from specact.observation import Field

SUITE, PAIR = f"{toys.__name__}:SUITE", f"{toys.__name__}:pair"
GATES = {"draft": GateSettings("never"), "hybrid": GateSettings("always")}


def ran(method: str, episodes: int) -> tuple[list[Outcome], dict[str, np.ndarray]]:
    shard = Shard.of(load_pair(PAIR), SUITE, load_method(method), GATES[method], range(episodes), 5)
    return run_shard(replace(shard, draft_s=0.001, target_s=0.001))


def test_a_policy_sees_its_camera_in_its_size_and_hears_the_instruction() -> None:
    outcomes, _ = ran("hybrid", 8)
    assert [outcome.success for outcome in outcomes] == [True] * 8


def test_success_is_told_by_task() -> None:
    outcomes, steps = ran("draft", 8)
    assert [outcome.task for outcome in outcomes] == 4 * ["left", "right"]
    columns = {name: np.array([getattr(outcome, name) for outcome in outcomes]) for name in vars(outcomes[0])}
    metrics = method_metrics(columns, steps)
    assert {name: (share["n"], share["k"]) for name, share in metrics["tasks"].items()} == {
        "left": (4, sum(outcome.success for outcome in outcomes[::2])),
        "right": (4, 0),  # the draft always goes left
    }
    del columns["task"]
    assert "tasks" not in method_metrics(columns, steps)


def test_tasks_take_turns_whatever_the_seed() -> None:
    ten = Task("ten", toys.Hand, 20.0, 10, "", lambda episodes: episodes, tasks=tuple("abcdefghij"))
    starts = [episode_seed(77, episode, ten) for episode in range(60)]
    assert [start % 10 for start in starts] == 6 * list(range(10))
    assert len(set(starts)) == 60 and len({start // 10 for start in starts}) > 50
    assert load_task("ball").start(12345, 7) == 12345, "without tasks the seed is the one drawn"


def test_one_task_of_a_suite() -> None:
    task = load_task(f"{SUITE}/right")
    assert (task.name, task.tasks) == (f"{SUITE}/right", ())
    env = task.make()
    assert {env.reset(seed=seed)[1]["task"] for seed in range(4)} == {"right"}
    with pytest.raises(ConfigError, match=r"unknown task of .*'rihgt'; did you mean 'right'"):
        load_task(f"{SUITE}/rihgt")
    with pytest.raises(ConfigError, match="unknown task of ball"):
        load_task("ball/left")


def test_a_camera_is_looked_through_where_it_is_asked_for() -> None:
    assert "image.top" not in toys.SUITE.shapes()
    fields = {"image.top": Field((10, 12, 3), "uint8"), "image.other": Field((9, 9, 3), "uint8")}
    shapes = toys.SUITE.seeing(fields).shapes()
    assert shapes["image.top"] == (10, 12, 3) and "image.other" not in shapes
    check_fit(load_pair(PAIR), toys.SUITE)
    with pytest.raises(ConfigError, match="the bundle 'hand' has"):
        check_fit(load_pair(PAIR), load_task("ball"))
