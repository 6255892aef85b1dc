"""How far actions jump where one chunk follows another."""

import math

import numpy as np
import pytest

from specact.execution.seams import Seams

PERIOD_S = 0.5


def played(*actions: tuple[float, bool]) -> Seams:
    seams = Seams(PERIOD_S)
    for value, seam in actions:
        seams.play(np.array([value, 0.0], np.float32), seam)
    return seams


def test_steps_and_jerk_at_seams_and_elsewhere() -> None:
    """By hand, of 0 1 2 | 5 6 7 | 7: steps of 1 within chunks, and of 3 and 0 at seams."""
    seams = played((0, True), (1, False), (2, False), (5, True), (6, False), (7, False), (7, True))
    assert seams.largest_step == {True: 3.0, False: 1.0}
    # Centred on the rows 2 (within), 3 (the seam), 4 and 5 (within): 2, 4, 2 and 1 in size.
    assert seams.jerk[True] == pytest.approx(4.0 / PERIOD_S**3)
    assert seams.jerk[False] == pytest.approx((2.0 + 2.0 + 1.0) / 3 / PERIOD_S**3)
    assert seams.summary() == {
        "largest_step": 3.0, "largest_step_within": 1.0, "jerk": 32.0, "jerk_within": pytest.approx(40.0 / 3),
    }  # fmt: skip


def test_an_episode_does_not_follow_the_last_one_and_nothing_is_nothing() -> None:
    seams = played((0, True), (1, False))
    seams.reset()
    seams.play(np.array([9.0, 0.0], np.float32), True)
    assert math.isnan(seams.largest_step[True]) and seams.largest_step[False] == 1.0
    assert Seams(1.0).summary() == dict.fromkeys(("largest_step", "largest_step_within", "jerk", "jerk_within"))
