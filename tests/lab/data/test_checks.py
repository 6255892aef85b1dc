"""Each warning appears where it should and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import write_npz

from specact.lab.data.checks import describe
from specact.lab.data.episodes import Episodes
from specact.lab.data.readers import read


def demos(lengths: list[int], seed: int = 0) -> Episodes:
    rng, steps = np.random.default_rng(seed), sum(lengths)
    return Episodes(
        {"state": rng.normal(size=(steps, 3)).astype(np.float32)},
        action=rng.uniform(-1, 1, size=(steps, 2)).astype(np.float32),
        ends=np.cumsum(lengths).astype(np.int64),
        rate_hz=10.0,
    )


def warnings(episodes: Episodes) -> list[str]:
    messages: list[str] = json.loads(json.dumps(describe(episodes, "memory"), allow_nan=False))["warnings"]
    return messages


def test_numbers(tmp_path: Path) -> None:
    episodes = demos([10, 12, 14, 11])
    write_npz(tmp_path / "x.npz", episodes)
    summary = describe(read(tmp_path / "x.npz"), tmp_path / "x.npz")
    wanted: dict[str, Any] = {
        "source": str(tmp_path / "x.npz"), "format": "npz", "episodes": 4, "steps": 47, "rate_hz": 10.0,
        "shapes": {"action": [47, 2], "state": [47, 3]}, "cameras": [], "instructions": [], "length_min": 10,
        "length_median": 11.5, "length_max": 14, "action_min": episodes.action.min(axis=0).tolist(),
        "action_max": episodes.action.max(axis=0).tolist(), "warnings": [],
    }  # fmt: skip
    assert summary == wanted | {"action_quantiles": summary["action_quantiles"]}
    assert summary["action_quantiles"]["0.5"] == np.median(episodes.action, axis=0).tolist()


def test_not_finite() -> None:
    episodes = demos([10, 12])
    episodes.numbers("state")[13, 2], episodes.numbers("state")[14, 0], episodes.action[9, 1] = np.nan, np.inf, -np.inf
    state, action = warnings(episodes)
    assert state.startswith("2 values of state") and state.endswith("episode 1, step 3, dimension 2")
    assert action.startswith("1 values of action") and action.endswith("episode 0, step 9, dimension 1")
    episodes = demos([10])
    episodes.action[:, 1] = np.nan  # not one number in it
    assert describe(episodes, "memory")["action_min"][1] is None and len(warnings(episodes)) == 1


@pytest.mark.parametrize(("outside", "expected"), [(0, 0), (5, 1), (45, 1), (60, 0), (100, 0)])
def test_outside(outside: int, expected: int) -> None:
    """Only where most values lie inside: pixels or large physical units are no mistake."""
    episodes = demos([50])
    episodes.action.reshape(-1)[:outside] += 5
    messages = warnings(episodes)
    assert len(messages) == expected
    assert all(text.startswith(f"{outside} % of the action values") for text in messages)


def test_constants_lengths_and_duplicates() -> None:
    episodes = demos([10, 12])
    episodes.numbers("state")[:, 1], episodes.action[:, 0] = 7, 0
    action, state = warnings(episodes)
    assert action == "1 of 2 action dimensions never change: 0"
    assert state == "1 of 3 state dimensions never change: 1"
    short, odd = warnings(demos([20] * 30 + [1, 200]))
    assert short == "1 episodes are shorter than 2 steps: 30"
    assert odd.startswith("2 episodes are far shorter or longer") and odd.endswith("30 (1 steps), 31 (200 steps)")
    assert warnings(demos([200] * 30 + [199, 195])) == []  # no spread at all must not make 195 an outlier
    episodes = demos([10, 12, 10])
    episodes.numbers("state")[22:], episodes.action[22:] = episodes.numbers("state")[:10], episodes.action[:10]
    assert warnings(episodes) == ["1 episodes repeat an earlier one exactly: 2 (as 0)"]
