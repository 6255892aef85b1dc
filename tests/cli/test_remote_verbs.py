"""The verbs that need a server, each against a real one on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Typed

from specact.lab.processes import ServerProcess, linked, serving


def test_doctor_measures_the_link_and_advises_a_deadline(typed: Typed, ball_server: ServerProcess) -> None:
    with linked(ball_server.port, "wifi-paper") as relay:
        words = ("doctor", "--server", f"ws://127.0.0.1:{relay.port}", "--requests", "10")
        found, printed = typed(*words, "--json").summary["server"], typed(*words)
    assert found["bundle"] == "ball" and found["lost"] == 0
    assert found["stages_ms"]["network"]["p50"] > 6.0
    assert found["deadline_ms"] > found["stages_ms"]["total"]["p50"]
    assert printed.status == 0 and "advice: --deadline-ms" in printed.out


def test_doctor_measures_an_openpi_server_for_a_pair_of_chunk_policies(typed: Typed, tmp_path: Path) -> None:
    made = typed("pair", "--draft", "ball-chase-flow", "--target", "ball-chase-flow", "--out", tmp_path / "pair")
    assert made.status == 0, made.remarks
    with serving("ball-chase-flow") as child:
        server = ("--server", f"openpi:ws://127.0.0.1:{child.port}")
        found = typed("doctor", tmp_path / "pair", *server, "--requests", "5", "--json").summary
        typed("doctor", "ball", *server).refuses("'codes'")
    assert found["server"]["bundle"] == "ball-chase-flow" and found["server"]["lost"] == 0
    assert found["draft_ms"] > 0.0 and found["server"]["deadline_ms"] > found["server"]["stages_ms"]["target"]["p50"]


def test_eval_in_real_time_takes_the_actions_of_virtual_time(typed: Typed, tmp_path: Path) -> None:
    """Only times differ: steps, scores and decisions of both are those of the same episodes."""
    shared = ("eval", "ball", "--methods", "hybrid,adahi", "--episodes", "1", "--json")
    virtual = typed(*shared, "--out", tmp_path / "virtual", "--workers", "1").summary
    timed = ("--realtime", "--deadline-ms", "5000", "--link", "loopback")
    real = typed(*shared, "--out", tmp_path / "real", *timed).summary
    assert real["realtime"] and not virtual["realtime"]
    for name in ("hybrid", "adahi"):
        one, other = real["methods"][name], virtual["methods"][name]
        assert one["missed"] == 0.0
        for key in ("success", "control_steps", "transmission_rate", "gated_loss"):
            assert one[key] == pytest.approx(other[key])
        # On a busy machine loopback can be so fast that all of it falls into one stage.
        assert sum(one["latency"][f"{stage}_ms"] for stage in ("encode", "network", "queue", "target")) > 0.0


def test_bench_latency_times_every_way_on_the_same_steps(typed: Typed, tmp_path: Path) -> None:
    found = typed(
        "bench", "latency", "--steps", "12", "--no-stand-in", "--link", "lan", "--out", str(tmp_path), "--json"
    ).summary
    assert list(found["ways"]) == ["draft", "target", "hybrid", "adahi"]
    for way in found["ways"].values():
        assert len(way["total_ms"]) == 12 and way["missed"] == 0
        assert way["transmission_rate"] == {"draft": 0.0, "target": 1.0, "hybrid": 1.0}.get(
            way["method"], way["transmission_rate"]
        )
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_bench_server_counts_what_robots_are_given(typed: Typed) -> None:
    found = typed(
        "bench", "server", "--robots", "2", "--seconds", "0.5", "--rounds", "1", "--offered-hz", "50", "--soak-s",
        "0.5", "--neighbours", "0", "2", "--steps", "10", "--json",
    ).summary  # fmt: skip
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
