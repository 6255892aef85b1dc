"""The bounds of verify-skip."""

from __future__ import annotations

import numpy as np
import pytest

from specact.errors import DataError
from specact.lab.rollout.statistics import wilson
from specact.lab.train.drafter_settings import agreement, fit_skip
from specact.systems.heisd import Memory, SkipRule, unit


def agrees(bias: np.ndarray) -> bool:
    """The sequence-wise rule of HeiSD, with the gripper last."""
    off = np.abs(bias)
    return bool(off.sum() <= 30 and off.max() <= 15 and off[-1] == 0)


def arcs(angles: np.ndarray) -> np.ndarray:
    """Features whose cosines are those of the angles between them."""
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_agreement_is_that_of_the_nearest_chunk_of_other_episodes() -> None:
    known = np.array([[100, 100, 100, 0], [200, 200, 200, 255]])
    memory = Memory(unit(np.eye(2)), known)
    tokens = np.array(
        [[110, 90, 90, 0], [110, 90, 89, 0], [116, 100, 100, 0], [100, 100, 100, 1], [200, 200, 200, 255]]
    )
    features = np.array([[1.0, 0.1]] * 4 + [[0.1, 1.0]])
    assert agreement(memory, features, tokens, agrees).tolist() == [True, False, False, False, True]


def test_the_least_similarity_that_is_safe_is_found() -> None:
    # Steps turn by up to 0.6; what comes after a turn of less than 0.2 is safe, and nothing else is.
    rng = np.random.default_rng(0)
    turns = rng.uniform(0.0, 0.6, (40, 60))
    features = [arcs(np.cumsum(turn)) for turn in turns]
    found = fit_skip(features, [turn < 0.2 for turn in turns], 1)
    assert found.distance == 1
    # With 5 % of unsafe pairs among them, less what Wilson's bound wants.
    assert np.cos(0.2 / 0.95) < found.similarity < np.cos(0.195)
    # One that is a little less similar is not safe enough.
    safe = turns[:, 1:] < 0.2
    for less, enough in ((1e-6, True), (0.004, False)):
        among = safe[np.cos(turns[:, 1:]) >= found.similarity - less]
        assert (wilson(int(among.sum()), len(among)).low >= 0.95) == enough


@pytest.mark.parametrize("reach", [1, 3, 5])
def test_the_distance_ends_where_it_is_no_longer_safe(reach: int) -> None:
    # In half of the episodes all steps look alike, and are safe. In the others the last step looks like the first one,
    # one step further away, and is not; those between look like nothing else.
    apart = np.eye(reach + 2)
    apart[-1] = apart[0]
    episodes = [(np.tile(apart[:1], (reach + 1, 1)), True), (apart, False)] * 100
    features, safe = zip(*[(seen, np.full(len(seen), fine)) for seen, fine in episodes], strict=True)
    found = fit_skip(features, safe, 8)
    assert found == SkipRule(1.0, reach)


def test_where_nothing_is_safe_enough_it_never_skips() -> None:
    rng = np.random.default_rng(3)
    features = [rng.normal(size=(50, 3)) for _ in range(20)]
    found = fit_skip(features, [rng.random(50) < 0.8 for _ in range(20)], 6)
    assert found == SkipRule() and found.distance == 0
    # A few pairs say too little, though all are safe: 72 are too few for the bound, 73 are not.
    few = [arcs(np.zeros(73)), arcs(np.zeros(74))]
    assert [fit_skip([one], [np.ones(len(one), np.bool_)], 1).distance for one in few] == [0, 1]


def test_pairs_are_of_one_episode() -> None:
    # Between the episodes everything changes, and what comes after that is unsafe.
    features = [arcs(np.full(5, angle)) for angle in np.linspace(0.0, 1.0, 60)]
    safe = [np.array([False, True, True, True, True])] * 60
    found = fit_skip(features, safe, 3)
    assert found.distance == 3


def test_episodes_without_pairs_are_refused() -> None:
    for features in ([], [np.ones((1, 3))]):
        with pytest.raises(DataError, match="at least two steps"):
            fit_skip(features, [np.ones(len(one), np.bool_) for one in features], 3)
