"""The equations of TISED: by hand, as laws, against a time line played action by action, and on published tables."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specact.errors import ConfigError
from specact.execution.schedule import Execution
from specact.lab.tised.drivers import PolicyDriver
from specact.lab.tised.equations import (
    age_s,
    chunk_s,
    chunk_speedup,
    decompose,
    exact_task_s,
    optimum,
    stall_s,
    task_s,
)
from specact.lab.tised.sweep import load_hardware

# Multiples of 1/64, so that sums and products of them are exact.
times = st.integers(1, 640).map(lambda k: k / 64)
latencies = st.integers(0, 6400).map(lambda k: k / 64)
ratios = st.integers(1, 64).map(lambda k: k / 64)
sizes = st.integers(1, 32)


def play(chunks: int, n: int, inference: float, action: float, m: int) -> tuple[float, list[float], list[float]]:
    """Plays N chunks of n actions, action by action; the next inference starts when m actions of a chunk are left.

    Returns:
        When the last action ends, how long the robot waited for each chunk, and how old its observation was.
    """
    now, seen, stalls, ages = 0.0, 0.0, list[float](), list[float]()
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


@given(chunks=st.integers(1, 12), n=st.integers(1, 12), inference=latencies, action=times, data=st.data())
def test_what_is_played_is_the_closed_form(
    chunks: int, n: int, inference: float, action: float, data: st.DataObject
) -> None:
    """The first inference is waited for in full; all numbers are exact."""
    m = data.draw(st.integers(0, n))
    total, stalls, ages = play(chunks, n, inference, action, m)
    assert total == exact_task_s(chunks, inference, action, n, overlap=m)
    assert stalls == [inference, *[float(stall_s(inference, action, overlap=m))] * (chunks - 1)]
    assert ages == [inference, *[float(age_s(inference, action, overlap=m))] * (chunks - 1)]


def test_worked_by_hand() -> None:
    """T_inf = 0.5 s, T_act = 0.125 s, n = 8: rho = 4. (4) as printed forgets the first inference."""
    assert chunk_s(0.5, 0.125, 8) == 1.5
    assert chunk_s(0.5, 0.125, 8, alpha=0.25) == chunk_s(0.5, 0.125, 8, overlap=3) == 1.125
    assert chunk_s(0.5, 0.125, 8, alpha=0.5, overlap=1) == 1.125
    assert chunk_speedup(0.5, 0.125, 8, overlap=4) == 1.5
    assert task_s(10, chunk_s(0.5, 0.125, 8, overlap=3)) == 11.25
    assert exact_task_s(10, 0.5, 0.125, 8, overlap=3) == 11.625 == play(10, 8, 0.5, 0.125, 3)[0]
    alphas, depths = np.array([0.25, 0.5, 1.0])[:, None], np.arange(5)
    wanted = [[float(chunk_s(0.5, 0.125, 8, alpha, int(m))) for m in depths] for alpha in alphas[:, 0]]
    assert chunk_s(0.5, 0.125, 8, alphas, depths).tolist() == wanted


@given(inference=latencies, action=times, n=sizes, alpha=ratios, data=st.data())
def test_speedup_stall_and_age_for_all_values(
    inference: float, action: float, n: int, alpha: float, data: st.DataObject
) -> None:
    m, rho = data.draw(st.integers(0, n)), inference / action
    # (3) as printed, in the form of VLASH; with m = 0 it is (1).
    assert chunk_s(inference, action, n, overlap=m) == inference + n * action - min(inference, m * action)
    assert chunk_speedup(inference, action, n, alpha=alpha) == pytest.approx((rho + n) / (alpha * rho + n))
    assert chunk_speedup(inference, action, n, overlap=m) == pytest.approx((rho + n) / (rho + n - min(rho, m)))
    bound = (rho + n) / n
    assert 1.0 <= float(chunk_speedup(inference, action, n, alpha, m)) <= bound * (1 + 1e-12)
    stall, age = stall_s(inference, action, alpha, m), age_s(inference, action, alpha, m)
    assert age - stall == m * action  # either one is waited for the whole of, or one has waited for the actions
    assert age >= alpha * inference >= stall
    if m >= rho:
        assert chunk_speedup(inference, action, n, overlap=m) == pytest.approx(bound)


@given(before=st.floats(0.1, 1000.0), after=st.floats(0.1, 1000.0), before_s=times, after_s=times)
def test_the_two_factors_make_the_speedup(before: float, after: float, before_s: float, after_s: float) -> None:
    factors = decompose(before, before_s, after, after_s)
    assert factors.task_speedup == pytest.approx(before_s / after_s) == factors.chunks_ratio * factors.chunk_speedup
    assert factors.chunks_ratio == before / after


# Tables of TISED (arXiv 2606.28529). pi0.5 on the static UR5e task, by refinement steps:
# T_inf [s], and N and T_task [s] over successful trials.
PI05_INFERENCE_S = {1: 0.162, 7: 0.186, 10: 0.199}
PI05 = {1: (57.4, 45.42), 7: (49.2, 38.74), 10: (47.2, 37.26)}
# T_task [s] by hardware for 1, 5, 7 and 10 steps.
PI05_TASK_S = {"RTX 4070": (44.6, 41.5, 38.6, 37.1), "AGX 50 W": (159.5, 108.5, 116.9, 119.2)}


def test_pi05_on_a_fast_gpu_pays_with_chunks() -> None:
    """One step in place of ten: the chunk, as measured, is no faster, and the task needs 22 % more of them."""
    ten, single = PI05[10], PI05[1]
    factors = decompose(*ten, *single)
    assert factors.chunks_ratio == pytest.approx(47.2 / 57.4) and factors.task_speedup == pytest.approx(37.26 / 45.42)
    assert factors.chunk_speedup == pytest.approx(1.0, abs=0.005)
    # Even the chunk speedup that T_inf alone promises does not buy that back: a paradox.
    promised_s = ten[1] / ten[0] - PI05_INFERENCE_S[10] + PI05_INFERENCE_S[1]
    promised = decompose(*ten, 57.4, 57.4 * promised_s)
    assert promised.chunk_speedup == pytest.approx(1.049, abs=0.001) and promised.task_speedup < 1.0
    assert "1.216 times as many chunks" in factors.explain()


@given(
    chunks=st.lists(st.integers(1, 10_000), min_size=2, max_size=13), inference=st.integers(0, 30),
    action=st.integers(1, 5),
)  # fmt: skip
def test_the_best_overlap_is_where_the_differences_of_task_time_change_sign(
    chunks: list[int], inference: int, action: int
) -> None:
    """(12) to (14); whole numbers are exact."""
    n, count = len(chunks), np.array(chunks, np.float64)
    chunk_times = chunk_s(inference, action, n, overlap=np.arange(n))
    extremum = optimum(np.arange(n), task_s(chunks, chunk_times), "least")
    steps = np.diff(count) * chunk_times[1:] + count[:-1] * np.diff(chunk_times)  # (13)
    at = int(extremum.where)
    assert (steps[:at].sum() < 0.0 or not at) and steps[at:].cumsum().min(initial=0.0) >= 0.0
    assert extremum.conditions == (steps[0], steps.max()) and extremum.value == count[at] * chunk_times[at]
    if extremum.interior:
        assert steps.min() < 0.0 < steps.max()
    if steps[0] < 0.0 and (steps[1:] > 0.0).any() and (np.diff(np.sign(steps)) >= 0.0).all():
        assert extremum.interior, "one valley: the conditions decide"


def test_of_equally_good_settings_the_weakest_is_chosen() -> None:
    assert optimum([10, 5, 1], [2.0, 2.0, 3.0], "least").where == 10.0
    tied = optimum([10, 5, 1], [0.7, 0.9, 0.9], "most")
    assert tied.where == 5.0 and not tied.interior
    alone = optimum([3], [1.5], "least")
    assert (alone.where, alone.value, alone.interior) == (3.0, 1.5, False) and np.isnan(alone.conditions).all()
    # Condition (14) holds here too, and the best is at the end: it promises a valley, not the deepest.
    late = optimum(np.arange(4), [9, 5, 8, 1], "least")
    assert (late.where, late.interior, late.conditions) == (3.0, False, (-4.0, 3.0))


# Settings are refinement steps, the weakest lever (most steps) first.
@pytest.mark.parametrize(
    ("steps", "values", "best", "where", "interior"),
    [
        # DOM: success [%] at 100 % and at 125 % of the speed.
        ((1, 2, 5, 10), (68, 76, 74, 70), "most", 2, True),
        ((1, 2, 5, 10), (36, 34, 48, 46), "most", 5, True),
        # UR5e dynamic: successes of 60 on the RTX 4070, and on the AGX at 30 W.
        ((4, 16), (48, 50), "most", 16, False),
        ((4, 16), (45, 26), "most", 4, False),
        # Kinetix, mean success over six tasks without delay, and with that of the AGX at 15 W.
        ((1, 3, 5), (0.844, 0.908, 0.902), "most", 3, True),
        ((1, 3, 5), (0.844, 0.763, 0.719), "most", 1, False),
        # The paradox from the first step on: every lightweighting makes the task longer; U-shaped on slower hardware.
        ((1, 5, 7, 10), PI05_TASK_S["RTX 4070"], "least", 10, False),
        ((1, 5, 7, 10), PI05_TASK_S["AGX 50 W"], "least", 5, True),
    ],
)
def test_published_optima(steps: tuple[int, ...], values: list[float], best: str, where: float, interior: bool) -> None:
    extremum = optimum(steps[::-1], list(values)[::-1], best)  # type: ignore[arg-type]
    assert (extremum.where, extremum.interior) == (where, interior)


def test_hardware_ratios_follow_from_the_published_tables() -> None:
    """Latency on the AGX, with N and the rest of a chunk as on the RTX 4070; see hardware.toml."""
    ratios = []
    for steps, inference in PI05_INFERENCE_S.items():
        chunks, task = PI05[steps]
        agx_s = PI05_TASK_S["AGX 50 W"][(1, 5, 7, 10).index(steps)]
        ratios.append((agx_s / chunks - (task / chunks - inference)) / inference)
    assert ratios == pytest.approx([13.3, 9.5, 9.7], abs=0.06)

    def kappa(name: str) -> float:
        return load_hardware(name)[1].kappa or 0.0

    assert kappa("agx-50w") == pytest.approx(float(np.median(ratios)), abs=0.05)
    pi05 = load_hardware("pi05-rtx-4070")[1]
    for steps, inference in PI05_INFERENCE_S.items():
        driver = PolicyDriver("", Execution("synchronous", 1), steps=steps)
        assert pi05.absolute_s(driver) == pytest.approx(inference, abs=0.001)
    assert kappa("vla-rtx-4070") * 0.004 == pytest.approx(PI05_INFERENCE_S[10], rel=0.01)
    # Delay [s] of the UR5e on the AGX at 30 W by steps; the least and the largest ratio of the AGX at 15 W.
    line = np.polyfit(list(PI05_INFERENCE_S), list(PI05_INFERENCE_S.values()), 1)
    ratios = [float(delay_s / np.polyval(line, steps)) for steps, delay_s in {16: 0.77, 4: 0.41}.items()]
    assert kappa("agx-30w") == pytest.approx(np.sqrt(np.prod(ratios)), abs=0.06)
    assert kappa("agx-15w") == pytest.approx(np.sqrt(4.3 * 8.9), abs=0.05)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: chunk_s(0.1, 0.1, 4, alpha=0.0), "alpha"),
        (lambda: chunk_s(0.1, 0.1, 4, alpha=np.array([0.5, 1.5, np.nan])), "alpha"),
        (lambda: chunk_s(0.1, 0.1, 4, overlap=0.5), "0.5"),
        (lambda: chunk_s(0.1, 0.1, 4, overlap=5), "overlap"),
        (lambda: chunk_s(0.1, 0.1, 0), "0"),
        (lambda: chunk_s(0.1, 0.0, 4), "T_act"),
        (lambda: stall_s(-0.1, 0.1), "T_inf"),
        (lambda: age_s(float("inf"), 0.1), "T_inf"),
        (lambda: task_s(-1, 0.1), "N"),
        (lambda: exact_task_s(0, 0.1, 0.1, 4), "N"),
        (lambda: decompose(1.0, 1.0, 1.0, 0.0), "task"),
        (lambda: optimum([1, 2], [1.0], "least"), "curve"),
        (lambda: optimum([1, 2, 4], [1.0, np.nan, 2.0], "most"), "nan"),
    ],
)
def test_values_outside_their_range_are_refused(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        call()
