"""Pairs of chunk policies in a rollout: a batch of robots does what each of them would do alone."""

import dataclasses
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specact.lab.rollout.methods import load_method
from specact.pair import Pair

pytest.importorskip("mujoco")

from tests.lab.rollout import chunk_policies

from specact.families.chunks.pair import PairSettings
from specact.gates.settings import GateSettings
from specact.lab.envs import load_task
from specact.lab.rollout.realtime import RealTime
from specact.lab.rollout.rollout import Shard, episode_seed, run_shard
from specact.load import load_pair, make_pair
from specact.policy import SpeculativePolicy
from specact.types import VirtualClock

SMALL, LARGE = (f"{chunk_policies.__name__}:{name}" for name in ("small", "large"))
SEED = 3
GATES = {
    "draft": GateSettings("never"),
    "target": GateSettings("always"),
    "hybrid": GateSettings("always"),
    "random": GateSettings("random", threshold=0.5),
    "adahi": GateSettings("deviation", threshold=0.5),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair[Any]:
    folder = tmp_path_factory.mktemp("chunks") / "pair"
    return make_pair(folder, SMALL, LARGE, PairSettings(execute=4, accept_within=0.4, env="ball"))


def shard(pair: Pair[Any], method: str, episodes: tuple[int, ...]) -> Shard:
    made = Shard.of(pair, "ball", load_method(method), GATES[method], episodes, SEED)
    return replace(
        made, source=replace(pair.source, draft=SMALL, target=LARGE), link="wifi-paper", draft_s=0.002, target_s=0.011
    )


@pytest.mark.parametrize("method", ["target", "adahi"])
def test_robots_in_a_batch_do_what_each_does_alone(pair: Pair[Any], method: str) -> None:
    outcomes, table = run_shard(shard(pair, method, (0, 1, 2)))
    assert len(set(table["episode"].tolist())) == 3
    for episode in range(3):
        (alone,), own = run_shard(shard(pair, method, (episode,)))
        assert outcomes[episode] == alone
        rows = table["episode"] == episode
        for name, values in own.items():
            np.testing.assert_array_equal(table[name][rows], values, err_msg=name)


@pytest.mark.parametrize("method", ["hybrid", "random"])
def test_a_rollout_is_what_the_policy_does_on_a_robot(pair: Pair[Any], method: str) -> None:
    """The lock step asks both policies beforehand, the robot its own parts; the streams are the same."""
    outcomes, table = run_shard(shard(pair, method, (0, 1)))
    task = load_task("ball")
    for episode, outcome in enumerate(outcomes):
        policy = SpeculativePolicy(pair, GATES[method].build(pair), seed=SEED, clock=VirtualClock())
        policy.reset(episode)
        env = task.make()
        observation, info = env.reset(seed=episode_seed(SEED, episode, task))
        steps, done, transmitted = 0, False, []
        while not done:
            inferring = policy.wants_inference
            observation, _, terminated, truncated, info = env.step(policy.act(observation))
            if inferring:
                assert policy.record is not None
                transmitted.append(policy.record.decision.transmit)
            steps += 1
            done = terminated or truncated or steps >= task.max_steps
        env.close()
        assert (outcome.steps, outcome.success, outcome.score) == (steps, info["success"], info["score"])
        assert table["transmitted"][table["episode"] == episode].tolist() == transmitted


def test_real_time_asks_a_server_that_was_told_of_the_target(pair: Pair[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder names neither policy. The world waits for the answers, so episodes are those of virtual time."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    )
    shards = [shard(pair, method, (0, 1)) for method in ("draft", "hybrid", "random")]
    with RealTime(load_pair(pair.source, draft=SMALL, target=LARGE), "loopback", 30_000.0, SEED) as live:
        for asked, (outcomes, table) in live.run(shards):
            wanted, virtual = run_shard(asked)
            untimed = [[dataclasses.replace(one, latency_s=0.0) for one in ends] for ends in (outcomes, wanted)]
            assert untimed[0] == untimed[1]
            for episode in asked.episodes:
                asks = [one["transmitted"][one["episode"] == episode] for one in (table, virtual)]
                np.testing.assert_array_equal(*asks)
