"""The choice of a cut: against brute force, at the ends, and where the rule differs from the smallest total."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.systems.roboecc import (
    Accounting,
    Bandwidths,
    LastValue,
    RoboeccRule,
    SmallestTotal,
    StageCosts,
    StaticCut,
    adjusted_cut,
    best_cut,
    total_s,
    within,
)


def random_costs(rng: np.random.Generator) -> StageCosts:
    """A chain of 2 to 9 stages with small whole numbers, so that there are ties."""
    count = int(rng.integers(2, 10))
    server, device, load = (rng.integers(0, 4, count).astype(float) for _ in range(3))
    crossing = np.concatenate([[0.0], rng.integers(1, 4, count)])
    return StageCosts(server, device, crossing, float(rng.integers(0, 4)), load)


def brute_total(costs: StageCosts, bandwidth: float, latency: float, accounting: str) -> list[float]:
    """T(k), term by term."""
    found: list[float] = []
    for cut in range(costs.stages + 1):
        spent = float(sum(costs.server_s[:cut]) + sum(costs.device_s[cut:]))
        if accounting == "printed" and 0 < cut < costs.stages:
            spent += latency + costs.cut_bytes[cut] / bandwidth
        if accounting == "faithful" and cut > 0:
            spent += latency + (costs.observation_bytes + costs.cut_bytes[cut]) / bandwidth
        found.append(spent)
    return found


@pytest.mark.parametrize("accounting", ["faithful", "printed"])
def test_the_planner_equals_brute_force_on_random_chains(accounting: Accounting) -> None:
    rng = np.random.default_rng(1)
    tied = 0
    for _ in range(500):
        costs, bandwidth, latency = random_costs(rng), 2.0 ** rng.integers(-2, 3), float(rng.integers(0, 3))
        total = total_s(costs, bandwidth, latency, accounting)
        wanted = brute_total(costs, bandwidth, latency, accounting)
        np.testing.assert_array_equal(total, wanted)
        assert costs.load is not None
        load = np.concatenate([[0.0], np.cumsum(costs.load)])
        budget = float(rng.choice(load))
        order = sorted((wanted[cut], load[cut], cut) for cut in range(costs.stages + 1) if load[cut] <= budget)
        assert best_cut(total, costs.loads, range(costs.stages + 1), budget) == order[0][2]
        tied += len(order) > 1 and order[0][0] == order[1][0]
    assert tied > 20  # ties were among them


def test_a_larger_budget_never_makes_the_total_larger() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        costs = random_costs(rng)
        total = total_s(costs, 1.0, 0.5)
        found = [total[best_cut(total, costs.loads, range(costs.stages + 1), budget)] for budget in sorted(costs.loads)]
        assert all(later <= earlier for earlier, later in itertools.pairwise(found))


def test_without_a_link_to_pay_the_stages_alone_decide_and_with_a_dead_one_nothing_is_sent() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        costs = random_costs(rng)
        everything = range(costs.stages + 1)
        compute = [costs.server_s[:cut].sum() + costs.device_s[cut:].sum() for cut in everything]
        np.testing.assert_array_equal(total_s(costs, np.inf), compute)
        assert best_cut(total_s(costs, 1e-9), costs.loads, everything) == 0
        # As printed both ends cost no link, and so the server is asked over a dead one.
        printed = best_cut(total_s(costs, 1e-9, accounting="printed"), costs.loads, everything)
        assert printed in (0, costs.stages)


def test_the_printed_equation_sends_everything_over_a_link_that_makes_it_slower() -> None:
    costs = StageCosts(np.array([1.0, 1.0]), np.array([3.0, 3.0]), np.array([0.0, 1.0, 1.0]), 10.0)
    assert best_cut(total_s(costs, 1.0, accounting="printed"), costs.loads, range(3)) == 2
    assert best_cut(total_s(costs, 1.0), costs.loads, range(3)) == 0


def test_the_published_rule_takes_the_largest_activation_as_the_bandwidth_rises_and_the_smallest_as_it_falls() -> None:
    sizes = np.array([0.0, 8.0, 2.0, 8.0, 2.0, 1.0])
    pool = [1, 2, 3, 4]
    assert adjusted_cut(2, 1.5, -1.0, 1.0, pool, sizes) == 1  # of 1 and 3, as near, the earlier
    assert adjusted_cut(4, 1.5, -1.0, 1.0, pool, sizes) == 3
    assert adjusted_cut(1, -1.5, -1.0, 1.0, pool, sizes) == 2
    assert adjusted_cut(3, -1.5, -1.0, 1.0, pool, sizes) == 2
    assert adjusted_cut(4, -1.5, -1.0, 1.0, pool, sizes) == 4
    for change in (-1.0, 0.0, 1.0):
        assert adjusted_cut(3, change, -1.0, 1.0, pool, sizes) == 3


class Told:
    """A forecast that says what it was told to."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s

    def forecast(self, past: object) -> float:
        return self.bytes_s


def seen(*values: float) -> Bandwidths:
    found = Bandwidths()
    for value in values:
        found.add(value, 1.0)
    return found


def test_the_published_rule_ignores_the_total_and_the_smallest_total_does_not() -> None:
    # The largest activation is at the first cut, before the work that the device does slowly.
    costs = StageCosts(np.array([0.1, 0.1, 0.1]), np.array([0.1, 5.0, 0.1]), np.array([0.0, 9.0, 1.0, 1.0]), 1.0)
    rule, past = RoboeccRule(costs, [1, 2], Told(100.0)), seen(5.0, 6.0, 5.0, 6.0)
    first = rule.choose(0, past)
    assert first == 2  # the planner's
    risen = rule.choose(first, past)
    total = total_s(costs, 100.0)
    assert risen == 1 and total[1] > 10 * total[2]
    assert SmallestTotal(costs, [1, 2], Told(100.0)).choose(1, past) == 2
    # The rule itself: no change, no switch.
    calm = RoboeccRule(costs, [1, 2], LastValue())
    assert [calm.choose(2, past) for _ in range(3)] == [2, 2, 2]


def test_the_smallest_total_asks_first_and_looks_again_at_cut_0() -> None:
    costs = StageCosts(np.array([0.1, 0.1]), np.array([1.0, 1.0]), np.array([0.0, 1.0, 1.0]), 1.0)
    chooser = SmallestTotal(costs, range(3), LastValue(), look_every=3)
    assert chooser.choose(0, seen()) == 2
    slow = seen(1e-3)
    assert [chooser.choose(0, slow) for _ in range(8)] == [0, 0, 0, 2, 0, 0, 0, 2]
    assert chooser.choose(0, seen(1e3)) == 2
    assert SmallestTotal(costs, range(3), LastValue(), look_every=0).choose(0, slow) == 0
    assert SmallestTotal(costs, range(3), LastValue(), budget=0.5).choose(0, seen(1e3)) == 1
    assert SmallestTotal(costs, [0], LastValue()).choose(0, seen()) == 0
    assert StaticCut(1).choose(2, slow) == 1


def test_a_link_that_takes_as_long_for_any_size_is_not_worth_the_device_s_own_stages() -> None:
    costs = StageCosts(np.array([0.1, 0.1]), np.array([2.0, 0.2]), np.array([0.0, 1.0, 9.0]), 10.0)
    past = Bandwidths()
    for _ in range(3):
        past.add(19.0, 1.0)
    # As published 8 bytes less would save 0.42 s. They save nothing.
    assert SmallestTotal(costs, range(3), LastValue()).choose(2, past) == 1
    assert SmallestTotal(costs, range(3), LastValue(), latency_apart=True).choose(2, past) == 2
    past.add(19.0, 3.0)
    bytes_s, latency_s = past.split_latency(19.0 / 3.0)
    assert latency_s == 1.0 and bytes_s == pytest.approx(9.5)  # two more seconds for 19 bytes
    assert past.split_latency(100.0)[1] == 0.19


def test_refusals_say_what_is_allowed() -> None:
    costs = StageCosts(np.ones(2), np.ones(2), np.ones(3), 1.0, load=np.array([0.5, 0.5]))
    with pytest.raises(ConfigError, match="server_s of 2 stages must be 2 finite numbers"):
        StageCosts(np.array([1.0, -1.0]), np.ones(2), np.ones(3), 1.0)
    with pytest.raises(ConfigError, match="cut_bytes of 2 stages must be 3"):
        StageCosts(np.ones(2), np.ones(2), np.ones(2), 1.0)
    with pytest.raises(ConfigError, match="observation_bytes"):
        StageCosts(np.ones(2), np.ones(2), np.ones(3), np.nan)
    with pytest.raises(ConfigError, match="bandwidth above 0"):
        total_s(costs, 0.0)
    with pytest.raises(ConfigError, match="cuts lie between 0 and 2, got"):
        within([3], costs.loads, 1.0)
    with pytest.raises(ConfigError, match=r"no cut of .* is within the server's load of 0[.]4; the least is 0[.]5"):
        within([1, 2], costs.loads, 0.4)
    with pytest.raises(ConfigError, match="look_every"):
        SmallestTotal(costs, [0], LastValue(), look_every=-1)
    with pytest.raises(ConfigError, match="at least one cut"):
        adjusted_cut(0, 1.0, 0.0, 0.0, [], costs.cut_bytes)
