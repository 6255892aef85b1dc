"""A pair in the moving world: without latency what it was, with latency it waits where the algorithm waits."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mujoco")

from tests.lab.rollout.conftest import Instant, TapedBall

from specact import Pair
from specact.execution.schedule import Execution
from specact.families.chunks.policy import chunk_contract
from specact.families.codes.policy import CodeChunks
from specact.gates import ActionDeviation
from specact.gates.calibration import find_calibration
from specact.gates.settings import GateSettings
from specact.lab.envs import load_task
from specact.lab.envs.robot import MovingWorld, SimulatedRobot
from specact.lab.rollout.episode import Episode, Pairing, run_episode, run_pair
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.rollout import Shard, begin, episode_seed, run_together
from specact.lab.rollout.steps import Audit
from specact.lab.rollout.timed import Route, TimedGate
from specact.links.link import LINKS
from specact.links.model import SteadyLink
from specact.policy import SpeculativePolicy
from specact.types import StepRecord, VirtualClock

TASK = replace(load_task("ball"), make=TapedBall)
SEED = 5
INSTANT = Instant()
FAR = SteadyLink(rtt_ms=100.0, jitter_ms=0.0, up_mbit_s=1e6, down_mbit_s=1e6)


def gate_of(method: str, bundle: Pair[Any]) -> GateSettings:
    name = load_method(method).gate
    calibration = find_calibration(bundle, name, 0.6)
    return GateSettings(name, threshold=0.6) if calibration is None else calibration.settings


def moved(
    bundle: Pair[Any], method: str, episode: int = 0, **changes: Any
) -> tuple[Episode, Mapping[str, int], list[np.ndarray]]:
    """The episode, its counts, and what was commanded; what the gate wanted is told apart from what was sent."""
    world, told, link = MovingWorld(TASK, pace=0.0), list[Any](), changes.pop("link", INSTANT)
    pair = replace(bundle, verifier=rollout_of(bundle, load_method(method)).verifier)
    result, counts = run_pair(
        world, pair, Pairing(gate_of(method, bundle), link, **changes), start=episode_seed(SEED, episode, TASK),
        seed=SEED, episode=episode, on_decision=lambda decision, wanted: told.append((decision.transmit, wanted)),
    )  # fmt: skip
    assert isinstance(world.env, TapedBall)
    wanted = counts["wanted" if "late_for_s" in changes else "transmitted"]
    assert [sum(flags) for flags in zip(*told, strict=True)] == [counts["transmitted"], wanted]
    return result, counts, world.env.commands[1:]


def rolled_out(
    bundle: Pair[Any], method: str, episode: int
) -> tuple[SpeculativePolicy, SimulatedRobot, list[np.ndarray]]:
    """The same episode in lock step, where the world stands still while the policy thinks."""
    shard = Shard.of(bundle, "ball", load_method(method), gate_of(method, bundle), (episode,), SEED)
    world, family = SimulatedRobot(TASK), rollout_of(bundle, load_method(method))
    robot = begin(shard, family, world, episode)
    run_together([robot], family, Audit(family))
    assert isinstance(world.env, TapedBall)
    return robot.policy, world, world.env.commands


@pytest.mark.parametrize("method", ["draft", "target", "adahi"])
def test_without_latency_it_acts_as_in_the_rollout_and_with_latency_not(ball: Pair[Any], method: str) -> None:
    policy, robot, wanted = rolled_out(ball, method, 1)
    result, _, commands = moved(ball, method, 1)
    assert len(commands) == len(wanted) and all(map(np.array_equal, commands, wanted))
    assert (result.success, result.score) == (robot.success, robot.score)
    assert result.task_s == pytest.approx(robot.steps / TASK.rate_hz)
    assert result.chunks == -(-robot.steps // ball.parts.spec.execute)
    assert result.stall_s == pytest.approx(0.0, abs=1e-6)
    assert result.sent == policy.counts["transmitted"] / policy.counts["steps"]
    _, _, late = moved(ball, method, 1, draft_s=0.03)
    assert not all(map(np.array_equal, late, wanted))


@pytest.mark.parametrize(
    ("method", "each_s"), [("draft", 0.004), ("target", 0.120), ("hybrid", 0.124)]
)  # 100 ms on the link, 20 ms at its end
def test_it_waits_for_draft_link_and_target(ball: Pair[Any], method: str, each_s: float) -> None:
    draft_s = 0.004 if load_method(method).waits_for_draft else 0.0
    result, _, _ = moved(ball, method, link=FAR, draft_s=draft_s, target_s=0.02)
    assert result.inference_s == pytest.approx(each_s, abs=1e-6) == result.age_s
    assert result.stall_s == pytest.approx(result.chunks * each_s, abs=each_s)
    acting = result.chunks * ball.parts.spec.execute / TASK.rate_hz
    assert result.task_s == pytest.approx(result.stall_s + acting, abs=ball.parts.spec.execute / TASK.rate_hz)


def test_adahi_waits_as_often_as_it_asks(ball: Pair[Any]) -> None:
    result, _, _ = moved(ball, "adahi", link=FAR, draft_s=0.004, target_s=0.02)
    assert 0.0 < result.sent < 1.0  # of some 24 inferences, calibrated for 0.6
    assert result.inference_s == pytest.approx(0.004 + result.sent * 0.12, abs=1e-6)


def of_target(pair: Pair[Any]) -> CodeChunks:
    parts = pair.parts
    return CodeChunks(parts.target, parts.tokenizer, parts.spec, parts.spec.target)


def test_the_remote_target_asynchronously_hides_the_link(ball: Pair[Any]) -> None:
    """2 of 5 actions cover 100 ms; the 120 ms of link and target leave 20 ms to wait for at every chunk."""
    chunks = of_target(ball)
    route = Route.of(FAR, ball.exchange.contract, np.random.default_rng(0))
    world, how = MovingWorld(TASK), Execution("aligned", 5, 2)
    result = run_episode(
        world, chunks, how, route.latency(0.02), start=episode_seed(SEED, 0, TASK), seed=SEED, episode=0
    )
    assert result.inference_s == pytest.approx(0.12, abs=1e-6) == result.age_s
    assert result.stall_s == pytest.approx(0.12 + 0.02 * (result.chunks - 1), abs=0.021)
    synchronous, _, _ = moved(ball, "target", link=FAR, target_s=0.02)
    assert result.stall_s / result.task_s < 0.5 * synchronous.stall_s / synchronous.task_s


def test_sizes_on_the_link_are_those_of_float32(ball: Pair[Any]) -> None:
    """State 8 and goal 2 up; 2 books of 16 codes down, each with its probability and offsets of 5 x 2; or 5 x 2."""
    rng = np.random.default_rng(0)
    codes = Route.of(FAR, ball.exchange.contract, rng)
    chunks = Route.of(FAR, chunk_contract(of_target(ball).spec), rng)
    assert (codes.up_bytes, codes.down_bytes) == (4 * 10, 4 * 32 * 11)
    assert (chunks.up_bytes, chunks.down_bytes) == (4 * 10, 4 * 10)


def test_same_seeds_same_episode(ball: Pair[Any]) -> None:
    times: dict[str, Any] = {"link": LINKS["lte"], "draft_s": 0.004, "target_s": 0.02}
    first, second, third = (moved(ball, "adahi", episode, **times) for episode in (0, 0, 1))
    assert first[0] == second[0] and all(map(np.array_equal, first[2], second[2])) and third[0] != first[0]


# --- late verdicts: no stall; they count while their chunk runs, and only then ---


def test_a_verdict_that_takes_no_time_is_verification(ball: Pair[Any]) -> None:
    result, counts, commands = moved(ball, "adahi", late_for_s=inf)
    usual, _, wanted = moved(ball, "adahi")
    assert len(commands) == len(wanted) and all(map(np.array_equal, commands, wanted))
    assert counts["wanted"] == counts["transmitted"] == counts["in_time"] > 0
    assert result == usual


def test_a_verdict_that_comes_after_its_chunk_is_no_verdict(ball: Pair[Any]) -> None:
    """A chunk is 0.25 s; what takes 0.3 s leaves the draft's actions as they were, and every second step unsent."""
    result, counts, commands = moved(ball, "hybrid", late_for_s=inf, target_s=0.3)
    _, _, wanted = moved(ball, "draft")
    assert all(map(np.array_equal, commands, wanted)) and len(commands) == len(wanted)
    assert counts["in_time"] == counts["replaced"] == counts["verified"] == 0
    assert counts["wanted"] == result.chunks and counts["transmitted"] == (result.chunks + 1) // 2
    assert result.sent == pytest.approx(counts["transmitted"] / counts["wanted"])


@pytest.mark.parametrize(("delay_s", "left"), [(0.07, 3), (0.2, 1)])
def test_it_counts_from_its_own_time_index_on(ball: Pair[Any], delay_s: float, left: int) -> None:
    result, counts, commands = moved(ball, "hybrid", late_for_s=inf, target_s=delay_s)
    assert counts["replaced"] == left * counts["in_time"]
    assert counts["in_time"] >= counts["transmitted"] - 1 > 0, "the last one may find the episode over"
    # Up to where the first verdict falls, the first chunk is the draft's; from there on the verified one.
    drafted = moved(ball, "draft")[2][:5]
    verified = moved(ball, "hybrid")[2][:5]
    assert all(map(np.array_equal, commands[: 5 - left], drafted[: 5 - left]))
    assert all(map(np.array_equal, commands[5 - left : 5], verified[5 - left :]))
    assert result.stall_s == pytest.approx(0.0)


def test_nothing_is_waited_for_but_the_draft(ball: Pair[Any]) -> None:
    result, _, _ = moved(ball, "hybrid", late_for_s=inf, link=FAR, draft_s=0.01, target_s=0.02)
    # The episode may end on a chunk that was never played.
    assert -1e-9 <= result.stall_s - 0.01 * result.chunks < 0.011
    assert result.age_s == pytest.approx(0.01)


def test_a_verdict_on_too_old_an_observation_is_not_used(ball: Pair[Any]) -> None:
    link = SteadyLink(rtt_ms=70.0, jitter_ms=0.0, up_mbit_s=1e6, down_mbit_s=1e6)
    assert moved(ball, "hybrid", link=link, late_for_s=0.11)[1]["in_time"] > 0  # it is looked at between actions: 0.1 s
    assert moved(ball, "hybrid", link=link, late_for_s=0.09)[1]["in_time"] == 0


def test_a_gate_that_takes_time_decides_as_it_would_at_once(ball: Pair[Any]) -> None:
    """And hears of the same verifications: virtual time and the robot drive a gate in the same way."""

    class Told(ActionDeviation):
        told = 0

        def on_verified(self, record: StepRecord) -> None:
            self.told += 1

    def decisions(threshold: float, latency_s: float | None) -> list[tuple[bool, float, str]]:
        clock, gate, choices = VirtualClock(), Told(threshold, max_skips=2), []
        timed = gate if latency_s is None else TimedGate(gate, clock, latency_s)
        policy = SpeculativePolicy(ball, timed, seed=SEED, clock=clock)
        for episode in range(2):
            policy.reset(episode)
            for _ in range(12):
                for _ in range(ball.execute):
                    policy.act_on(ball.observation.zeros())
                assert policy.record is not None
                decision = policy.record.decision
                choices.append((decision.transmit, decision.score, decision.reason))
        assert gate.told == policy.counts["transmitted"]
        assert clock.now() == pytest.approx(len(choices) * (latency_s or 0.0))
        return choices

    # Half of the free steps lie above it.
    threshold = float(np.median([score for _, score, _ in decisions(np.inf, None)]))
    plain = decisions(threshold, None)
    assert decisions(threshold, 0.003) == plain
    assert {"first", "max_skips", "score"} <= {reason for _, _, reason in plain}, "one of them is not tested"
