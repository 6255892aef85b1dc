"""Families of somebody else in a rollout: by what every pair has, it does what the policy does on a robot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.lab.rollout import chunk_policies
from tests.thirdparty import my_family, my_sim

from specact.errors import ConfigError
from specact.families.chunks.pair import ChunkParts
from specact.families.chunks.policy import Chunk
from specact.gates.settings import GateSettings
from specact.lab.envs import load_task
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import Shard, episode_seed, run_shard
from specact.load import load_pair
from specact.pair import Answer, Pair, TargetVerifier
from specact.policy import SpeculativePolicy
from specact.rng import StepAddress
from specact.types import ActionUnits, Origin, Outcome, Proposal, VirtualClock

SOURCE, TASK = f"{my_family.__name__}:pair", f"{my_sim.__name__}:TASK"
SEED = 3
GATES = {
    "draft": GateSettings("never"),
    "hybrid": GateSettings("always"),
    "random": GateSettings("random", threshold=0.5),
    "adahi": GateSettings("deviation", threshold=0.5),
}


def shard(method: str, episodes: tuple[int, ...], source: str = SOURCE, task: str = TASK) -> Shard:
    made = Shard.of(load_pair(source), task, load_method(method), GATES[method], episodes, SEED)
    return replace(made, link="wifi-paper", draft_s=0.002, target_s=0.011)


@pytest.mark.parametrize("method", ["hybrid", "adahi"])
def test_a_rollout_is_what_the_policy_does_on_a_robot(method: str) -> None:
    outcomes, table = run_shard(shard(method, (0, 1)))
    task, pair = load_task(TASK), my_family.pair
    for episode, outcome in enumerate(outcomes):
        policy = SpeculativePolicy(pair, GATES[method].build(load_pair(SOURCE)), seed=SEED, clock=VirtualClock())
        policy.reset(episode)
        env = task.make()
        observation, info = env.reset(seed=episode_seed(SEED, episode, task))
        steps, done, changes = 0, False, []
        while not done:
            inferring = policy.wants_inference
            observation, _, terminated, truncated, info = env.step(policy.act(observation))
            if inferring:
                assert policy.record is not None
                changes.append((policy.record.decision.transmit, *by_hand(policy.record.proposal)))
            steps += 1
            done = terminated or truncated or steps >= task.max_steps
        env.close()
        assert (outcome.steps, outcome.success, outcome.score) == (steps, info["success"], info["score"])
        rows = table["episode"] == episode
        assert table["transmitted"][rows].tolist() == [sent for sent, _, _ in changes]
        np.testing.assert_allclose(table["distance"][rows], [distance for _, distance, _ in changes], rtol=1e-6)
        expected = [0.0 if sent else change for sent, _, change in changes]
        np.testing.assert_allclose(table["action_change"][rows], expected, rtol=1e-6)


def by_hand(proposal: Proposal) -> tuple[float, float]:
    """Root mean square and mean distance between the drafted actions and those that verification gives."""
    wanted, bound = my_family.Expert().answer(proposal.window, StepAddress(0, 0, 0, 0))
    given, open_ = [], True
    for drafted, better in zip(proposal.actions, wanted, strict=True):
        open_ = open_ and all(abs(drafted - better) <= bound)
        given.append(drafted if open_ else better)
    away = np.array(given)[: my_family.EXECUTE] - proposal.actions[: my_family.EXECUTE]
    return float(np.sqrt((away**2).mean(-1)).mean()), float(np.linalg.norm(away, axis=-1).mean())


def test_robots_in_a_batch_and_processes_do_what_each_does_alone() -> None:
    together, table = run_shard(shard("adahi", (0, 1, 2)))
    with Pool(2) as pool:
        alone = {one.episodes[0]: result for one, result in pool.run([shard("adahi", (i,)) for i in range(3)])}
    for episode in range(3):
        (outcome,), own = alone[episode]
        assert outcome == together[episode]
        rows = table["episode"] == episode
        for name, values in own.items():
            np.testing.assert_array_equal(table[name][rows], values, err_msg=name)


@pytest.mark.parametrize("method", ["target", "gated_target", "head_draft", "uncertainty"])
def test_methods_that_need_codes_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="choose among draft"):
        rollout_of(load_pair(SOURCE), load_method(method))


def test_there_is_nothing_to_learn_of_it() -> None:
    with pytest.raises(ConfigError, match="nobody knows what a gate could learn"):
        run_shard(replace(shard("hybrid", (0,)), learning=True))
    with pytest.raises(ConfigError, match="nobody knows what a gate could learn"):
        rollout_of(load_pair(SOURCE), load_method("hybrid")).lessons([], [], [])


class Trusting(TargetVerifier[Chunk]):
    """Accepts every draft."""

    def judge(self, answer: Answer[Chunk], proposal: Proposal, address: StepAddress) -> Outcome:
        count = len(proposal.actions)
        origins = np.full(count, Origin.ACCEPTED, np.uint8)
        return Outcome(proposal.actions, origins, count, count, answer.times, kept=1.0)


def tls_context() -> Pair[Chunk]:
    units = ActionUnits.of_range(np.full(2, -1.0, np.float32), np.full(2, 1.0, np.float32))
    small, large = chunk_policies.small, chunk_policies.large
    made = ChunkParts("tls_context", small, units, large.spec, lambda: large, execute=4).pair()
    return replace(made, verifier=Trusting, parts=None)


def test_an_acceptance_rule_of_ones_own_counts() -> None:
    _, table = run_shard(shard("hybrid", (0,), f"{__name__}:tls_context", "ball"))
    assert set(table["origin"].tolist()) == {Origin.ACCEPTED} and not table["distance"].any()
