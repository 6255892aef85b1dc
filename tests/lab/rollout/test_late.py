"""Late verification: no stall for the verdict; it counts while its chunk runs, and only then."""

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mujoco")

from tests.lab.rollout.conftest import TapedBall
from tests.lab.rollout.test_pair import FAR, SEED, TASK, moved, pairing

from specact import Pair
from specact.lab.envs.robot import MovingWorld
from specact.lab.rollout.episode import Episode, run_pair
from specact.lab.rollout.rollout import episode_seed
from specact.links.model import SteadyLink


def run(
    bundle: Pair[Any], method: str = "hybrid", late_for_s: float = inf, **changes: object
) -> tuple[Episode, Mapping[str, int], list[np.ndarray]]:
    late, world = pairing(method, bundle, late_for_s=late_for_s, **changes), MovingWorld(TASK)
    result, counts = run_pair(world, bundle, late, start=episode_seed(SEED, 0, TASK), seed=SEED, episode=0)
    assert isinstance(world.env, TapedBall)
    return result, counts, world.env.commands[1:]


@pytest.mark.parametrize("method", ["hybrid", "adahi"])
def test_a_verdict_that_takes_no_time_is_verification(ball: Pair[Any], method: str) -> None:
    result, counts, commands = run(ball, method)
    usual, wanted = moved(ball, pairing(method, ball))
    assert len(commands) == len(wanted) and all(map(np.array_equal, commands, wanted))
    assert counts["wanted"] == counts["transmitted"] == counts["in_time"] > 0
    assert result == usual


def test_a_verdict_that_comes_after_its_chunk_is_no_verdict(ball: Pair[Any]) -> None:
    """A chunk is 0.25 s; what takes 0.3 s leaves the draft's actions as they were, and every second step unsent."""
    result, counts, commands = run(ball, target_s=0.3)
    _, wanted = moved(ball, pairing("draft", ball))
    assert all(map(np.array_equal, commands, wanted)) and len(commands) == len(wanted)
    assert counts["in_time"] == counts["replaced"] == counts["verified"] == 0
    assert counts["wanted"] == result.chunks and counts["transmitted"] == (result.chunks + 1) // 2
    assert result.transmission_rate == pytest.approx(counts["transmitted"] / counts["wanted"])


@pytest.mark.parametrize(("delay_s", "left"), [(0.05, 4), (0.07, 3), (0.15, 2), (0.2, 1)])
def test_it_counts_from_its_own_time_index_on(ball: Pair[Any], delay_s: float, left: int) -> None:
    result, counts, commands = run(ball, target_s=delay_s)
    assert counts["replaced"] == left * counts["in_time"]
    assert counts["in_time"] >= counts["transmitted"] - 1 > 0, "the last one may find the episode over"
    # Up to where the first verdict falls, the first chunk is the draft's; from there on the verified one.
    drafted = moved(ball, pairing("draft", ball))[1][:5]
    verified = moved(ball, pairing("hybrid", ball))[1][:5]
    assert all(map(np.array_equal, commands[: 5 - left], drafted[: 5 - left]))
    assert all(map(np.array_equal, commands[5 - left : 5], verified[5 - left :]))
    assert result.stall_s == pytest.approx(0.0)


def test_nothing_is_waited_for_but_the_draft(ball: Pair[Any]) -> None:
    result, _, _ = run(ball, link=FAR, draft_s=0.01, target_s=0.02)
    # The episode may end on a chunk that was never played.
    assert -1e-9 <= result.stall_s - 0.01 * result.chunks < 0.011
    assert result.age_s == pytest.approx(0.01)


def test_a_verdict_on_too_old_an_observation_is_not_used(ball: Pair[Any]) -> None:
    link = SteadyLink(rtt_ms=70.0, jitter_ms=0.0, up_mbit_s=1e6, down_mbit_s=1e6)
    assert run(ball, link=link, late_for_s=0.11)[1]["in_time"] > 0  # it is looked at between actions: 0.1 s
    assert run(ball, link=link, late_for_s=0.09)[1]["in_time"] == 0


def test_what_the_gate_wanted_is_told_apart_from_what_was_sent(ball: Pair[Any]) -> None:
    """Of a verdict that takes longer than a chunk every second step is not sent, and wanted all the same."""
    told: list[tuple[bool, bool]] = []
    how = pairing("hybrid", ball, late_for_s=inf, target_s=0.3)
    _, counts = run_pair(
        MovingWorld(TASK), ball, how, start=episode_seed(SEED, 0, TASK), seed=SEED, episode=0,
        on_decision=lambda decision, wanted: told.append((decision.transmit, wanted)),
    )  # fmt: skip
    sent, wanted = zip(*told, strict=True)
    assert all(wanted) and len(wanted) == counts["wanted"]
    assert sum(sent) == counts["transmitted"] < counts["wanted"]
