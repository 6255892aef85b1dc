"""Windows of observations that are not one period apart: which observations they hold, and at what cost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specact.execution.history import SampledHistory
from specact.observation import vectors


@given(
    gaps=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=30),
    length=st.integers(1, 8),
)
def test_a_window_holds_the_nearest_observations_and_the_newer_of_two(gaps: list[float], length: int) -> None:
    history = SampledHistory(vectors(length, state=1), 0.5)
    times = np.cumsum(gaps)
    for number, time in enumerate(times):
        history.sample(float(time), {"state": np.array([number])})
        # Every observation of the episode, newest first: the first of those that are as near.
        newest_first = np.arange(number, -1, -1)
        away = [np.abs(times[newest_first] - (time - 0.5 * back)) for back in reversed(range(length))]
        expected = [newest_first[np.argmin(distances)] for distances in away]
        assert history.window()["state"][:, 0].tolist() == expected
