"""How many robots a server holds: exact where it can be computed by hand, with the error of sampling where not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from specact.server.capacity import Demand, ServiceTime, capacity, latencies, missed

FAST, SLOW = Demand(50.0, 0.02), Demand(5.0, 0.2)
SERVICE = ServiceTime(1e-3, 0.5e-3)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def robots(count: int, demand: Demand = FAST) -> list[Demand]:
    return [demand] * count


MEASURED: list[tuple[dict[float, list[float]], tuple[float, float]]] = [
    # Hiccups do not change it.
    ({size: [SERVICE.seconds(size)] * 5 + [1.0, 2.0] for size in (1, 2, 4, 8, 16)}, (1e-3, 0.5e-3)),
    ({2.0: [0.4]}, (0.0, 0.2)),  # nothing is known of batching
    ({1: [1.0], 2: [1.0]}, (1.0, 0.0)),
    ({1: [2.0], 2: [1.0]}, (1.2, 0.0)),  # none is negative: the least relative squares of one part alone
    ({1: [1.0], 2: [4.0]}, (0.0, 1.2)),
]


@pytest.mark.parametrize(("measured", "parts"), MEASURED)
def test_a_fit_finds_both_parts_again(measured: dict[float, list[float]], parts: tuple[float, float]) -> None:
    service = ServiceTime.fit(measured)
    assert (service.base_s, service.per_request_s) == pytest.approx(parts, abs=1e-9)


@pytest.mark.parametrize("busy", [0.1, 0.5, 0.89])
def test_a_robot_alone_waits_for_its_own_inference_and_for_nothing_else(busy: float) -> None:
    # Its shortest interval is .9 of the period, so that the target is always free.
    service = ServiceTime(busy / 2 / FAST.rate_hz, busy / 2 / FAST.rate_hz)
    took, robot_numbers = latencies(robots(1), service, 16, rng(), 500)
    np.testing.assert_allclose(took, service.seconds(1))
    assert set(robot_numbers) == {0}
    assert missed(robots(1), service, 16, rng()) == 0.0
    late = Demand(FAST.rate_hz, 0.99 * service.seconds(1))
    assert missed([late], service, 16, rng()) == 1.0
    assert capacity(late, service, 16, 0) == 0


@pytest.mark.parametrize("max_batch", [1, 4, 16])
def test_the_bound_is_what_full_batches_answer(max_batch: int) -> None:
    most = SERVICE.most_hz(max_batch) / SLOW.rate_hz
    held = capacity(SLOW, SERVICE, max_batch, 0)
    assert 0.95 * most <= held <= most
    assert missed(robots(int(1.1 * most), SLOW), SERVICE, max_batch, rng()) > 0.09


def test_a_tight_deadline_binds_before_throughput() -> None:
    # No batch of more than 4 is done in time, and a request that comes during one waits for it.
    tight = Demand(20.0, SERVICE.seconds(4))
    held = capacity(tight, SERVICE, 16, 0)
    assert 0 < held < 0.5 * SERVICE.most_hz(16) / tight.rate_hz
    # Searches differ by their random phases.
    assert [capacity(tight, SERVICE, 16, seed) for seed in range(1, 4)] == pytest.approx([held] * 3, rel=0.2)


def test_a_short_deadline_goes_first_as_it_does_at_the_server() -> None:
    # A target without batching that is busy 94 % of the time.
    service, slow = ServiceTime(0.0, 4e-3), robots(37, SLOW)
    # With equal deadlines the first that came goes first.
    took, robot = latencies([Demand(FAST.rate_hz, SLOW.deadline_s), *slow], service, 1, rng(), 20_000)
    assert (took[robot == 0] > FAST.deadline_s).mean() > 0.1
    assert missed([FAST, *slow], service, 1, rng(), 20_000) < 0.01


def test_a_greedy_robot_has_its_share_as_it_has_at_the_server() -> None:
    # Alone with the shortest deadline it would have every inference, and the others none.
    took, robot = latencies([Demand(2000.0, 0.01), *robots(10, SLOW)], ServiceTime(0.0, 4e-3), 1, rng(), 5000)
    assert (took[robot > 0] > SLOW.deadline_s).mean() < 0.01 and (took[robot == 0] > 0.01).mean() > 0.5


def test_more_robots_miss_no_less() -> None:
    most = int(SERVICE.most_hz(16) / FAST.rate_hz)
    shares = [missed(robots(count), SERVICE, 16, rng()) for count in range(1, 2 * most)]
    # 2000 requests: a share has a standard error of at most .012.
    assert all(before <= after + 0.05 for before, after in pairwise(shares))
    assert shares[0] == 0.0 and shares[-1] > 0.5


@pytest.mark.parametrize(
    "demands", [[FAST], [Demand(1e6, 0.1), *robots(1000, SLOW)], robots(1000), [FAST, *robots(50, SLOW)]]
)
def test_the_work_is_bounded(demands: list[Demand]) -> None:
    took, _ = latencies(demands, SERVICE, 16, rng(), 2000)
    assert len(took) <= 2200
    assert 0.0 <= missed(demands, SERVICE, 16, rng()) <= 1.0
