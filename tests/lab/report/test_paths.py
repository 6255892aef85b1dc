"""Which episodes a picture of rollouts shows, and that it can be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from specact.gates import Never
from specact.lab.report.paths import choose, draw_paths, trace
from specact.load import load_pair
from specact.policy import SpeculativePolicy


@pytest.mark.parametrize(
    ("failing", "episodes", "shown"),
    [
        ({5, 7, 8, 11}, 12, [5, 7, 8, 0, 1]), ({9}, 12, [9, 0, 1, 2, 3]), (set(), 12, [0, 1, 2, 3, 4]),
        (set(range(11)), 12, [0, 1, 2, 3, 11]), ({0, 2}, 3, [0, 2, 1]),
    ],
)  # fmt: skip
def test_a_picture_shows_failures_of_the_draft_where_there_are_any(
    failing: set[int], episodes: int, shown: list[int]
) -> None:
    asked = []

    def succeeds(episode: int) -> bool:
        asked.append(episode)
        return episode not in failing

    assert choose(succeeds, episodes) == shown
    assert asked == list(range(len(asked))), "each once, in order"


def test_it_is_drawn(tmp_path: Path) -> None:
    episode = trace(SpeculativePolicy(load_pair("ball"), Never(), seed=0), "ball", 0, 0)
    draw_paths({"draft": [episode, episode]}, "ball", "The first one, twice", tmp_path / "rollouts.png")
    assert (tmp_path / "rollouts.png").read_bytes().startswith(b"\x89PNG")
