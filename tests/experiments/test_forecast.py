"""What a link carries, measured and as a series."""

from __future__ import annotations

import numpy as np
import pytest
from experiments.split.simulated import series

from specact.links.link import load_link
from specact.links.model import SteadyLink
from specact.systems.roboecc import Bandwidths, measured


def test_a_measurement_is_bytes_over_what_the_server_did_not_need() -> None:
    assert measured(3000.0, 0.5) == 6000.0
    assert np.isfinite(measured(3000.0, 0.0))


def test_a_series_is_what_exchanges_at_those_moments_take() -> None:
    link = SteadyLink(rtt_ms=40.0, jitter_ms=0.0, up_mbit_s=8.0, down_mbit_s=16.0)
    np.testing.assert_allclose(series(link, 10_000, 2_000, 0.2, 3), 12_000 / (0.040 + 0.010 + 0.001))
    jitter = load_link("lte")
    first, again = (series(jitter, 10_000, 2_000, 0.2, 50, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (series(jitter, 10_000, 2_000, 0.2, 50, seed=4) != first).any()


def test_changes_have_a_deviation_and_old_measurements_are_forgotten() -> None:
    seen = Bandwidths()
    for value in (1.0, *63 * [5.0], 9.0):
        seen.add(value, 1.0)
    assert seen.past == [*63 * [5.0], 9.0] and seen.deviation == pytest.approx(np.std([*62 * [0.0], 4.0]))
