"""Correctors in the study of delay: they are trained from one recipe, and play with as many requests as the others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mujoco")

from experiments.delay import corrected
from experiments.delay.corrected import CORRECTED, PUSHED, Corrected, training_cells
from experiments.delay.worlds import BALL, EVERY, PUSHT, Trial
from experiments.fleet import robots
from experiments.fleet.server import Server
from experiments.grid import Run

from specact.lab.rollout.families import FamilyRollout
from specact.lab.rollout.methods import HYBRID
from specact.load import load_pair


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A recipe that learns next to nothing."""
    small = tmp_path / "small.toml"
    text = corrected.RECIPE.read_text().replace("episodes = 200", "episodes = 20").replace("steps = 2500", "steps = 5")
    small.write_text(text + "batch = 8\n")
    monkeypatch.setattr(corrected, "RECIPE", small)


def test_every_method_has_its_bundle_and_the_goal_is_hidden_from_the_device_alone() -> None:
    names = [cell.name for cell in training_cells()]
    assert len(names) == len(set(names)) and {
        f"correctors/{cell.bundle}" for cell in (*CORRECTED.values(), *PUSHED.values())
    } <= {*names}
    for task, name, count in ((BALL, "ball", 8), (PUSHT, "agent", 2)):
        env = task.make(render_mode=None, pace=0.1)
        seen, _ = env.reset(seed=1)
        np.testing.assert_array_equal(seen[name], seen["state"][:count])
        assert seen["state"][count:].any() and seen in env.observation_space
        env.close()


@pytest.mark.usefixtures("few")
def test_a_corrector_asks_at_the_common_cadence_and_a_draft_never(tmp_path: Path) -> None:
    hidden = Corrected("", "corrector", "hidden")
    draft = replace(hidden, method="draft")
    trial = Trial(2, seed=1, out=tmp_path)
    first, shuffled = replace(hidden, method="first"), replace(hidden, method="shuffled")
    cells = {f"correctors/{cell.bundle}": cell for cell in (first, hidden, draft, shuffled)}
    for name, cell in cells.items():
        made = corrected._train(cell, tmp_path / name, Run(tmp_path))
        assert len(made["bound"]) == 16
    episode = hidden.run(trial)
    steps = round(episode.task_s * BALL.rate_hz)
    assert episode.chunks == -(-steps // EVERY) and draft.run(trial).chunks == 0
    assert hidden.run(trial).task_s == episode.task_s, "it is deterministic"
    recorded = [tmp_path / name / "run" / "rollouts" for name in cells]
    files = [[file.read_bytes() for file in sorted(folder.iterdir())] for folder in recorded]
    assert files[1] == files[2], "the controls learn from the same rollouts"
    assert files[0][0] == files[1][0] and files[0][1] != files[1][1], "every other one is played by the first"
    assert files[3][0] != files[1][0]
    # In a fleet the target infers for those that ask alone, and a reply is of use until the chunk ends.
    pair = load_pair(hidden.folder(tmp_path))
    server = Server(robots.service(), 1, 0.0, 0.0, grants=False)
    robot = robots.recruit(FamilyRollout(pair, HYBRID), robots.DISCIPLINES["late cadence"], server, 16, 0, 1)
    for _ in range(40):
        robots.control_step([robot], FamilyRollout(pair, HYBRID))
        robot.policy.clock.sleep(1.0 / pair.rate_hz)
    period = math.ceil(1.0 / robots.fair_share(robots.CHASE, 16, 1))
    assert len(server.sent) == math.ceil(40 / period)
    assert server.sent[0].due - server.sent[0].at == pytest.approx(16 / pair.rate_hz, abs=1e-3)
