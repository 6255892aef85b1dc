"""What is kept of a robot's episode on a link that is pulled, and the film of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from experiments.outage import measures_of
from experiments.outage.film import FILMED, SIZE, Film
from experiments.outage.robots import FILM_S, PERIOD_S, pose_of, summary_of
from PIL import Image

from specact.lab.envs.live import Frame
from specact.lab.envs.pusht import observe
from specact.types import Origin

RAW = [100.0, 200.0, 256.0, 300.0, 0.5]


def frame(steps: int, held: int, success: bool = False) -> Frame:
    return Frame({"state": observe(np.array(RAW))}, False, {"success": success, "score": 0.0}, steps, held, 0.0)


def test_a_period_without_a_new_action_is_still() -> None:
    # The last two frames of the episode before are left out.
    frames = [frame(8, 1), frame(9, 2), frame(0, 0), frame(1, 0), frame(2, 1), frame(3, 2), frame(4, 2, success=True)]
    summary = summary_of(frames, {0: Origin.REPLACED, 3: Origin.DRAFTED})
    assert (summary["still"], summary["whom"], summary["success_s"]) == ("0110", "2--0", 0.4)
    np.testing.assert_allclose(summary["path"], [RAW] * 5)
    assert pose_of({"state": observe(np.array(RAW))}) == RAW


def test_stalls_are_counted_inside_and_outside_the_outage() -> None:
    still = "0" * 20 + "1" * 20 + "0" * 10 + "1" * 5 + "0" * 45
    measures = measures_of([{"still": still, "success": True, "success_s": 7.0}])
    # The outage are periods 30 to 79.
    assert measures["down"] == [15 / 50] and measures["rest"] == [10 / 50] and measures["stall_s"] == [2.0]


def test_the_film_shows_every_period(tmp_path: Path) -> None:
    periods = round(FILM_S / PERIOD_S)
    path = [[100.0 + number, 200.0, 256.0, 300.0, 0.02 * number] for number in range(periods + 1)]
    episode: dict[str, Any] = {"still": "01" * periods, "whom": "-2" * periods, "path": path}
    Film(dict.fromkeys(FILMED, episode)).savefig(tmp_path / "film.gif", metadata={"Date": None})
    with Image.open(tmp_path / "film.gif") as film:
        assert (film.size, getattr(film, "n_frames", 1)) == (SIZE, periods)
