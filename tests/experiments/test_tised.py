"""The analysis of a sweep, on episodes whose truth is known."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from experiments.tised import analyse as analyse_parts
from experiments.tised.findings import Finding, compare_methods, plausible
from tests.experiments.sweeps import (
    ACTION_S,
    BASELINES,
    EXECUTE,
    HARDWARE,
    MORE_CHUNKS,
    episodes,
    inference_s,
    join,
    overlap_sweep,
    shuffled,
    steps_sweep,
)

from specact.errors import DataError
from specact.lab.rollout.statistics import holm
from specact.lab.rollout.steps import Table
from specact.lab.tised.analysis import contrasts_of, neighbours_of, sort_curves
from specact.lab.tised.drivers import ON_BOARD


def analyse(table: Table, baselines: dict[str, float]) -> Any:
    return SimpleNamespace(**analyse_parts(table, baselines))


@pytest.fixture(scope="module")
def sweep() -> Table:
    return shuffled(join([steps_sweep(), overlap_sweep()]))


@pytest.fixture(scope="module")
def analysis(sweep: Table) -> Any:
    return analyse(sweep, BASELINES)


def finding(analysis: Any, number: int, about: str) -> Finding:
    result: Finding
    (result,) = [row for row in analysis.findings if row.number == number and row.about == about]
    return result


def four(success: list[bool], task_s: list[float], chunks: list[int], strength: float) -> Table:
    """Episodes written by hand, with a limit of 10 s."""
    table = episodes("steps", strength, pace=0.0, hardware="h", kappa=1.0, chunks=5, odds=0, each_s=0.1, count=4)
    table |= {"success": np.array(success), "task_s": np.array(task_s), "chunks": np.array(chunks)}
    return table | {"limit_s": np.full(4, 10.0), "stall_s": np.full(4, 1.0)}


def test_a_cell_by_hand() -> None:
    table = four([True, False, True, False], [4.0, 10.0, 6.0, 9.0], [4, 9, 6, 9], 10.0)
    (cell,) = sort_curves(table, BASELINES)[0].cells
    assert (cell.n, cell.successes, cell.success.mean) == (4, 2, 0.5)
    assert (cell.chunks, cell.task_s, cell.chunk_s) == (5.0, 5.0, 1.0)  # over the two successes
    assert cell.restricted_s.mean == 7.5  # the failure that ended early counts with the limit too
    assert cell.stall_s == pytest.approx(4.0 / 28.0)
    assert np.isnan(cell.sent)
    (none,) = sort_curves(table | {"success": np.zeros(4, dtype=bool)}, BASELINES)[0].cells
    assert none.successes == 0 and np.isnan(none.task_s) and none.restricted_s.mean == 10.0


def test_a_contrast_by_hand() -> None:
    base = four([True, True, True, False], [4.0, 6.0, 8.0, 10.0], [4, 6, 8, 9], 10.0)
    fast = four([True, True, False, False], [5.0, 7.0, 10.0, 10.0], [10, 14, 20, 20], 1.0)
    curve = sort_curves(shuffled(join([base, fast])), BASELINES)[0]
    assert [cell.strength for cell in curve.cells] == [10.0, 1.0]
    (row,) = contrasts_of([curve])
    assert row.success.difference.mean == -0.25
    assert row.restricted_s.difference.mean == pytest.approx((5 + 7 + 10 + 10 - 4 - 6 - 8 - 10) / 4)
    assert row.both == 2 and row.both_s is not None and row.both_s.difference.mean == 1.0
    assert row.speedup is not None
    assert row.speedup.chunk_speedup == pytest.approx(2.0) and row.speedup.chunks_ratio == pytest.approx(0.5)
    assert "the task is as fast" in row.explain()
    lost = four([False] * 4, [10.0] * 4, [20] * 4, 1.0)
    curve = sort_curves(join([base, lost]), BASELINES)[0]
    (row,) = contrasts_of([curve])
    assert row.speedup is None and row.both_s is None and row.both_p == 1.0
    assert "one of the two never succeeds" in row.explain()


def test_success_only_means_favour_a_setting_that_fails_where_tasks_are_long() -> None:
    """One setting is slower by 1 s in every episode that both finish, and fails in the long half."""
    long = np.arange(100) % 2 == 0
    base = {"success": np.ones(100, bool), "task_s": np.where(long, 20.0, 10.0) + np.linspace(0, 1, 100)}
    slower = {"success": ~long, "task_s": np.where(long, 60.0, base["task_s"] + 1.0)}
    tables = [
        episodes("steps", s, pace=0.0, hardware="h", kappa=1.0, chunks=9, odds=0, each_s=0.1, count=100) | outcomes
        for s, outcomes in ((10.0, base), (5.0, slower), (2.0, base))
    ]
    curves = sort_curves(shuffled(join(tables)), BASELINES)
    worse, same = contrasts_of(curves)
    assert worse.own_s is not None and worse.both_s is not None and worse.jerk is not None
    assert worse.own_s.difference.mean == pytest.approx(-4.0, abs=0.1) and worse.own_s.p < 0.001
    assert worse.own_s.difference.low < -4.0 < worse.own_s.difference.high < 0.0
    assert worse.both_s.difference.mean == 1.0 and worse.restricted_s.difference.mean == pytest.approx(20.5, abs=0.3)
    assert same.own_s is not None and same.own_s.difference.mean == 0.0 and same.own_s.p == 1.0
    # What dips rises again: the third against the second.
    (rise,) = neighbours_of(curves)
    assert (rise.strength, rise.baseline) == (2.0, 5.0) and rise.own_s is not None
    assert rise.own_s.difference.mean == -worse.own_s.difference.mean


def test_the_first_finding_where_it_was_planted(analysis: Any) -> None:
    """Twice as many chunks at one step, and a chunk that is hardly faster on fast hardware."""
    for name, kappa in HARDWARE.items():
        speedup = (EXECUTE * ACTION_S + kappa * inference_s(10)) / (EXECUTE * ACTION_S + kappa * inference_s(1))
        assert finding(analysis, 1, f"steps on ball at pace 0, idle hold, {name}").seen == (speedup < 2.0)
    # Overlap costs one chunk in a hundred, and pays off.
    assert not finding(analysis, 1, "overlap on ball at pace 0, idle hold, agx-50w").seen


def test_the_second_finding_where_it_was_planted(analysis: Any) -> None:
    """One step loses 2.5 of log odds: it fails where least is stale, and wins where the baseline is 1.1 s late."""
    assert not finding(analysis, 2, "steps on chase at pace 0.2, idle hold, this-machine").seen
    assert finding(analysis, 2, "steps on chase at pace 0.4, idle hold, agx-15w").seen
    assert finding(analysis, 2, "steps on chase, idle hold, over the pace, agx-30w").seen


@pytest.mark.parametrize(("cheap_odds", "seen"), [(-1.0, True), (1.0, False), (1.9, False)])
def test_the_second_finding_needs_a_setting_that_is_worse_where_least_is_stale(cheap_odds: float, seen: bool) -> None:
    """Against log odds of 1 at the baseline: worse, as good, or better at both ends, and always better at the far one.

    What is better where nothing is stale, too, is the better policy, and says nothing of staleness.
    """
    table = join(
        [
            episodes("steps", strength, pace=0.2, hardware=name, kappa=kappa, chunks=30, odds=odds, each_s=each_s)
            for name, kappa, late_s in (("fast", 1.0, 0.01), ("slow", 100.0, 2.5))
            for strength, odds, each_s in ((10, 1.0, late_s), (1, cheap_odds, 0.1 * late_s))
        ]
    )
    analysis = analyse(table, BASELINES)
    (row,) = [row for row in analysis.contrasts if row.place.hardware == "slow"]
    assert row.success.difference.mean > 0.0 and row.success_p < 0.001
    assert finding(analysis, 2, "steps on chase at pace 0.2, idle hold, slow").seen == seen


def test_at_pace_0_a_task_is_static_only_where_its_world_stands_still() -> None:
    """The same episodes, of one world that stands still while the robot waits and of another that does not."""
    table = join(
        [
            episodes(
                "steps", s, pace=0.0, hardware="h", kappa=1.0, chunks=30 * MORE_CHUNKS[s], odds=9,
                each_s=inference_s(s), idle=idle, static=static,
            )
            for idle, static in (("hold", True), ("last", False))
            for s in (10, 1)
        ]
    )  # fmt: skip
    analysis = analyse(table, BASELINES)
    assert {(row.number, row.about) for row in analysis.findings} == {
        (1, "steps on ball at pace 0, idle hold, h"),
        (2, "steps on ball at pace 0, idle last, h"),
    }
    assert [row.place.idle for row in analysis.contrasts] == ["hold", "last"]


def test_one_correction_holds_for_every_contrast_of_a_sweep(analysis: Any) -> None:
    for corrected, raw in (("success_p", "success"), ("restricted_p", "restricted_s"), ("both_p", "both_s")):
        contrasts = [getattr(row, raw) for row in analysis.contrasts]
        p = holm([contrast.p if contrast else 1.0 for contrast in contrasts])
        assert [getattr(row, corrected) for row in analysis.contrasts] == p
    assert len(analysis.contrasts) == 3 * 4 * 3 + 4 * 5


def ran(lever: str, strength: float, odds: float, *links: str) -> list[Table]:
    return [
        episodes(lever, strength, pace=0.1, hardware="h", kappa=1.0, chunks=9, odds=odds, each_s=0.0, link=link)
        for link in links
    ]


def test_methods_of_the_frontier_are_compared_pair_by_pair_over_each_link() -> None:
    """Late is better than the asynchronous target over both links, and the draft as good as hybrid."""
    links = ("loopback+delay=1", "loopback+delay=50")
    settings = (
        ("late", 0.6, 3.0), ("remote_async", 2.0, 0.0), ("chance", 1.0, 3.0), ("verification", 0.0, 1.0),
        ("verification", 1.0, 1.0),
    )  # fmt: skip
    pairs = compare_methods(shuffled(join([table for setting in settings for table in ran(*setting, *links)])))
    # Four methods make six pairs; a strength of "chance" that is not the frontier's is none of them.
    assert len(pairs) == 6 * 2 and {row["link"] for row in pairs} == set(links)
    assert {row["success"]["test"] for row in pairs} == {"exact McNemar"} and {row["episodes"] for row in pairs} == {
        200
    }
    for link in links:
        at = {(row["first"], row["second"]): row for row in pairs if row["link"] == link}
        assert at["late adahi", "async target"]["success"]["p"] < 0.0001
        assert at["late adahi", "async target"]["success"]["difference"]["mean"] > 0.3
        assert at["hybrid", "draft"]["success"]["p"] == 1.0
    assert compare_methods(steps_sweep(paces=(0.2,), count=3)) == []
    # What needs no link is compared over every link.
    table = join([*ran("alone", 0.0, 3.0, ON_BOARD), *ran("verification", 1.0, 0.0, *links)])
    rows = [(row["first"], row["second"], row["link"]) for row in compare_methods(shuffled(table))]
    assert rows == [("hybrid", "target on device", link) for link in links]


def test_the_third_finding_where_it_was_planted(analysis: Any) -> None:
    """Overlap on four machines: N = 30 (1 + .01 m) and rho = .7, 7, 11, 22, with a chunk of 8 actions."""
    curves = {curve.place.hardware: plausible(curve) for curve in sort_curves(overlap_sweep(), BASELINES)}
    best = {"this-machine": 1.0, "agx-50w": 7.0, "agx-30w": 8.0, "agx-15w": 8.0}
    assert all(strength in curves[name] for name, strength in best.items())
    assert finding(analysis, 3, "overlap on ball at pace 0, idle hold, over hardware").seen
    assert finding(analysis, 3, "steps on chase at pace 0.4, idle hold, over hardware").seen


def test_nothing_is_found_where_nothing_was_planted() -> None:
    """Four settings that are all the same: no finding but by chance, 1 in 20 for each of the six curves."""
    table = join(
        [
            episodes("steps", s, pace=pace, hardware=name, kappa=kappa, chunks=30, odds=1.0, each_s=0.1, seed=s)
            for pace in (0.0, 0.2)
            for name, kappa in (("a", 1.0), ("b", 2.0), ("c", 3.0))
            for s in (10, 5, 2, 1)
        ]
    )
    analysis = analyse(table, BASELINES)
    assert [row.about for row in analysis.findings if row.seen] == []


def test_an_episode_that_occurs_twice_is_refused() -> None:
    sweep = steps_sweep(paces=(0.0,), count=3)
    with pytest.raises(DataError, match="episode 0 occurs twice at strength 10"):
        analyse(join([sweep, sweep]), BASELINES)
