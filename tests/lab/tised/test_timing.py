"""The timing model against its equations, worked by hand and as laws that hold for all values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.example_count import example_count

from specact.errors import ConfigError
from specact.lab.tised.timing import (
    age_s,
    chunk_s,
    chunk_speedup,
    exact_task_s,
    relative_latency,
    speedup_bound,
    stall_s,
    task_s,
    task_speedup,
)

# Multiples of 1/64, so that sums and products of them are exact.
times = st.integers(1, 640).map(lambda k: k / 64)
latencies = st.integers(0, 6400).map(lambda k: k / 64)
sizes = st.integers(1, 32)
ratios = st.integers(1, 64).map(lambda k: k / 64)


def test_worked_by_hand() -> None:
    """T_inf = 0.5 s, T_act = 0.125 s, n = 8: rho = 4."""
    assert relative_latency(0.5, 0.125) == 4.0
    assert chunk_s(0.5, 0.125, 8) == 1.5
    assert chunk_s(0.5, 0.125, 8, alpha=0.25) == 1.125
    assert chunk_s(0.5, 0.125, 8, overlap=3) == 1.125
    assert chunk_s(0.5, 0.125, 8, alpha=0.5, overlap=1) == 1.125
    assert speedup_bound(0.5, 0.125, 8) == 1.5
    assert task_s(10, chunk_s(0.5, 0.125, 8, overlap=3)) == 11.25
    assert exact_task_s(10, 0.5, 0.125, 8, overlap=3) == 11.625
    assert task_speedup(20, 25, 1.25) == 1.0


@given(inference=latencies, action=times, n=sizes)
def test_no_lever_is_the_baseline(inference: float, action: float, n: int) -> None:
    assert chunk_s(inference, action, n, alpha=1.0, overlap=0) == inference + n * action
    assert chunk_speedup(inference, action, n) == 1.0
    assert stall_s(inference, action) == age_s(inference, action) == inference


@given(inference=latencies, action=times, n=sizes, data=st.data())
def test_overlap_is_the_formula_of_vlash_too(inference: float, action: float, n: int, data: st.DataObject) -> None:
    """(3) as printed, T_inf + n T_act - min(T_inf, m T_act), is n T_act + max(0, T_inf - m T_act)."""
    m = data.draw(st.integers(0, n))
    assert chunk_s(inference, action, n, overlap=m) == inference + n * action - min(inference, m * action)


@given(inference=latencies, action=times, n=sizes, alpha=ratios, data=st.data())
def test_the_speedup_in_terms_of_rho_and_its_bound(
    inference: float, action: float, n: int, alpha: float, data: st.DataObject
) -> None:
    m, rho = data.draw(st.integers(0, n)), inference / action
    assert chunk_speedup(inference, action, n, alpha=alpha) == pytest.approx((rho + n) / (alpha * rho + n))
    assert chunk_speedup(inference, action, n, overlap=m) == pytest.approx((rho + n) / (rho + n - min(rho, m)))
    both = float(chunk_speedup(inference, action, n, alpha, m))
    assert 1.0 <= both <= float(speedup_bound(inference, action, n)) * (1 + 1e-12)


@given(inference=latencies, action=times, n=sizes, data=st.data())
def test_overlap_saturates_once_the_inference_is_hidden(
    inference: float, action: float, n: int, data: st.DataObject
) -> None:
    m = data.draw(st.integers(0, n))
    if m >= inference / action:
        assert chunk_s(inference, action, n, overlap=m) == n * action
        assert stall_s(inference, action, overlap=m) == 0.0
        assert chunk_speedup(inference, action, n, overlap=m) == pytest.approx(
            float(speedup_bound(inference, action, n))
        )


@given(inference=latencies, action=times, alpha=ratios, m=st.integers(0, 32))
def test_stall_and_age_are_two_things(inference: float, action: float, alpha: float, m: int) -> None:
    stall, age = stall_s(inference, action, alpha, m), age_s(inference, action, alpha, m)
    assert age - stall == m * action  # either one is waited for the whole of, or one has waited for the actions
    assert age >= alpha * inference >= stall
    assert age_s(inference, action, alpha, m + 1) >= age
    assert stall_s(inference, action, alpha, m + 1) <= stall


@example_count(50)
@given(inference=latencies, action=times, n=sizes, before=sizes, after=sizes, data=st.data())
def test_the_speedup_of_a_task_is_that_of_its_time(
    inference: float, action: float, n: int, before: int, after: int, data: st.DataObject
) -> None:
    m = data.draw(st.integers(0, n))
    measured = task_s(before, chunk_s(inference, action, n)) / task_s(after, chunk_s(inference, action, n, overlap=m))
    assert task_speedup(before, after, chunk_speedup(inference, action, n, overlap=m)) == pytest.approx(float(measured))


def test_arrays_broadcast() -> None:
    alphas, depths = np.array([0.25, 0.5, 1.0])[:, None], np.arange(5)
    found = chunk_s(0.5, 0.125, 8, alphas, depths)
    assert found.shape == (3, 5)
    for i, alpha in enumerate(alphas[:, 0]):
        for m in depths:
            assert found[i, m] == chunk_s(0.5, 0.125, 8, float(alpha), int(m))
    assert exact_task_s(np.array([1, 2]), 0.5, 0.125, 8, overlap=2).tolist() == [1.5, 2.75]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: chunk_s(0.1, 0.1, 4, alpha=0.0), r"alpha.*\(0, 1\], got 0"),
        (lambda: chunk_s(0.1, 0.1, 4, alpha=np.array([0.5, 1.5])), r"alpha.*got \[0.5 1.5\]"),
        (lambda: chunk_s(0.1, 0.1, 4, alpha=float("nan")), "alpha"),
        (lambda: chunk_s(0.1, 0.1, 4, overlap=-1), "at least 0, got -1"),
        (lambda: chunk_s(0.1, 0.1, 4, overlap=0.5), "whole number.*got 0.5"),
        (lambda: chunk_s(0.1, 0.1, 4, overlap=5), "overlap must fit into the chunk"),
        (lambda: chunk_s(0.1, 0.1, 0), "at least 1, got 0"),
        (lambda: chunk_s(0.1, 0.0, 4), "T_act.*positive"),
        (lambda: stall_s(-0.1, 0.1), "T_inf.*at least 0, got -0.1"),
        (lambda: relative_latency(float("inf"), 0.1), "finite"),
        (lambda: task_s(-1, 0.1), "N must be"),
        (lambda: task_speedup(0, 1, 1.0), "N_0 must be positive"),
        (lambda: exact_task_s(0, 0.1, 0.1, 4), "N must be positive"),
    ],
)
def test_values_outside_their_range_are_refused(call: object, says: str) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=says):
        call()
