"""The verbs that need a server, each against a real one on loopback."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from specact.lab.processes import ServerProcess, linked, serving

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_doctor_measures_the_link_and_advises_a_deadline(specact_run: Run, ball_server: ServerProcess) -> None:
    with linked(ball_server.port, "wifi-paper") as relay:
        done = specact_run("doctor", "--server", f"ws://127.0.0.1:{relay.port}", "--requests", "10", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["server"]
    assert found["bundle"] == "ball" and found["lost"] == 0
    assert found["stages_ms"]["network"]["p50"] > 6.0
    assert found["deadline_ms"] > found["stages_ms"]["total"]["p50"]


def test_doctor_measures_an_openpi_server_for_a_pair_of_chunk_policies(specact_run: Run, tmp_path: Path) -> None:
    made = specact_run("pair", "--draft", "ball-chase-flow", "--target", "ball-chase-flow", "--out", tmp_path / "pair")
    assert made.returncode == 0, made.stderr
    with serving("ball-chase-flow") as child:
        server = f"openpi:ws://127.0.0.1:{child.port}"
        done = specact_run("doctor", "--bundle", tmp_path / "pair", "--server", server, "--requests", "5", "--json")
        refused = specact_run("doctor", "--bundle", "ball", "--server", server)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["server"]["bundle"] == "ball-chase-flow" and found["server"]["lost"] == 0
    assert found["draft_ms"] > 0.0 and found["server"]["deadline_ms"] > found["server"]["stages_ms"]["target"]["p50"]
    assert refused.returncode == 2 and "this pair's family is 'codes'" in refused.stderr


def test_eval_in_real_time_takes_the_actions_of_virtual_time(specact_run: Run, tmp_path: Path) -> None:
    """Only times differ: steps, scores and decisions of both are those of the same episodes."""
    shared = ("eval", "--bundle", "ball", "--methods", "hybrid,adahi", "--episodes", "1", "--json")
    virtual = specact_run(*shared, "--out", str(tmp_path / "virtual"), "--workers", "1")
    real = specact_run(
        *shared, "--out", str(tmp_path / "real"), "--realtime", "--deadline-ms", "5000", "--link",
        "loopback",
    )  # fmt: skip
    assert virtual.returncode == real.returncode == 0, virtual.stderr + real.stderr
    ours, theirs = json.loads(real.stdout), json.loads(virtual.stdout)
    assert ours["realtime"] and not theirs["realtime"]
    for name in ("hybrid", "adahi"):
        one, other = ours["methods"][name], theirs["methods"][name]
        assert one["missed"] == 0.0
        for key in ("success", "control_steps", "transmission_rate", "gated_loss"):
            assert one[key] == pytest.approx(other[key])
        # On a busy machine loopback can be so fast that all of it falls into one stage.
        assert sum(one["latency"][f"{stage}_ms"] for stage in ("encode", "network", "queue", "target")) > 0.0


def test_an_oracle_has_no_real_time(specact_run: Run, tmp_path: Path) -> None:
    done = specact_run("eval", "--bundle", "ball", "--methods", "oracle", "--realtime", "--out", str(tmp_path / "o"))
    assert done.returncode == 2
    assert "oracle" in done.stderr


def test_bench_latency_times_every_way_on_the_same_steps(specact_run: Run, tmp_path: Path) -> None:
    done = specact_run(
        "bench", "latency", "--steps", "12", "--no-stand-in", "--link", "lan", "--out", str(tmp_path), "--json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["ways"]) == ["draft", "target", "hybrid", "adahi"]
    for way in found["ways"].values():
        assert len(way["total_ms"]) == 12 and way["missed"] == 0
        assert way["transmission_rate"] == {"draft": 0.0, "target": 1.0, "hybrid": 1.0}.get(
            way["method"], way["transmission_rate"]
        )
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_bench_server_counts_what_robots_are_given(specact_run: Run) -> None:
    done = specact_run(
        "bench", "server", "--robots", "2", "--seconds", "0.5", "--rounds", "1", "--offered-hz", "50", "--soak-s",
        "0.5", "--neighbours", "0", "2", "--steps", "10", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    soak, rows = found["soak"], found["rows"]
    assert [(row["neighbours"], row["under_way"], row["steps"]) for row in found["beside"]] == [
        (0, 32, 10),
        (2, 32, 10),
    ]
    assert all(0 <= row["missed"] <= 10 for row in found["beside"])
    assert soak["seconds"] >= 0.5 and len(soak["samples"]) >= 1
    assert soak["first_mib"] > 20.0 and soak["last_mib"] > 20.0
    assert [(row["robots"], row["offered_hz"], row["max_batch"]) for row in rows] == [
        (2, None, 64), (2, None, 1), (2, 50.0, 64), (2, 50.0, 1),
    ]  # fmt: skip
    assert all(row["errors"] == 0 and row["answered"] > 0 for row in rows)
    assert all(row["batch"] == 1.0 for row in rows if row["max_batch"] == 1)
    # A busy machine answers fewer, but nobody more than were offered.
    assert all(row["answered"] <= 26 for row in rows if row["offered_hz"])
