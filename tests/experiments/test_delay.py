"""Places of the study of delay: recorded links, and a cadence that is chosen on other episodes than it is judged on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mujoco")

from experiments import delay
from experiments.delay.worlds import RECORDED, Trial
from experiments.grid import Run


def test_an_episode_with_outages_begins_shortly_before_one_and_each_has_its_own_start(tmp_path: Path) -> None:
    for file, _ in RECORDED.values():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("5\n" * 2000 + "2000\n" + "5\n" * 2000)
    rng, moments = np.random.default_rng(0), np.arange(0.0, 1.6, 0.01).tolist()
    links = [Trial(3, "outages", seed=1, episode=number, data=tmp_path).recorded for number in range(10)]
    for link in links:
        slow = [link.delay(0, True, at, rng) == 1.0 for at in moments]
        assert not any(slow[:50]) and any(slow)
    assert len({link.start_s for link in links}) == 10
    cable = [Trial(3, "cable", seed=1, episode=number, data=tmp_path).recorded for number in range(10)]
    assert max(link.start_s for link in cable) > 10.0 > min(link.start_s for link in cable)


def test_a_cadence_is_chosen_on_other_episodes_among_those_that_a_chunk_is_long_enough_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    evaluations = []

    def played(work: object, trial: Trial, run: Run, seed: int, episodes: int) -> dict[str, Any]:
        evaluations.append((trial.every, seed, episodes))
        return {"won": "1", "success": {"mean": 0.5 + (trial.every in (6, 8)) / 2}, "score": {"mean": trial.every / 10}}

    monkeypatch.setattr(delay, "played", played)
    choice = delay.choose(delay.METHODS["aligned"], Trial(4), tmp_path, Run(tmp_path, seed=7))
    assert choice["every"] == 8 and evaluations == [(4, 8, 30), (6, 8, 30), (8, 8, 30), (12, 8, 30), (8, 7, 200)]


def test_a_world_without_rows_has_no_panel() -> None:
    row = {"method": "append", "at": 1, "success": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    panels = delay.draw_delays({"success": [row], "pusht": [], "metaworld": [row, {**row, "at": 2}]}).axes
    assert [axes.get_title("left") for axes in panels] == ["ball-chase at pace 0.1", "metaworld"]
