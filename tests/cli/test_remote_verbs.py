"""The verbs that need a server, each against a real one on loopback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.conftest import Typed

from specact.cli.doctor import advice
from specact.lab.rollout.processes import ServerProcess, linked, serving


def test_doctor_measures_the_link_and_advises_a_deadline(typed: Typed, ball_server: ServerProcess) -> None:
    with linked(ball_server.port, "wifi-paper") as relay:
        words = ("doctor", "--server", f"ws://127.0.0.1:{relay.port}", "--requests", "10")
        report, printed = typed(*words, "--json").summary["server"], typed(*words)
    assert report["bundle"] == "ball" and report["missed"] == 0
    assert report["stages_ms"]["network"]["p50"] > 6.0
    assert report["deadline_ms"] > report["stages_ms"]["total"]["p50"]
    assert printed.status == 0 and "advice: --deadline-ms" in printed.out


@pytest.mark.parametrize(
    ("deadline_ms", "execute", "said"), [(60.0, 5, ""), (190.0, 5, "--execution late"), (500.0, 5, "--rate-hz to 8,"),
                                         (500.0, 1, "a faster link")],
)  # fmt: skip
def test_doctor_advises_late_verdicts_where_a_verified_step_delays_the_loop(
    deadline_ms: float, execute: int, said: str
) -> None:
    lines = list(advice({"period_ms": 100.0, "execute": execute, "server": {"deadline_ms": deadline_ms}}))
    assert len(lines) == (3 if said else 1) and said in lines[-1]
    # The rate that it names is one at which they are in time.
    if rate := re.search(r"--rate-hz to ([\d.]+)", lines[-1]):
        assert (execute - 1) / float(rate[1]) >= deadline_ms / 1e3


def test_doctor_measures_a_policy_alone_and_advises_an_overlap(typed: Typed) -> None:
    with serving("ball-chase-flow", "--steps", "2") as server:
        report = typed("doctor", f"ws://127.0.0.1:{server.port}", "--requests", "5")
    assert "advice: --execution aligned --execute-actions 16 --overlap-actions" in report.out
    assert "ball-chase at pace 0.1: " in report.out and "synchronous" in report.out  # with the study's table


def test_eval_in_real_time_takes_the_actions_of_virtual_time(typed: Typed, tmp_path: Path) -> None:
    """Only times differ: steps, scores and decisions of both are those of the same episodes."""
    shared = ("eval", "ball", "--methods", "hybrid,adahi", "--episodes", "1", "--json")
    virtual = typed(*shared, "--out", tmp_path / "virtual", "--workers", "1").summary
    timed = ("--realtime", "--deadline-ms", "5000", "--link", "loopback")
    real = typed(*shared, "--out", tmp_path / "real", *timed).summary
    assert real["realtime"] and not virtual["realtime"]
    for name in ("hybrid", "adahi"):
        row, reference = real["methods"][name], virtual["methods"][name]
        assert row["missed"] == 0.0
        for key in ("success", "control_steps", "sent", "gated_loss"):
            assert row[key] == pytest.approx(reference[key])
        # On a busy machine loopback can be so fast that all of it falls into one stage.
        assert sum(row["latency"][f"{stage}_ms"] for stage in ("encode", "network", "queue", "target")) > 0.0
