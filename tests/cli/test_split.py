"""``specact split``, and a robot whose target runs partly on the device and partly on its server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Life, Typed

from specact.lab.rollout.processes import linked, serving

ASKED = ("--gate", "always", "--deadline-ms", "5000", "--episodes", "1", "--json")


@pytest.fixture
def stages(typed: Typed, tmp_path: Path) -> Path:
    report = typed("split", "ball", "--out", tmp_path / "stages", "--json").summary
    assert report["stages"] == 8 and report["activations"] == 6 * [[2, 128]] + [[1, 128]]
    return tmp_path / "stages"


def test_a_robot_runs_with_a_split_target(life: Life, typed: Typed, stages: Path) -> None:
    with serving(stages) as server:
        where = ("--server", f"ws://127.0.0.1:{server.port}")
        fixed = life.run("run", "ball", *where, *ASKED, "--split", f"{stages}@3", "--activations", "float32").summary
        free = life.run("run", "ball", *where, *ASKED, "--split", str(stages)).summary
        typed("run", "pusht", *where, "--gate", "always", "--split", str(stages)).refuses("split")
    assert fixed["cuts"].keys() == {"cut 3", "switches"} and fixed["cuts"]["cut 3"] == fixed["inferences"]
    assert sum(free["cuts"].values()) - free["cuts"]["switches"] == free["inferences"]
    # What was sent to measure link and stages is not of the run.
    assert (
        free["link"]["requests"] == free["inferences"] - free["cuts"].get("cut 0", 0)
        and free["link"]["connections"] == 1
    )


def test_late_verdicts_of_a_split_target_that_are_never_in_time_are_refused(typed: Typed, stages: Path) -> None:
    with serving(stages) as server, linked(server.port, "loopback+delay=150") as relay:
        words = ("run", "ball", "--server", f"ws://127.0.0.1:{relay.port}", "--execution", "late", "--episodes", "1")
        typed(*words, "--split", f"{stages}@3", "--rate-hz", "50").refuses("80 ms after the first", "--rate-hz")


def test_a_robot_draws_its_chunks_from_a_prefix_that_the_server_computed(
    life: Life, typed: Typed, tmp_path: Path
) -> None:
    flow = tmp_path / "flow"
    assert typed("split", "ball-chase-flow", "--out", flow).status == 0
    with serving(flow) as server:
        words = ("run", "ball-chase-flow", "--server", f"ws://127.0.0.1:{server.port}", "--decoding", "flash")
        said = life.run(*words, *ASKED, "--split", f"{flow}@4").summary
    assert said["cuts"]["cut 4"] == said["inferences"] > 0 and not said["missed"]
