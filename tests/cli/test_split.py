"""``specact split``, and a robot whose target runs partly on the device and partly on its server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from specact.lab.processes import serving

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def stages(specact_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("split") / "ball"
    done = specact_run("split", "ball", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["stages"] == 8 and found["activations"] == 6 * [[2, 128]] + [[1, 128]]
    return out


def test_a_robot_runs_with_a_split_target(specact_run: Run, stages: Path) -> None:
    with serving(stages) as server:
        where: tuple[str, ...] = ("ball", "--server", f"ws://127.0.0.1:{server.port}")
        options = (*where, "--json", "--gate", "always", "--episodes", "1", "--deadline-ms", "5000", "--split")
        fixed = specact_run("run", *options, f"{stages}@3", "--activations", "float32")
        free = specact_run("run", *options, stages)
        other = specact_run("run", *where, "--gate", "always")
    for done in (fixed, free):
        assert done.returncode == 0, done.stderr
    cuts = json.loads(fixed.stdout)["cuts"]
    assert cuts.keys() == {"cut 3", "switches"} and cuts["cut 3"] == json.loads(fixed.stdout)["inferences"]
    found = json.loads(free.stdout)
    assert sum(found["cuts"].values()) - found["cuts"]["switches"] == found["inferences"]
    # A device without the stages is told what the server serves.
    assert other.returncode == 2 and "the server split" in other.stderr


def test_stages_of_another_network_and_what_cannot_be_split_are_refused(specact_run: Run, stages: Path) -> None:
    again = specact_run("split", "ball", "--out", stages)
    assert again.returncode == 2 and "exists already" in again.stderr
    tokens = specact_run("split", "relocate-tokens", "--out", stages / "more")
    assert tokens.returncode == 2 and "of the kind 'tokens'" in tokens.stderr
    with serving(stages) as server:
        options = ("ball-sampled", "--server", f"ws://127.0.0.1:{server.port}", "--split", stages)
        wrong = specact_run("run", *options, "--gate", "always")
    assert wrong.returncode == 2 and "split that one" in wrong.stderr


def test_a_robot_draws_its_chunks_from_a_prefix_that_the_server_computed(specact_run: Run, tmp_path: Path) -> None:
    assert specact_run("split", "ball-chase-flow", "--out", tmp_path / "flow").returncode == 0
    with serving(tmp_path / "flow") as server:
        options = ("--server", f"ws://127.0.0.1:{server.port}", "--decoding", "flash")
        done = specact_run(
            "run", "ball-chase-flow", *options, "--gate", "always", "--split", f"{tmp_path / 'flow'}@4",
            "--deadline-ms", "5000", "--episodes", "1", "--json",
        )  # fmt: skip
    said = json.loads(done.stdout)
    assert said["cuts"]["cut 4"] == said["inferences"] > 0 and not said["misses"]
