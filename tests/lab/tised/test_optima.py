"""The conditions and the plain scan must lead to the same place, and the published tables to the published places."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.tised import published

from specact.errors import ConfigError
from specact.lab.tised.optima import fastest_overlap, scan, task_time_steps
from specact.lab.tised.timing import chunk_s, task_s

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
        (lambda: scan([1, 2], [1.0], "least"), "one finite value for each"),
        (lambda: scan([], [], "least"), "one finite value for each"),
        (lambda: scan([1, 2, 4], [1.0, np.nan, 2.0], "most"), "one finite value for each"),
    ],
)
def test_what_is_no_curve_is_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()


def test_a_single_setting_is_its_own_sweet_spot() -> None:
    found = scan([3], [1.5], "least")
    assert (found.where, found.value, found.interior) == (3.0, 1.5, False)
    assert np.isnan(found.conditions).all()
