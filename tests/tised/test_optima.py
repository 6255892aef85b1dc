"""The conditions and the plain scan must lead to the same place, and the published tables to the published places."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests.tised import published

from specact.errors import ConfigError
from specact.tised.optima import (
    Curve,
    Optimum,
    best_alpha,
    fastest_overlap,
    most_successful_overlap,
    scan,
    success_slope,
    success_steps,
    task_time_slope,
    task_time_steps,
)
from specact.tised.prediction import staleness, success_rate
from specact.tised.timing import chunk_s, stall_s, task_s
from specact.types import Floats

# Whole numbers keep products and differences exact, so that conditions and scan may be compared without tolerance.
counts = st.lists(st.integers(1, 10_000), min_size=1, max_size=13)
whole = st.integers(0, 30)


def rise_and_fall(values: list[int], turn: int) -> list[int]:
    """The numbers, falling up to ``turn`` and rising from there."""
    ranked = sorted(set(values), reverse=True)
    turn %= len(ranked)
    return ranked[: turn + 1] + sorted(rank + ranked[0] for rank in ranked[turn + 1 :])


@given(chunks=counts, inference=whole, action=st.integers(1, 5))
def test_differences_of_task_time_and_scan_agree_on_every_curve(chunks: list[int], inference: int, action: int) -> None:
    n = len(chunks)
    times = task_s(chunks, chunk_s(inference, action, n, overlap=np.arange(n)))
    found, looked = fastest_overlap(chunks, inference, action, n), scan(np.arange(n), times, "least")
    assert (found.where, found.value, found.interior) == (looked.where, looked.value, looked.interior)
    assert found.conditions == looked.conditions or n == 1


@given(quality=st.lists(st.integers(-500, 500), min_size=1, max_size=13), inference=whole, pace=st.integers(0, 9))
def test_differences_of_success_and_scan_agree_on_every_curve(quality: list[int], inference: int, pace: int) -> None:
    """With a response that is linear, so that it is exact too."""

    def response(a: Floats, s: Floats) -> Floats:
        return np.asarray(a - 4.0 * s)

    depths = np.arange(len(quality))
    values = response(np.array(quality, float), staleness(pace, stall_s(inference, 1, overlap=depths)))
    found = most_successful_overlap(quality, pace, inference, 1, response)
    looked = scan(depths, values, "most")
    assert (found.where, found.value, found.interior) == (looked.where, looked.value, looked.interior)


@given(values=st.lists(st.integers(0, 1000), min_size=1, max_size=13), turn=st.integers(0, 12))
def test_one_valley_has_one_candidate_and_the_conditions_decide(values: list[int], turn: int) -> None:
    """Without inference time task time is N; an interior minimum then is dT(0) < 0 and some dT > 0, both ways (14)."""
    curve = [value + 1 for value in rise_and_fall(values, turn)]
    found = fastest_overlap(curve, 0, 1, len(curve))
    assert found.others == ()
    assert found.where == np.argmin(curve)
    if len(curve) > 1:
        first, largest = found.conditions
        assert found.interior == (first < 0.0 < largest)


def test_of_several_valleys_the_deepest_is_returned_and_the_rest_named() -> None:
    curve = [9, 5, 8, 3, 6, 4]
    found = fastest_overlap(curve, 0, 1, 6)
    assert (found.where, found.interior, found.others) == (3.0, True, (1.0, 5.0))
    # Condition (14) holds here too, and the best is at the end: it promises a valley, not the deepest.
    rising_late = fastest_overlap([9, 5, 8, 1], 0, 1, 4)
    assert rising_late.conditions == (-16.0, 12.0) and not rising_late.interior
    assert (rising_late.where, rising_late.others) == (3.0, (1.0,))


def test_ties_go_to_the_weakest_setting() -> None:
    assert scan([10, 5, 1], [2.0, 2.0, 3.0], "least").where == 10.0
    assert fastest_overlap([4, 4, 4], 0, 1, 3).where == 0.0
    assert fastest_overlap([4, 3, 3, 4, 3], 0, 1, 5).where == 1.0
    assert scan([10, 5, 1], [0.7, 0.9, 0.9], "most") == scan([10, 5, 1], [0.7, 0.9, 0.9], "most")
    assert not scan([10, 5, 1], [0.7, 0.9, 0.9], "most").interior


@given(chunks=counts, inference=whole)
def test_the_two_terms_of_a_difference_make_it(chunks: list[int], inference: int) -> None:
    n = len(chunks)
    each = chunk_s(inference, 1, n, overlap=np.arange(n))
    cost, saving = task_time_steps(chunks, each)
    assert (cost + saving).tolist() == np.diff(task_s(chunks, each)).tolist()
    assert (saving <= 0.0).all()


def test_the_two_terms_of_success() -> None:
    a, s = np.array([2.0, 1.5, 0.0, -1.0]), np.array([3.0, 1.0, 0.0, 0.0])
    quality, freshness = success_steps(a, s, success_rate)
    np.testing.assert_allclose(quality + freshness, np.diff(success_rate(a, s)), atol=1e-15)
    assert (quality < 0).all() and (freshness >= 0).all() and freshness[-1] == 0.0


@dataclass(frozen=True)
class StaticTask:
    """N = floor + extra (1 / alpha^power - 1): the worse the actions, the more chunks.

    Task time is convex in alpha where ``power >= 1``. Otherwise it is convex up to some alpha and concave from there,
    so that it can fall, rise, and fall again towards alpha = 1.
    """

    floor: float
    extra: float
    power: float
    inference: float
    n: int

    def chunks(self, alpha: Floats) -> Floats:
        return np.asarray(self.floor + self.extra * (alpha**-self.power - 1.0))

    def chunks_slope(self, alpha: Floats) -> Floats:
        return np.asarray(-self.extra * self.power * alpha ** (-self.power - 1.0))

    def times(self, alpha: Floats) -> Floats:
        return task_s(self.chunks(alpha), chunk_s(self.inference, 0.05, self.n, alpha))

    @property
    def slope(self) -> Curve:
        return task_time_slope(self.chunks, self.chunks_slope, self.inference, 0.05, self.n)

    def best(self) -> Optimum:
        return best_alpha(self.times, self.slope, 0.05, "least")


def static_tasks(least_power: float) -> st.SearchStrategy[StaticTask]:
    return st.builds(
        StaticTask,
        floor=st.floats(5.0, 50.0),
        extra=st.floats(0.01, 20.0),
        power=st.floats(least_power, 3.0),
        inference=st.floats(0.05, 2.0),
        n=st.integers(1, 20),
    )


# An interior optimum although the slope at alpha = 1 is -0.25: conditions (11) are sufficient, not necessary.
DIPS_TWICE = StaticTask(floor=5.0, extra=10.0, power=0.5, inference=1.0, n=1)


@given(task=static_tasks(least_power=0.5))
@example(task=StaticTask(floor=6.0, extra=6.0, power=0.5, inference=1.0, n=1))  # the slope ends at exactly 0
@example(task=DIPS_TWICE)
def test_slope_and_scan_agree_on_task_time_and_the_conditions_suffice(task: StaticTask) -> None:
    found = task.best()
    grid = np.linspace(1.0, 0.05, 4001)
    looked = scan(grid, task.times(grid), "least")
    assert found.value == pytest.approx(looked.value, rel=1e-4)  # how far the least of a grid is from the least of all
    steepest = np.abs(task.slope(grid)).max()
    if found.interior:
        assert abs(float(task.slope(np.array([found.where]))[0])) < 1e-6 * steepest
    at_weakest, at_strongest = found.conditions
    if at_strongest < -1e-6 * steepest and at_weakest > 1e-6 * steepest:  # (11), by more than rounding
        assert 0.05 < found.where < 1.0


@given(task=static_tasks(least_power=1.0))
def test_the_conditions_are_necessary_where_task_time_is_convex(task: StaticTask) -> None:
    found = task.best()
    grid = np.linspace(1.0, 0.05, 4001)
    assert found.value <= task.times(grid).min() * (1 + 1e-12)
    assert found.others == ()
    at_weakest, at_strongest = found.conditions
    if found.interior:
        assert at_strongest < 0.0 < at_weakest  # (11)


def test_the_conditions_are_not_necessary_where_task_time_is_not_convex() -> None:
    found = DIPS_TWICE.best()
    at_weakest, at_strongest = found.conditions
    assert found.interior and at_strongest < 0.0
    assert at_weakest == pytest.approx(-0.25, abs=1e-12)  # -10 x 0.5 x 1.05 + 5


@given(lost=st.floats(0.1, 6.0), power=st.floats(0.6, 3.0), pace=st.floats(0.0, 5.0), inference=st.floats(0.05, 2.0))
def test_slope_and_scan_agree_on_success(lost: float, power: float, pace: float, inference: float) -> None:
    """A = 2 - lost (1 - alpha)^(1 + power): nothing is lost at first, then more and more.

    A - s is concave in alpha, and success rises with it: there is one hill, and conditions (17) are necessary too.
    """

    def quality(alpha: Floats) -> Floats:
        return np.asarray(2.0 - lost * (1.0 - alpha) ** (1.0 + power))

    def quality_slope(alpha: Floats) -> Floats:
        return np.asarray(lost * (1.0 + power) * (1.0 - alpha) ** power)

    def success(alpha: Floats) -> Floats:
        return success_rate(quality(alpha), pace * alpha * inference)

    def gain(alpha: Floats) -> Floats:
        return np.asarray(success(alpha) * (1.0 - success(alpha)))

    slope = success_slope(gain, quality_slope, lambda alpha: -gain(alpha), pace, inference)
    found = best_alpha(success, slope, 0.02, "most")
    looked = scan(grid := np.linspace(1.0, 0.02, 4001), success(grid), "most")
    assert found.value >= looked.value - 1e-12
    assert found.value == pytest.approx(looked.value, abs=1e-5)
    at_weakest, at_strongest = found.conditions
    if found.interior:
        assert at_weakest < 0.0 < at_strongest  # (17)
    if pace == 0.0:
        assert found.where == 1.0  # nothing to gain from fresher observations


def test_a_slope_without_its_second_term_leads_elsewhere() -> None:
    """Who forgets N(alpha) T_inf in (10) never finds an interior optimum."""

    def chunks(alpha: Floats) -> Floats:
        return np.asarray(10.0 + 2.0 / alpha)

    def chunks_slope(alpha: Floats) -> Floats:
        return np.asarray(-2.0 / alpha**2)

    def times(alpha: Floats) -> Floats:
        return task_s(chunks(alpha), chunk_s(0.5, 0.05, 5, alpha))

    right = best_alpha(times, task_time_slope(chunks, chunks_slope, 0.5, 0.05, 5), 0.05, "least")
    # T = (10 + 2 / a)(a / 2 + 1 / 4): dT = 5 - 1 / (2 a^2) = 0.
    assert right.where == pytest.approx(np.sqrt(0.1)) and right.interior
    wrong = best_alpha(times, lambda a: np.asarray(chunks_slope(a) * chunk_s(0.5, 0.05, 5, a)), 0.05, "least")
    assert not wrong.interior


def test_of_two_valleys_of_alpha_the_deeper_is_returned_and_the_other_named() -> None:
    def well(alpha: Floats) -> Floats:
        return np.asarray(1000.0 * (alpha - 0.25) ** 2 * (alpha - 0.75) ** 2 + alpha + 1.0)

    def slope(alpha: Floats) -> Floats:
        return np.asarray(2000.0 * (alpha - 0.25) * (alpha - 0.75) * (2.0 * alpha - 1.0) + 1.0)

    found = best_alpha(well, slope, 0.05, "least")
    assert found.interior and found.where == pytest.approx(0.25, abs=0.01)
    (other,) = found.others
    assert other == pytest.approx(0.75, abs=0.01)


@given(turn=st.floats(0.1, 0.9))
def test_the_root_is_found_to_the_last_digits(turn: float) -> None:
    found = best_alpha(lambda a: np.asarray((a - turn) ** 2), lambda a: np.asarray(2 * (a - turn)), 0.05, "least")
    assume(found.interior)
    assert found.where == pytest.approx(turn, abs=1e-12)


# Settings are refinement steps, the weakest lever (most steps) first.
@pytest.mark.parametrize(
    ("steps", "values", "where", "interior"),
    [
        (published.DOM_STEPS, published.DOM_SUCCESS[1.00], 2, True),
        (published.DOM_STEPS, published.DOM_SUCCESS[1.25], 5, True),
        ((4, 16), [published.UR5E_BY_HARDWARE["RTX 4070"][s] for s in (4, 16)], 16, False),
        ((4, 16), [published.UR5E_BY_HARDWARE["AGX 30 W"][s] for s in (4, 16)], 4, False),
        ((1, 3, 5), [np.mean(published.KINETIX_ZERO_DELAY[s]) for s in (1, 3, 5)], 3, True),
        ((1, 3, 5), [np.mean(published.KINETIX_AGX_15W[s]) for s in (1, 3, 5)], 1, False),
    ],
)
def test_published_dynamic_tasks(steps: tuple[int, ...], values: list[float], where: float, interior: bool) -> None:
    found = scan(steps[::-1], list(values)[::-1], "most")
    assert (found.where, found.interior) == (where, interior)


@pytest.mark.parametrize(
    ("hardware", "where", "interior"),
    [
        # The paradox from the first step on: every lightweighting makes the task longer.
        ("RTX 4070", 10, False),
        # And U-shaped on slower hardware.
        ("AGX 50 W", 5, True),
    ],
)
def test_published_static_task(hardware: str, where: float, interior: bool) -> None:
    found = scan(published.PI05_STEPS[::-1], published.PI05_TASK_S[hardware][::-1], "least")
    assert (found.where, found.interior) == (where, interior)


def test_published_kinetix_by_task() -> None:
    """With the delay of the AGX at 15 W one step wins most tasks; without delay it wins none alone."""
    order = (5, 3, 1)
    delayed, plain = (
        [scan(order, [table[s][i] for s in order], "most").where for i in range(6)]
        for table in (published.KINETIX_AGX_15W, published.KINETIX_ZERO_DELAY)
    )
    assert dict(zip(published.KINETIX_TASKS, delayed, strict=True)) == {
        "car": 1, "catapult": 1, "catcher": 1, "grasp": 1, "lunar": 3, "cheetah": 5,
    }  # fmt: skip
    assert plain == [3.0, 3.0, 3.0, 3.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: scan([1, 2], [1.0], "least"), r"shapes \(2,\) and \(1,\)"),
        (lambda: scan([], [], "least"), "at least one"),
        (lambda: scan([1, 2, 4], [1.0, np.nan, 2.0], "most"), "not at 2"),
        (lambda: best_alpha(np.asarray, np.asarray, 1.0, "least"), "strictly between 0 and 1, got 1"),
    ],
)
def test_what_is_no_curve_is_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()


def test_a_single_setting_is_its_own_sweet_spot() -> None:
    found = scan([3], [1.5], "least")
    assert (found.where, found.value, found.interior) == (3.0, 1.5, False)
    assert np.isnan(found.conditions).all()
