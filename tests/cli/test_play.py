"""``specact play``: a policy alone on a simulated and on a real robot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.cli.conftest import Life, Typed

from specact.cli.output import progress_lines
from specact.lab.rollout.processes import ServerProcess, serving

STILL = [0.25, -0.5]
STOP = ("--stop-action", *map(str, STILL))
FLOW = ("play", "ball-chase-flow")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("ball-chase-flow", "--steps", "2") as process:
        yield process


@pytest.mark.parametrize("execution", ["append", "roll_forward"])
def test_a_simulated_robot_plays_a_flow_policy_of_this_device(life: Life, execution: str) -> None:
    done = life.run(*FLOW, "--execution", execution, "--steps", "2", "--episodes", "1", "--json")
    assert done.status == 0, done.remarks
    summary = done.summary
    assert len(summary["episodes"]) == 1 and summary["periods"] >= 20 and summary["missed"] == {}
    assert 0 < summary["chunks"] <= summary["inferences"]
    assert summary["link"] is None and summary["observation_age_ms"] >= 0.0


def test_a_simulated_world_makes_no_step_of_its_own_for_an_inference(life: Life) -> None:
    summary = life.run(*FLOW, "--steps", "2", "--execute-actions", "4", "--episodes", "1", "--json").summary
    assert summary["idle"] == 0 and summary["inferences"] == -(-summary["periods"] // 4)


def test_while_a_real_robot_runs_its_progress_is_said(
    life: Life, typed: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("specact.cli.driving.progress_lines", partial(progress_lines, 0.0))
    done = typed("play", "ball#target", "--robot", "toy:Arm", "--seconds", "0.5", "--json")
    assert done.summary["chunks"] > 0 and "seconds: 0 of 1\n" in done.remarks


def test_a_server_that_fails_says_so_once(life: Life, environment: dict[str, str], tmp_path: Path) -> None:
    path = f"{environment['PYTHONPATH']}{os.pathsep}{tmp_path}"
    with serving("own:moody", environment=environment | {"PYTHONPATH": path}) as server:
        limit = ("--max-consecutive-misses", "3", "--json")
        done = life.run("play", f"ws://127.0.0.1:{server.port}", "--robot", "toy:Wide", *STOP, *limit)
    assert done.summary["missed"]["refused"] > 1 and done.remarks.count("the target failed") == 1


def test_a_simulated_robot_plays_a_policy_of_a_server(life: Life, server: ServerProcess) -> None:
    summary = life.run(
        "play", f"ws://127.0.0.1:{server.port}", "--env", "ball-chase", "--execution", "rtc",
        "--execute-actions", "10", "--overlap-actions", "6", "--episodes", "1", "--deadline-ms", "5000", "--json",
    ).summary  # fmt: skip
    assert summary["missed"] == {}
    # Also sent: what was under way at the end.
    assert 0 < summary["inferences"] <= summary["link"]["requests"] <= summary["inferences"] + 1


def test_a_robot_with_a_model_of_itself_rolls_forward_and_is_stopped_in_its_own_way(life: Life) -> None:
    words = ("--execution", "roll_forward", "--execute-actions", "6", "--overlap-actions", "4", "--seconds", "3")
    done = life.run(*FLOW, "--robot", "toy:Modelled", *words, "--json")
    assert done.status == 0, done.remarks
    assert life.log[-1]["rolled"] > 0 and len(life.actions) > 10
    assert done.summary["stopped_by"] == "stop()"
    # Without a model it cannot.
    refusal = life.run(*FLOW, "--robot", "toy:Wide", "--execution", "roll_forward")
    assert refusal.status == 2 and "roll_forward" in refusal.remarks


def test_a_robot_that_was_made_is_stopped_where_the_policy_does_not_fit_it(life: Life) -> None:
    done = life.run(*FLOW, "--robot", "toy:Modelled", "--execute-actions", "99")
    assert done.status == 2 and "99" in done.remarks
    assert life.log == [{"rolled": 0}]


def test_an_error_of_the_policy_ends_in_the_stop_action(life: Life) -> None:
    done = life.run("play", "own:sick", "--robot", "toy:Wide", *STOP, "--json")
    assert done.status == 2 and "the weights are gone" in done.remarks
    assert life.actions[-1] == STILL and done.summary["chunks"] == 1


def test_answers_that_are_not_finite_never_move_the_robot(life: Life) -> None:
    done = life.run("play", "own:nan", "--robot", "toy:Wide", *STOP, "--max-consecutive-misses", "3", "--json")
    assert done.status == 3, done.remarks
    assert done.summary["stopped"] and done.summary["missed"] == {"invalid": 4} and done.summary["chunks"] == 0
    assert {tuple(action) for action in life.actions} == {tuple(STILL)}


def test_a_server_that_goes_away_is_missed_by_cause_and_stops_the_robot(life: Life) -> None:
    with serving("ball-chase-flow", "--steps", "2") as server:
        limit = ("--max-consecutive-misses", "5", "--json")
        running = life.start("play", f"ws://127.0.0.1:{server.port}", "--robot", "toy:Wide", *STOP, *limit)
        life.wait(running, lambda: len(life.log) >= 10 and life.actions[-1] != STILL)
        server.kill()
    done = life.end(running)
    # The server has stated the range of the policy's actions.
    assert done.status == 3 and "action_range" not in done.remarks
    misses = done.summary["missed"]
    assert done.summary["stopped"] and sum(misses.values()) >= 6 and "disconnected" in misses
    assert life.actions[-1] == STILL
