"""The equations of TISED: by hand, as laws, against a time line played action by action, and on published tables."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.tised import published

from specact.errors import ConfigError
from specact.lab.tised.decomposition import Averages, decompose
from specact.lab.tised.optima import fastest_overlap, scan, task_time_steps
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
ratios = st.integers(1, 64).map(lambda k: k / 64)
sizes = st.integers(1, 32)
fractions = st.fractions(min_value=Fraction(1, 97), max_value=10, max_denominator=97)
# Whole numbers keep products and differences exact, so that conditions and scan may be compared without tolerance.
counts = st.lists(st.integers(1, 10_000), min_size=1, max_size=13)

Time = float | Fraction


def play(chunks: int, n: int, inference: Time, action: Time, m: int) -> tuple[Time, list[Time], list[Time]]:
    """Plays N chunks of n actions, action by action; the next inference starts when m actions of a chunk are left.

    Returns:
        When the last action ends, how long the robot waited for each chunk, and how old its observation was.
    """
    now: Time = 0 * action
    seen, stalls, ages = now, list[Time](), list[Time]()
    for chunk in range(chunks):
        start = max(now, seen + inference)
        stalls.append(start - now)
        ages.append(start - seen)
        now = start
        for left in range(n, -1, -1):
            if left == m and chunk + 1 < chunks:
                seen = now
            now = now + action if left else now
    return now, stalls, ages


@given(chunks=st.integers(1, 12), n=st.integers(1, 12), inference=fractions, action=fractions, data=st.data())
def test_what_is_played_is_the_closed_form(
    chunks: int, n: int, inference: Fraction, action: Fraction, data: st.DataObject
) -> None:
    """N T_chunk + min(T_inf, m T_act), without a rounding."""
    m = data.draw(st.integers(0, n))
    total, stalls, ages = play(chunks, n, inference, action, m)
    each = n * action + max(Fraction(0), inference - m * action)
    assert total == chunks * each + min(inference, m * action)
    assert stalls == [inference, *[max(Fraction(0), inference - m * action)] * (chunks - 1)]
    assert ages == [inference, *[max(inference, m * action)] * (chunks - 1)]


@given(chunks=st.integers(1, 12), n=st.integers(1, 12), inference=latencies, action=times, data=st.data())
def test_the_timing_model_says_the_same(
    chunks: int, n: int, inference: float, action: float, data: st.DataObject
) -> None:
    m = data.draw(st.integers(0, n))
    total, stalls, ages = play(chunks, n, inference, action, m)
    assert total == exact_task_s(chunks, inference, action, n, overlap=m)
    assert set(stalls[1:]) <= {float(stall_s(inference, action, overlap=m))}
    assert set(ages[1:]) <= {float(age_s(inference, action, overlap=m))}


def test_worked_by_hand() -> None:
    """T_inf = 0.5 s, T_act = 0.125 s, n = 8: rho = 4. (4) as printed forgets the first inference."""
    assert relative_latency(0.5, 0.125) == 4.0
    assert chunk_s(0.5, 0.125, 8) == 1.5
    assert chunk_s(0.5, 0.125, 8, alpha=0.25) == chunk_s(0.5, 0.125, 8, overlap=3) == 1.125
    assert chunk_s(0.5, 0.125, 8, alpha=0.5, overlap=1) == 1.125
    assert speedup_bound(0.5, 0.125, 8) == 1.5
    assert task_s(10, chunk_s(0.5, 0.125, 8, overlap=3)) == 11.25
    assert exact_task_s(10, 0.5, 0.125, 8, overlap=3) == 11.625 == play(10, 8, 0.5, 0.125, 3)[0]
    assert task_speedup(20, 25, 1.25) == 1.0
    alphas, depths = np.array([0.25, 0.5, 1.0])[:, None], np.arange(5)
    wanted = [[float(chunk_s(0.5, 0.125, 8, alpha, int(m))) for m in depths] for alpha in alphas[:, 0]]
    assert chunk_s(0.5, 0.125, 8, alphas, depths).tolist() == wanted


@given(inference=latencies, action=times, n=sizes, alpha=ratios, data=st.data())
def test_speedup_stall_and_age_for_all_values(
    inference: float, action: float, n: int, alpha: float, data: st.DataObject
) -> None:
    m, rho = data.draw(st.integers(0, n)), inference / action
    assert chunk_s(inference, action, n) == inference + n * action
    # (3) as printed, in the form of VLASH.
    assert chunk_s(inference, action, n, overlap=m) == inference + n * action - min(inference, m * action)
    assert chunk_speedup(inference, action, n, alpha=alpha) == pytest.approx((rho + n) / (alpha * rho + n))
    assert chunk_speedup(inference, action, n, overlap=m) == pytest.approx((rho + n) / (rho + n - min(rho, m)))
    bound = float(speedup_bound(inference, action, n))
    assert 1.0 <= float(chunk_speedup(inference, action, n, alpha, m)) <= bound * (1 + 1e-12)
    stall, age = stall_s(inference, action, alpha, m), age_s(inference, action, alpha, m)
    assert age - stall == m * action  # either one is waited for the whole of, or one has waited for the actions
    assert age >= alpha * inference >= stall
    assert age_s(inference, action, alpha, m + 1) >= age and stall_s(inference, action, alpha, m + 1) <= stall
    if m >= rho:
        assert chunk_s(inference, action, n, overlap=m) == n * action
        assert chunk_speedup(inference, action, n, overlap=m) == pytest.approx(bound)


@given(before=st.floats(0.1, 1000.0), after=st.floats(0.1, 1000.0), before_s=times, after_s=times)
def test_the_two_factors_make_the_speedup(before: float, after: float, before_s: float, after_s: float) -> None:
    found = decompose(Averages(before, before_s), Averages(after, after_s))
    assert found.task_speedup == pytest.approx(before_s / after_s)
    assert found.task_speedup == pytest.approx(float(task_speedup(before, after, found.chunk_speedup)))


def test_pi05_on_a_fast_gpu_pays_with_chunks() -> None:
    """One step in place of ten: the chunk, as measured, is no faster, and the task needs 22 % more of them."""
    ten, one = published.PI05[10], published.PI05[1]
    found = decompose(ten, one)
    assert found.chunks_ratio == pytest.approx(47.2 / 57.4) and found.task_speedup == pytest.approx(37.26 / 45.42)
    assert found.chunk_speedup == pytest.approx(1.0, abs=0.005)
    # Even the chunk speedup that T_inf alone promises does not buy that back: a paradox.
    promised_s = ten.chunk_s - published.PI05_INFERENCE_S[10] + published.PI05_INFERENCE_S[1]
    promised = decompose(ten, Averages(57.4, 57.4 * promised_s))
    assert promised.chunk_speedup == pytest.approx(1.049, abs=0.001) and promised.is_paradox
    assert "1.216 times as many chunks" in found.explain()


def test_vlash_breaks_even() -> None:
    """Two more chunks in a hundred are paid for by 1.4 %; at delay 3 the chunk has to be 8.1 % faster."""
    for delay, ratio in published.VLASH_CHUNKS_RATIO.items():
        speedup = float(chunk_speedup(delay, 1.0, 8, overlap=delay))  # the whole inference hidden
        found = decompose(Averages(100.0, 100.0 * (delay + 8)), Averages(100.0 * ratio, 100.0 * ratio * 8))
        assert found.chunk_speedup == pytest.approx(speedup) and not found.is_paradox
        assert found.task_speedup == pytest.approx(speedup / ratio)
    assert decompose(Averages(100.0, 100.0), Averages(108.1, 108.1 / 1.05)).is_paradox


@given(chunks=counts, inference=st.integers(0, 30), action=st.integers(1, 5))
def test_differences_of_task_time_and_scan_agree_on_every_curve(chunks: list[int], inference: int, action: int) -> None:
    n = len(chunks)
    each = chunk_s(inference, action, n, overlap=np.arange(n))
    found = fastest_overlap(chunks, inference, action, n)
    looked = scan(np.arange(n), task_s(chunks, each), "least")
    assert (found.where, found.value, found.interior) == (looked.where, looked.value, looked.interior)
    assert found.conditions == looked.conditions or n == 1
    cost, saving = task_time_steps(chunks, each)
    assert (cost + saving).tolist() == np.diff(task_s(chunks, each)).tolist() and (saving <= 0.0).all()


@given(values=st.sets(st.integers(0, 1000), min_size=1, max_size=13), turn=st.integers(0, 12))
def test_one_valley_has_one_candidate_and_the_conditions_decide(values: set[int], turn: int) -> None:
    """Without inference time task time is N; an interior minimum then is dT(0) < 0 and some dT > 0, both ways (14)."""
    ranked, turn = sorted(values, reverse=True), turn % len(values)
    curve = [rank + 1 for rank in ranked[: turn + 1]] + sorted(rank + ranked[0] + 1 for rank in ranked[turn + 1 :])
    found = fastest_overlap(curve, 0, 1, len(curve))
    assert found.others == () and found.where == np.argmin(curve)
    if len(curve) > 1:
        first, largest = found.conditions
        assert found.interior == (first < 0.0 < largest)


def test_of_several_valleys_the_deepest_is_returned_and_ties_go_to_the_weakest() -> None:
    found = fastest_overlap([9, 5, 8, 3, 6, 4], 0, 1, 6)
    assert (found.where, found.interior, found.others) == (3.0, True, (1.0, 5.0))
    # Condition (14) holds here too, and the best is at the end: it promises a valley, not the deepest.
    rising_late = fastest_overlap([9, 5, 8, 1], 0, 1, 4)
    assert rising_late.conditions == (-16.0, 12.0) and not rising_late.interior
    assert (rising_late.where, rising_late.others) == (3.0, (1.0,))
    assert scan([10, 5, 1], [2.0, 2.0, 3.0], "least").where == 10.0
    assert fastest_overlap([4, 3, 3, 4, 3], 0, 1, 5).where == 1.0
    tied = scan([10, 5, 1], [0.7, 0.9, 0.9], "most")
    assert tied.where == 5.0 and not tied.interior
    alone = scan([3], [1.5], "least")
    assert (alone.where, alone.value, alone.interior) == (3.0, 1.5, False) and np.isnan(alone.conditions).all()


# Settings are refinement steps, the weakest lever (most steps) first.
@pytest.mark.parametrize(
    ("steps", "values", "best", "where", "interior"),
    [
        (published.DOM_STEPS, published.DOM_SUCCESS[1.00], "most", 2, True),
        (published.DOM_STEPS, published.DOM_SUCCESS[1.25], "most", 5, True),
        ((4, 16), [published.UR5E_BY_HARDWARE["RTX 4070"][s] for s in (4, 16)], "most", 16, False),
        ((4, 16), [published.UR5E_BY_HARDWARE["AGX 30 W"][s] for s in (4, 16)], "most", 4, False),
        ((1, 3, 5), [np.mean(published.KINETIX_ZERO_DELAY[s]) for s in (1, 3, 5)], "most", 3, True),
        ((1, 3, 5), [np.mean(published.KINETIX_AGX_15W[s]) for s in (1, 3, 5)], "most", 1, False),
        # The paradox from the first step on: every lightweighting makes the task longer; U-shaped on slower hardware.
        (published.PI05_STEPS, published.PI05_TASK_S["RTX 4070"], "least", 10, False),
        (published.PI05_STEPS, published.PI05_TASK_S["AGX 50 W"], "least", 5, True),
    ],
)
def test_published_optima(steps: tuple[int, ...], values: list[float], best: str, where: float, interior: bool) -> None:
    found = scan(steps[::-1], list(values)[::-1], best)  # type: ignore[arg-type]
    assert (found.where, found.interior) == (where, interior)


def test_published_kinetix_by_task() -> None:
    """With the delay of the AGX at 15 W one step wins most tasks; without delay it wins none alone."""
    delayed, plain = (
        [scan((5, 3, 1), [table[s][i] for s in (5, 3, 1)], "most").where for i in range(6)]
        for table in (published.KINETIX_AGX_15W, published.KINETIX_ZERO_DELAY)
    )
    assert delayed == [1, 1, 1, 1, 3, 5] and plain == [3, 3, 3, 3, 5, 5]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: chunk_s(0.1, 0.1, 4, alpha=0.0), "alpha"),
        (lambda: chunk_s(0.1, 0.1, 4, alpha=np.array([0.5, 1.5])), "alpha"),
        (lambda: chunk_s(0.1, 0.1, 4, alpha=float("nan")), "alpha"),
        (lambda: chunk_s(0.1, 0.1, 4, overlap=-1), "-1"),
        (lambda: chunk_s(0.1, 0.1, 4, overlap=0.5), "0.5"),
        (lambda: chunk_s(0.1, 0.1, 4, overlap=5), "overlap"),
        (lambda: chunk_s(0.1, 0.1, 0), "0"),
        (lambda: chunk_s(0.1, 0.0, 4), "T_act"),
        (lambda: stall_s(-0.1, 0.1), "T_inf"),
        (lambda: relative_latency(float("inf"), 0.1), "T_inf"),
        (lambda: task_s(-1, 0.1), "N"),
        (lambda: task_speedup(0, 1, 1.0), "N_0"),
        (lambda: exact_task_s(0, 0.1, 0.1, 4), "N"),
        (lambda: Averages(float("nan"), 1.0), "N"),
        (lambda: Averages(1.0, 0.0), "task"),
        (lambda: scan([1, 2], [1.0], "least"), "curve"),
        (lambda: scan([], [], "least"), "curve"),
        (lambda: scan([1, 2, 4], [1.0, np.nan, 2.0], "most"), "nan"),
    ],
)
def test_values_outside_their_range_are_refused(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        call()
