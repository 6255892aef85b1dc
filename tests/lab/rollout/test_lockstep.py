"""Rollouts of chunk policies and of families of somebody else: robots in a batch do what the policy does on a robot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lab.rollout import chunk_policies
from tests.thirdparty import my_family, my_sim

from specact.errors import ConfigError
from specact.families.chunks.pair import ChunkParts, PairSettings, PairSpec
from specact.families.chunks.policy import Chunk
from specact.gates.settings import GateSettings
from specact.lab.envs import load_task
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.pool import Pool, real_time
from specact.lab.rollout.rollout import Shard, episode_seed, run_shard
from specact.load import load_pair, make_pair
from specact.pair import Answer, Pair, PairSource, TargetVerifier
from specact.policy import SpeculativePolicy
from specact.rng import StepAddress
from specact.types import ActionUnits, Origin, Outcome, Proposal, StepRecord, VirtualClock

SMALL, LARGE = (f"{chunk_policies.__name__}:{name}" for name in ("small", "large"))
OWN, TROLLEY = PairSource(f"{my_family.__name__}:pair"), f"{my_sim.__name__}:TASK"
SEED = 3
GATES = {
    "draft": GateSettings("never"), "target": GateSettings("always"), "hybrid": GateSettings("always"),
    "random": GateSettings("random", threshold=0.5), "adahi": GateSettings("adahi", threshold=0.5),
}  # fmt: skip


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> PairSource:
    folder = tmp_path_factory.mktemp("chunks") / "pair"
    pair = make_pair(folder, SMALL, LARGE, PairSettings(execute=4, accept_within=0.4, env="ball"))
    return replace(pair.source, draft=SMALL, target=LARGE)


def shard(source: PairSource, method: str, episodes: tuple[int, ...], task: str = TROLLEY) -> Shard:
    made = Shard.of(load_pair(source), task, load_method(method), GATES[method], episodes, SEED)
    return replace(made, source=source, link="wifi-paper", draft_s=0.002, target_s=0.011)


def played(source: PairSource, method: str, env: str, episode: int) -> Iterator[tuple[StepRecord | None, Any]]:
    """The control steps of the policy on a robot, each with its inference and what the environment says of it."""
    pair, task = load_pair(source), load_task(env)
    policy = SpeculativePolicy(pair, GATES[method].build(pair), seed=SEED, clock=VirtualClock())
    policy.reset(episode)
    world = task.make()
    observation, _ = world.reset(seed=episode_seed(SEED, episode, task))
    for step in range(1, task.max_steps + 1):
        inferring = policy.wants_inference
        observation, _, terminated, truncated, info = world.step(policy.act(observation))
        yield policy.record if inferring else None, info
        if terminated or truncated or step == task.max_steps:
            world.close()
            return


@pytest.mark.parametrize("method", ["hybrid", "random", "adahi"])
@pytest.mark.parametrize("plugin", [False, True])
def test_a_rollout_is_what_the_policy_does_on_a_robot(chunks: PairSource, plugin: bool, method: str) -> None:
    """The lock step asks both policies beforehand, the robot its own parts; the streams are the same."""
    source, task = (OWN, TROLLEY) if plugin else (chunks, "ball")
    outcomes, table = run_shard(shard(source, method, (0, 1), task))
    for episode, outcome in enumerate(outcomes):
        steps = list(played(source, method, task, episode))
        info, records = steps[-1][1], [record for record, _ in steps if record is not None]
        assert (outcome.steps, outcome.success, outcome.score) == (len(steps), info["success"], info["score"])
        rows = table["episode"] == episode
        sent = [record.decision.transmit for record in records]
        assert table["transmitted"][rows].tolist() == sent
        if plugin:
            distances, changes = zip(*(by_hand(record.proposal) for record in records), strict=True)
            np.testing.assert_allclose(table["distance"][rows], distances, rtol=1e-6)
            np.testing.assert_allclose(table["action_change"][rows], np.where(sent, 0.0, changes), rtol=1e-6)


def by_hand(proposal: Proposal) -> tuple[float, float]:
    """Root mean square and mean distance between the drafted actions and those that verification gives."""
    wanted, bound = my_family.Expert().answer(proposal.window, StepAddress(0, 0, 0, 0))
    given, open_ = [], True
    for drafted, better in zip(proposal.actions, wanted, strict=True):
        open_ = open_ and all(abs(drafted - better) <= bound)
        given.append(drafted if open_ else better)
    away = np.array(given)[: my_family.EXECUTE] - proposal.actions[: my_family.EXECUTE]
    return float(np.sqrt((away**2).mean(-1)).mean()), float(np.linalg.norm(away, axis=-1).mean())


@pytest.mark.parametrize(("plugin", "method"), [(True, "adahi"), (False, "target"), (False, "adahi")])
def test_robots_in_a_batch_and_processes_do_what_each_does_alone(chunks: PairSource, plugin: bool, method: str) -> None:
    source, task = (OWN, TROLLEY) if plugin else (chunks, "ball")
    together, table = run_shard(shard(source, method, (0, 1, 2), task))
    assert len(set(table["episode"].tolist())) == 3
    with Pool(2 if plugin else 1) as pool:
        alone = {
            job.episodes[0]: result for job, result in pool.run([shard(source, method, (i,), task) for i in range(3)])
        }
    for episode in range(3):
        (outcome,), own_table = alone[episode]
        assert outcome == together[episode]
        rows = table["episode"] == episode
        for name, values in own_table.items():
            np.testing.assert_array_equal(table[name][rows], values, err_msg=name)


def test_real_time_asks_a_server_that_was_told_of_the_target(
    chunks: PairSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder names neither policy. The world waits for the answers, so episodes are those of virtual time."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    )
    shards = [shard(chunks, method, (0, 1), "ball") for method in ("draft", "hybrid", "random")]
    with real_time(load_pair(chunks), "loopback", 30_000.0, SEED) as run_live:
        for _, (job, (outcomes, table)) in zip(shards, run_live(shards), strict=True):
            wanted, virtual = run_shard(job)
            untimed = [[replace(outcome, latency_s=0.0) for outcome in ends] for ends in (outcomes, wanted)]
            assert untimed[0] == untimed[1]
            for episode in job.episodes:
                asks = [steps["transmitted"][steps["episode"] == episode] for steps in (table, virtual)]
                np.testing.assert_array_equal(*asks)


def test_what_a_family_of_ones_own_cannot_be_asked_for_is_refused() -> None:
    for method in ("target", "gated_target", "head_draft", "uncertainty"):
        with pytest.raises(ConfigError, match="choose among draft"):
            rollout_of(load_pair(OWN), load_method(method))
    with pytest.raises(ConfigError, match="nobody knows what a gate could learn"):
        run_shard(replace(shard(OWN, "hybrid", (0,)), learning=True))


class Trusting(TargetVerifier[Chunk]):
    """Accepts every draft."""

    def judge(self, answer: Answer[Chunk], proposal: Proposal, address: StepAddress) -> Outcome:
        count = len(proposal.actions)
        origins = np.full(count, Origin.ACCEPTED, np.uint8)
        return Outcome(proposal.actions, origins, count, count, answer.times, kept=1.0)


def trusting_pair() -> Pair[Chunk]:
    units = ActionUnits.of_range(np.full(2, -1.0, np.float32), np.full(2, 1.0, np.float32))
    small, large = chunk_policies.small, chunk_policies.large
    made = ChunkParts("trusting", small, units, PairSpec(large.spec, execute=4), lambda: large).pair()
    return replace(made, verifier=Trusting, parts=None)


def test_an_acceptance_rule_of_ones_own_counts() -> None:
    _, table = run_shard(shard(PairSource(f"{__name__}:trusting_pair"), "hybrid", (0,), "ball"))
    assert set(table["origin"].tolist()) == {Origin.ACCEPTED} and not table["distance"].any()
