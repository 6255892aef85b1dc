"""What bought a speedup and what paid for it, on published tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.tised.published import PI05, PI05_INFERENCE_S, VLASH_CHUNKS_RATIO

from specact.errors import ConfigError
from specact.lab.tised.decomposition import Averages, decompose
from specact.lab.tised.timing import chunk_speedup, task_speedup

sizes = st.floats(0.1, 1000.0)


@given(before=sizes, after=sizes, before_s=sizes, after_s=sizes)
def test_the_two_factors_make_the_speedup(before: float, after: float, before_s: float, after_s: float) -> None:
    found = decompose(Averages(before, before_s), Averages(after, after_s))
    assert found.task_speedup == pytest.approx(before_s / after_s)
    assert found.task_speedup == pytest.approx(float(task_speedup(before, after, found.chunk_speedup)))


def test_pi05_on_a_fast_gpu_pays_with_chunks() -> None:
    """One step in place of ten: the chunk, as measured, is no faster, and the task needs 22 % more of them."""
    found = decompose(PI05[10], PI05[1])
    assert found.chunks_ratio == pytest.approx(47.2 / 57.4)
    assert found.chunk_speedup == pytest.approx(1.0, abs=0.005)
    assert found.task_speedup == pytest.approx(37.26 / 45.42)
    # Even the chunk speedup that T_inf alone promises does not buy that back: a paradox.
    promised_s = PI05[10].chunk_s - PI05_INFERENCE_S[10] + PI05_INFERENCE_S[1]
    promised = decompose(PI05[10], Averages(57.4, 57.4 * promised_s))
    assert promised.chunk_speedup == pytest.approx(1.049, abs=0.001)
    assert promised.is_paradox


def test_vlash_breaks_even() -> None:
    """Two more chunks in a hundred are paid for by 1.4 %; at delay 3 the chunk has to be 8.1 % faster."""
    for delay, ratio in VLASH_CHUNKS_RATIO.items():
        speedup = float(chunk_speedup(delay, 1.0, 8, overlap=delay))  # the whole inference hidden
        base = Averages(100.0, 100.0 * (delay + 8))
        found = decompose(base, Averages(100.0 * ratio, 100.0 * ratio * 8))
        assert found.chunk_speedup == pytest.approx(speedup)
        assert found.task_speedup == pytest.approx(speedup / ratio)
        assert not found.is_paradox
    poor = decompose(Averages(100.0, 100.0), Averages(108.1, 108.1 / 1.05))
    assert poor.is_paradox and poor.task_speedup == pytest.approx(1.05 / 1.081)


def test_in_words() -> None:
    found = decompose(Averages(20.0, 40.0), Averages(25.0, 40.0))
    assert found.explain() == (
        "a chunk is 1.250 times as fast and the task needs 1.250 times as many chunks (it breaks even at 1.250 times "
        "as many): the task is as fast"
    )


def test_averages_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="chunks N must be positive"):
        Averages(float("nan"), 1.0)
    with pytest.raises(ConfigError, match="time of a task"):
        Averages(1.0, 0.0)
