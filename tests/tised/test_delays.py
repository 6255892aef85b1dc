"""Delays in a stepped world, and the published ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tised.published import KINETIX_AGX_15W, KINETIX_AGX_15W_DELAY, KINETIX_ZERO_DELAY

from specact.errors import ConfigError
from specact.tised.delays import nearest_delay, split_delay


def test_nearest() -> None:
    assert nearest_delay([0.0, 0.49, 0.5, 1.0, 1.49, 1.5, 2.4], 1.0).tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert nearest_delay(0.149, 0.1) == 1


@given(latency=st.floats(0.0, 100.0), period=st.floats(0.001, 10.0))
def test_rounding_is_off_by_half_a_step_at_most_and_the_split_by_nothing(latency: float, period: float) -> None:
    assert abs(float(nearest_delay(latency, period)) * period - latency) <= 0.5 * period * (1 + 1e-9)
    whole, part = split_delay(latency, period)
    assert 0.0 <= part < 1.0
    assert (float(whole) + float(part)) * period == pytest.approx(latency)


def test_rounding_hides_what_the_split_keeps() -> None:
    fast, slow = 0.51, 1.49
    assert nearest_delay(fast, 1.0) == nearest_delay(slow, 1.0)
    assert split_delay(fast, 1.0) != split_delay(slow, 1.0)


def test_the_published_delays_are_those_of_rounding_to_nearest() -> None:
    """The tables give delays and not latencies, but a latency that falls with the steps and explains them.

    Any latency linear in the steps that starts at .4 of a simulation step and gains .4 with each gives 0, 1, 2. A
    ceiling cannot: it has no delay 0 for an inference that takes any time at all.
    """
    steps = np.array(list(KINETIX_AGX_15W_DELAY))
    latency = 0.4 + 0.4 * (steps - 1)
    assert nearest_delay(latency, 1.0).tolist() == list(KINETIX_AGX_15W_DELAY.values())
    assert np.ceil(latency).tolist() != list(KINETIX_AGX_15W_DELAY.values())
    # What the published delay 0 means: the same runs as without delay, to the last digit.
    for count, delay in KINETIX_AGX_15W_DELAY.items():
        assert (KINETIX_AGX_15W[count] == KINETIX_ZERO_DELAY[count]) == (delay == 0)


@pytest.mark.parametrize(("latency", "period"), [(-0.1, 1.0), (0.1, 0.0), (float("nan"), 1.0)])
def test_values_outside_their_range_are_refused(latency: float, period: float) -> None:
    with pytest.raises(ConfigError):
        nearest_delay(latency, period)
