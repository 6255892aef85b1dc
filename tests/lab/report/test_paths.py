"""Which episodes a picture of rollouts shows, and that it can be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from specact.gates import Never
from specact.lab.report.paths import FAILED, SUCCEEDED, choose, draw_paths, trace
from specact.load import load_pair
from specact.policy import SpeculativePolicy


@pytest.mark.parametrize(
    ("failing", "shown"),
    [
        ({5, 7, 8, 11}, [5, 7, 8, 0, 1]),
        ({0, 1, 2, 3}, [0, 1, 2, 4, 5]),
        ({9}, [9, 0, 1, 2, 3]),
        (set(), [0, 1, 2, 3, 4]),
        (set(range(12)), [0, 1, 2, 3, 4]),
        (set(range(11)), [0, 1, 2, 3, 11]),
    ],
)
def test_a_picture_shows_failures_of_the_draft_where_there_are_any(failing: set[int], shown: list[int]) -> None:
    asked = []

    def succeeds(episode: int) -> bool:
        asked.append(episode)
        return episode not in failing

    assert choose(succeeds, 12) == shown
    assert len(shown) == FAILED + SUCCEEDED
    assert asked == list(range(len(asked))), "each once, in order"


def test_few_episodes_are_all_shown() -> None:
    assert choose(lambda episode: episode == 1, 3) == [0, 2, 1]


def test_it_is_drawn(tmp_path: Path) -> None:
    episode = trace(SpeculativePolicy(load_pair("ball"), Never(), seed=0), "ball", 0, 0)
    draw_paths({"draft": [episode, episode]}, "ball", "The first one, twice", tmp_path / "rollouts.png")
    assert (tmp_path / "rollouts.png").read_bytes().startswith(b"\x89PNG")
