"""Losses, outages, and a hop in front."""

import math

import numpy as np
import pytest
from scipy import stats

from specact.errors import ConfigError
from specact.links.faults import LossyLink, OutageLink
from specact.links.model import AddedDelay, SteadyLink

NOTHING = SteadyLink(0.0, 0.0, math.inf, math.inf)
SECOND = SteadyLink(2.0e3, 0.0, math.inf, math.inf)  # one second each way
SLOW = SteadyLink(0.0, 0.0, 8.0, 8.0)  # 1 MB/s


def losses(link: LossyLink, payload_bytes: int, n: int) -> np.ndarray:
    """How often the unluckiest segment of each of ``n`` messages was lost, from the delay 0.2 (2^k - 1)."""
    rng = np.random.default_rng(6)
    delays = np.array([link.delay(payload_bytes, True, 0.0, rng) for _ in range(n)])
    counts: np.ndarray = np.log2(np.minimum(delays, 51.0) / 0.2 + 1.0)  # 8 losses; from 9 on the minute's limit counts
    np.testing.assert_allclose(counts, counts.round(), atol=1e-9)
    return counts.round().astype(int)


@pytest.mark.parametrize(("payload_bytes", "segments"), [(0, 1), (1448, 1), (1449, 2), (4 * 1448, 4)])
def test_each_segment_and_each_retransmission_is_lost_alike(payload_bytes: int, segments: int) -> None:
    # P(unluckiest lost at most k times) = (1 - p^(k + 1))^s. Error rate 1e-6 over the four cuts.
    p, n = 0.3, 20_000
    counts = losses(LossyLink(NOTHING, p), payload_bytes, n)
    for k in range(4):
        wanted, found = (1.0 - p ** (k + 1)) ** segments, int((counts <= k).sum())
        assert stats.binomtest(found, n, wanted).pvalue > 1e-6 / 4
        # A wrong variant fails: one draw for the whole message, whatever its size.
        if segments == 4:
            assert stats.binomtest(found, n, 1.0 - p ** (k + 1)).pvalue < 1e-6


def test_timeouts_double_up_to_a_minute() -> None:
    class Fixed(np.random.Generator):
        def __init__(self, count: int) -> None:
            super().__init__(np.random.Philox(0))
            self.count = count

        def geometric(self, p: object, size: object = None) -> np.ndarray:  # type: ignore[override]
            return np.array([self.count + 1])

    for rto in (200.0, 1000.0, 60_000.0, 7.0):
        for count in range(25):
            waits = [min(rto * 2.0**i, 60_000.0) for i in range(count)]
            delay = LossyLink(NOTHING, 0.5, rto).delay(1, True, 0.0, Fixed(count))
            assert delay == pytest.approx(sum(waits) / 1e3, rel=1e-12)


def test_without_losses_a_lossy_link_is_the_link_itself() -> None:
    link = SteadyLink(10.0, 1.0, 5.0, 5.0)
    plain, lossy = np.random.default_rng(7), np.random.default_rng(7)
    assert LossyLink(link, 0.0).delay(5000, True, 0.0, lossy) == link.delay(5000, True, 0.0, plain)
    assert LossyLink(link, 0.5).busy(5000, True, 0.0) == link.busy(5000, True, 0.0)


@pytest.mark.parametrize("bad", [{"loss": 1.0}, {"loss": -0.1}, {"loss": math.nan}, {"rto_ms": 0.0}, {"rto_ms": 6.1e4}])
def test_a_lossy_link_refuses_what_cannot_be(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must lie in"):
        LossyLink(NOTHING, **{"loss": 0.1} | bad)


@pytest.mark.parametrize(
    ("at", "arrives"),
    [
        (0.0, 1.0),  # through before anything happens
        (4.0, 5.0),  # arrives as the outage begins
        (4.25, 8.25),  # three quarters of the way when everything stops
        (5.0, 9.0),  # handed over as it begins; arrives as the next one does
        (6.5, 9.0),  # handed over inside
        (8.0, 9.0),  # handed over as it ends
        (8.5, 11.0),  # half before 9, half after 10.5
        (9.0, 11.5),
        (10.2, 11.5),
        (20.0, 21.0),
    ],
)
def test_in_an_outage_nothing_moves_and_everything_waits(at: float, arrives: float) -> None:
    # 5 to 8; then two that overlap, 9 to 10 and 9.5 to 10.5.
    link = OutageLink(SECOND, ((9.5, 1.0), (5.0, 3.0), (9.0, 1.0)))
    assert at + link.delay(100, True, at, np.random.default_rng(0)) == pytest.approx(arrives, abs=1e-12)


def test_an_outage_keeps_the_link_busy() -> None:
    link = OutageLink(SLOW, ((1.0, 2.0),))
    assert link.busy(500_000, True, 0.75) == pytest.approx(2.5)
    assert link.busy(500_000, True, 1.5) == pytest.approx(2.0)


def test_behind_an_outage_the_link_is_asked_for_the_time_after_it() -> None:
    inner = OutageLink(NOTHING, ((3.0, 1.0),))
    assert OutageLink(inner, ((1.0, 2.0),)).delay(0, True, 1.5, np.random.default_rng(0)) == pytest.approx(2.5)


@pytest.mark.parametrize("bad", [(-1.0, 1.0), (0.0, 0.0), (math.nan, 1.0), (0.0, math.inf)])
def test_an_outage_refuses_what_cannot_be(bad: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"start >= 0 s and a duration > 0 s"):
        OutageLink(NOTHING, (bad,))


def test_a_hop_stores_and_forwards() -> None:
    rng = np.random.default_rng(0)
    link = AddedDelay(SLOW, delay_ms=20.0, rate_mbit_s=2.0)  # 250 kB/s in front of 1 MB/s
    assert link.delay(50_000, True, 0.0, rng) == pytest.approx(0.2 + 0.01 + 0.05)
    assert link.busy(50_000, True, 0.0) == pytest.approx(0.2)
    assert AddedDelay(SLOW, rate_mbit_s=80.0).busy(50_000, True, 0.0) == pytest.approx(0.05)
    behind = AddedDelay(OutageLink(NOTHING, ((0.1, 1.0),)), rate_mbit_s=2.0)
    assert behind.delay(50_000, True, 0.0, rng) == pytest.approx(1.1)  # 0.2 s in the hop, then 0.9 s of the outage


@pytest.mark.parametrize("bad", [{"delay_ms": -1.0}, {"delay_ms": math.inf}, {"rate_mbit_s": 0.0}])
def test_a_hop_refuses_what_cannot_be(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="link must be"):
        AddedDelay(NOTHING, **bad)
