"""``specact run``: how it drives, what it holds, and how it ends."""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import Ended, Life, Typed
from tests.remote.conftest import Peer, listening

from specact import SpeculativePolicy, load_pair
from specact.cli.run import audits_of, read_budget, true_skip
from specact.errors import ConfigError
from specact.gates import Never
from specact.gates.calibration import Calibration
from specact.gates.controller import LatencyBudget, LinkBudget, RateBudget
from specact.gates.settings import gate_settings
from specact.lab.rollout.processes import ServerProcess, linked
from specact.wire.messages import ErrorCode, Failure, Hello, exchange_bytes, read_hello

STILL = [0.25, -0.5]
STOP = ("--stop-action", *map(str, STILL))
LONG = ("--deadline-ms", "5000")
YOUNG = ("--max-chunk-age-ms", "60000")
Words = tuple[str, ...]


def test_a_simulated_robot_is_driven_at_its_control_rate(life: Life, ball: Words) -> None:
    done = life.run(*ball, *LONG, "--episodes", "1")
    assert done.status == 0, done.remarks
    summary = done.summary
    assert summary["periods"] > 20 and summary["inferences"] == -(-summary["periods"] // 5)
    assert summary["missed"] == {} and not summary["stopped"]
    assert 0.0 < summary["sent"] < 1.0
    # One request per transmitted inference.
    answered = round(summary["sent"] * summary["inferences"])
    assert summary["link"]["answered"] == summary["link"]["requests"] == answered


def test_anything_with_observe_and_act_is_driven(life: Life, ball: Words) -> None:
    done = life.run(*ball[:-1], *LONG, "--robot", "toy:Arm", "--seconds", "1", "--gate", "always")
    assert done.status == 0, done.remarks
    assert re.search(r"^sent +1$", done.out, re.MULTILINE)
    # It has no stop() and no stop action.
    assert "its last action stays in force" in done.remarks
    for robot, named in (("Runner", "Runner"), ("Absent", "no such device: /dev/arm0")):
        refused = life.run(*ball, "--robot", f"toy:{robot}")
        assert refused.status == 2 and named in refused.remarks


def test_a_server_without_room_is_an_error_before_the_robot_moves(typed: Typed) -> None:
    hellos: list[Hello] = []

    def refuse(side: socket.socket) -> None:
        peer = Peer(side)
        for message in peer.messages():
            hellos.append(read_hello(message))
            peer.say(Failure(None, ErrorCode.OVERLOADED, "no deadline of 40 ms is kept beside 64 robots"))

    with listening(refuse) as port:
        for hold in ("0.5", "30ms"):
            words = ("--hold", hold, "--rate-hz", "10", "--deadline-ms", "40", "--episodes", "1")
            done = typed("run", "ball", "--server", f"ws://127.0.0.1:{port}", *words)
            assert done.status == 2 and "beside 64 robots" in done.remarks
    # Five actions of a chunk are executed; a time leaves room for any share.
    assert {(hello.rate_hz, hello.deadline_ms) for hello in hellos} == {(1.0, 40.0), (2.0, 40.0)}


def test_late_verdicts_are_counted(life: Life, ball: Words) -> None:
    summary = life.run(*ball, *LONG, "--execution", "late", "--gate", "always", "--episodes", "1").summary
    late = summary["late"]
    assert late["asked"] == summary["inferences"]
    assert 0 < late["in_time"] <= late["requests"] <= late["asked"]
    # What asked is what went over the wire.
    assert round(summary["sent"] * summary["inferences"]) == late["requests"] == summary["link"]["requests"]
    assert late["in_time"] <= late["replaced"] <= 5 * late["in_time"]


def test_late_verdicts_that_are_never_in_time_are_refused_before_the_robot_moves(
    typed: Typed, ball_server: ServerProcess
) -> None:
    with linked(ball_server.port, "loopback+delay=150") as relay:
        words = ("run", "ball", "--server", f"ws://127.0.0.1:{relay.port}", "--execution", "late", "--episodes", "1")
        refused = typed(*words, "--rate-hz", "50")
    refused.refuses("80 ms after the first", "--rate-hz", "actions or more")


def test_a_rate_is_held_without_a_calibration_and_audits_are_summed_up(life: Life, ball: Words) -> None:
    shared = (*ball, *LONG, "--robot", "toy:Noisy", "--rate-hz", "400")
    summary = life.run(*shared, "--hold", "0.35", "--audit-rate", "0.3", "--seconds", "2").summary
    assert summary["held_rate"] == 0.35
    assert abs(summary["sent"] - 0.35) * summary["inferences"] <= 101.0
    audit = summary["true_skip"]
    assert audit["audits"] > 0 and audit["missed"] == 0
    assert 0.0 <= audit["low"] <= audit["mean"] <= audit["high"] <= 1.0
    assert audit["expected"] is None and audit["alarm"] is None
    # Observations of pure noise are not what the gate was calibrated on, and at the calibrated rate that is said. The
    # alarm needs some thousand steps, for which a machine with other work takes longer.
    for seconds in ("5", "20", "60"):
        done = life.run(*shared, "--hold", "0.6", "--audit-rate", "0.9", "--seconds", seconds)
        if done.summary["true_skip"]["alarm"]:
            break
    assert done.summary["true_skip"]["alarm"] and "calibrated level of 0.39" in done.remarks


def test_a_rate_that_is_missed_is_said_and_how_to_hold_it(life: Life, ball: Words) -> None:
    shared = (*ball, *LONG, "--robot", "toy:Noisy", "--rate-hz", "400", "--seconds", "2")
    for words, said in (("--rate", "0.6"), True), (("--hold", "0.6"), False):
        done = life.run(*shared, *words)
        assert ("--hold 0.6" in done.remarks) == said


def test_a_budget_has_a_unit() -> None:
    pair = load_pair("ball")
    spec, arrays = pair.parts.spec, 4 * (8 + 2)
    arrays += 4 * spec.codebooks * spec.codes * (1 + spec.chunk * spec.actions)
    size = exchange_bytes(pair.exchange.contract)
    assert arrays < size < arrays + 500
    share, time_, link = (read_budget(text, pair, 4.0) for text in ("0.25", "30ms", "10kbit"))
    assert type(share) is RateBudget and share.rate == 0.25
    assert isinstance(time_, LatencyBudget) and time_.seconds == 0.03
    assert isinstance(link, LinkBudget) and link.rate == pytest.approx(1_250.0 / (4.0 * size))
    for wrong in ("1.5", "30", "ms", "-1kbit", "0ms", "1.2.3", ".", "nan"):
        with pytest.raises(ConfigError):
            read_budget(wrong, pair, 4.0)


def test_audits_expect_what_the_calibration_says(bundle_copy: Path) -> None:
    assert true_skip(audits_of(load_pair("ball"), "adahi", 0.6, None))["alarm"] is False
    pair = load_pair(bundle_copy)
    settings = gate_settings("adahi", pair)
    Calibration(pair.fingerprint, 0.5, settings, {}, [], {"spearman": 0.3}, {}).save(bundle_copy / "calibration")
    assert true_skip(audits_of(pair, "adahi", 0.5, None))["alarm"] is None


@pytest.mark.parametrize("robot", ["Arm", "Braked", "Stuck"])
def test_the_end_of_the_time_ends_in_a_stop(life: Life, ball: Words, robot: str) -> None:
    done = life.run(*ball, "--robot", f"toy:{robot}", "--seconds", "0.5", *STOP)
    # Not whether it had stalled before: a busy machine may make it.
    ends = [entry for entry in life.log if entry.get("stop") or entry["action"] == STILL]
    assert ends == life.log[-1:] and ("stop" in ends[0]) == (robot == "Braked")
    assert done.summary["stopped_by"] == ("stop_action" if robot == "Arm" else "stop()")
    # A brake that fails is an error, but the stop action was sent.
    assert done.status == (robot == "Stuck") and ("the brake is stuck" in done.remarks) == (robot == "Stuck")


@pytest.mark.parametrize(
    ("robot", "number", "status"),
    [("Arm", signal.SIGINT, 130), ("Braked", signal.SIGTERM, 143), ("Arm", signal.SIGHUP, 129)],
)
def test_a_signal_ends_in_a_stop_and_a_summary(
    life: Life, ball: Words, robot: str, number: signal.Signals, status: int
) -> None:
    process = life.start(*ball, "--robot", f"toy:{robot}", *STOP)
    life.wait(process, lambda: len(life.log) > 5)
    done = life.end(process, number, number)  # somebody is impatient
    assert done.status == status
    assert life.log[-1].get("action") == (None if robot == "Braked" else STILL)
    assert ("stop" in life.log[-1]) == (robot == "Braked")
    assert done.summary["periods"] >= 5
    assert number.name in done.remarks and "same command" not in done.remarks and "Traceback" not in done.remarks


@pytest.mark.parametrize(("robot", "why"), [("Jammed", "the gear is jammed"), ("Cursed", "within the policy")])
def test_an_error_of_robot_or_policy_ends_in_a_stop(life: Life, ball: Words, robot: str, why: str) -> None:
    done = life.run(*ball, "--robot", f"toy:{robot}", *STOP)
    assert done.status == 1 and why in done.remarks
    assert life.actions[-1] == STILL and len(life.actions) in (5, 6)
    assert done.summary["periods"] >= 4


def test_a_first_observation_that_cannot_be_used_ends_the_run_before_the_robot_moves(life: Life, ball: Words) -> None:
    done = life.run(*ball, "--robot", "toy:Blind", *STOP)
    assert (done.status, done.out) == (2, "")
    assert "'goal'" in done.remarks and "Traceback" not in done.remarks
    assert life.actions == [STILL]


def test_later_ones_hold_the_last_action_and_are_told_of_once(life: Life, ball: Words) -> None:
    done = life.run(*ball, "--robot", "toy:Dazzled", "--seconds", "3", *STOP, *YOUNG)
    assert done.status == 0 and done.summary["unusable"] == {"absent": 2, "shape": 1}
    assert done.remarks.count("observation is None") == 1 and done.remarks.count("(7,)") == 1
    assert life.actions[2] == life.actions[3] == life.actions[4] and life.actions[5] == life.actions[6]


def test_too_many_misses_in_a_row_stop_the_robot(life: Life, ball: Words) -> None:
    done = life.run(*ball, "--robot", "toy:Deaf", "--gate", "never", "--max-consecutive-misses", "3", *STOP, *YOUNG)
    assert done.status == 3 and done.summary["stopped"] and done.summary["unusable"] == {"absent": 4}
    actions = life.actions
    assert actions[2] == actions[3] == actions[4] == actions[5] and actions[6:] == [STILL, STILL]


def test_a_process_that_stood_still_does_not_play_on_from_an_old_chunk(life: Life, ball: Words) -> None:
    pair = load_pair("ball")
    execute = pair.parts.spec.execute
    process = life.start(*ball, "--robot", "toy:Arm", "--gate", "never", "--seconds", "60", *STOP)
    try:
        # In the middle of a chunk.
        life.wait(process, lambda: len(life.log) >= execute + 2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
        so_far = len(life.log)
        life.wait(process, lambda: len(life.log) >= so_far + 2 * execute)
    finally:
        done: Ended = life.end(process, signal.SIGTERM)
    summary, played = done.summary, [entry["after_stall"] for entry in life.log].index(True)
    assert summary["lost_periods"] >= 10 and summary["longest_lateness_ms"] > 800.0
    # The draft, asked anew about what is seen now: an episode whose first chunk ends where the old one was cut.
    policy = SpeculativePolicy(pair, Never())
    for _ in range(-(-played // execute) * execute):
        policy.act({"state": np.full(8, 0.1), "goal": np.array([0.2, 0.1])})
    for action in life.actions[played : played + execute]:
        expected = policy.act({"state": np.full(8, 0.4), "goal": np.array([0.2, 0.1])})
        assert action == [float(x) for x in expected]
