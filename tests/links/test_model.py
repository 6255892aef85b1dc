"""What every link has to keep, and each model by itself."""

import math

import numpy as np
import pytest
from scipy import stats

from specact.errors import ConfigError
from specact.links.link import LINKS
from specact.links.model import AddedDelay, Link, LossyLink, MahimahiLink, OutageLink, SteadyLink, TraceLink, round_trip

WIFI, FAST = LINKS["wifi-paper"], 1e15
NOTHING = SteadyLink(0.0, 0.0, FAST, FAST)
SECOND = SteadyLink(2.0e3, 0.0, FAST, FAST)  # one second each way
SLOW = SteadyLink(0.0, 0.0, 8.0, 8.0)  # 1 MB/s
EVERY: dict[str, Link] = {
    **LINKS,
    "shaky": SteadyLink(1.0, 10.0, 1.0, 1.0),
    "rtt": TraceLink(np.array([3.0, 7000.0, 0.5])),
    "mahimahi": MahimahiLink(np.array([0, 0, 5]), np.array([2])),
    "lossy": LossyLink(WIFI, 0.9),
    "outage": OutageLink(WIFI, ((0.5, 1.0), (0.7, 2.0))),
    "hop": AddedDelay(WIFI, 20.0, 2.0),
    "all": OutageLink(LossyLink(AddedDelay(TraceLink(np.array([3.0, 4.0])), 1.0, 1.0), 0.5), ((0.0, 1.0),)),
}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("name", EVERY)
def test_delays_are_finite_and_never_negative_and_the_same_stream_gives_the_same(name: str) -> None:
    link, moments = EVERY[name], rng(1).uniform(0.0, 20.0, 300)
    for up in (True, False):
        for at in (0.0, *moments):
            size = int(1e4 * at) % 3001
            delay = link.delay(size, up, at, rng(2))
            assert 0.0 <= delay < math.inf and isinstance(delay, float)
            assert link.delay(size, up, at, rng(2)) == delay
            assert 0.0 <= link.busy(size, up, at) <= delay + 2e-9


def test_the_reply_starts_down_when_the_request_arrived() -> None:
    link = OutageLink(SECOND, ((6.5, 1.0),))
    assert round_trip(link, 10, 20, 5.0, rng()) == pytest.approx(3.0)


def test_without_jitter_a_steady_link_is_arithmetic() -> None:
    link = SteadyLink(10.0, 0.0, 8.0, 16.0)
    assert link.delay(1000, True, 3.0, rng()) == pytest.approx(5e-3 + 1e-3, abs=1e-15)
    assert link.delay(1000, False, 3.0, rng()) == pytest.approx(5e-3 + 0.5e-3, abs=1e-15)
    assert link.busy(1000, True, 3.0) == pytest.approx(1e-3, abs=1e-15)


def moments_fit(round_trips: np.ndarray, rtt: float, jitter: float) -> bool:
    """Whether mean and deviation are the wanted ones: normal samples, error rate 1e-6 for both together."""
    z, n = stats.norm.isf(1e-6 / 4), len(round_trips)
    mean = abs(round_trips.mean() - rtt) < z * jitter / math.sqrt(n)
    return bool(mean and abs(round_trips.std() - jitter) < z * jitter / math.sqrt(2 * n))


def test_mean_and_deviation_of_the_round_trip_are_those_of_the_paper() -> None:
    draws, n = rng(3), 20_000
    assert moments_fit(np.array([1e3 * round_trip(WIFI, 0, 0, 0.0, draws) for _ in range(n)]), 12.054, 0.302)
    # Wrong variants fail: the whole jitter in each direction, and its half.
    for share in (1.0, 0.5):
        ways = draws.normal(12.054 / 2, share * 0.302, size=(n, 2))
        assert not moments_fit(ways.sum(axis=1), 12.054, 0.302)


def test_a_hop_stores_and_forwards() -> None:
    link = AddedDelay(SLOW, delay_ms=20.0, rate_mbit_s=2.0)  # 250 kB/s in front of 1 MB/s
    assert link.delay(50_000, True, 0.0, rng()) == pytest.approx(0.2 + 0.01 + 0.05)
    assert link.busy(50_000, True, 0.0) == pytest.approx(0.2)
    assert AddedDelay(SLOW, rate_mbit_s=80.0).busy(50_000, True, 0.0) == pytest.approx(0.05)
    behind = AddedDelay(OutageLink(NOTHING, ((0.1, 1.0),)), rate_mbit_s=2.0)
    assert behind.delay(50_000, True, 0.0, rng()) == pytest.approx(1.1)  # 0.2 s in the hop, then 0.9 s of the outage


@pytest.mark.parametrize(("payload_bytes", "segments"), [(0, 1), (1448, 1), (1449, 2), (4 * 1448, 4)])
def test_each_segment_and_each_retransmission_is_lost_alike(payload_bytes: int, segments: int) -> None:
    p, n, draws = 0.3, 20_000, rng(6)
    # How often the unluckiest segment was lost, from the delay 0.2 (2^k - 1); from 9 on the minute's limit counts.
    delays = np.array([LossyLink(NOTHING, p).delay(payload_bytes, True, 0.0, draws) for _ in range(n)])
    counts = np.log2(np.minimum(delays, 51.0) / 0.2 + 1.0)
    np.testing.assert_allclose(counts, counts.round(), atol=1e-9)
    # P(unluckiest lost at most k times) = (1 - p^(k + 1))^s. Error rate 1e-6 over the four cuts.
    for k in range(4):
        wanted, found = (1.0 - p ** (k + 1)) ** segments, int((counts.round() <= k).sum())
        assert stats.binomtest(found, n, wanted).pvalue > 1e-6 / 4
        # A wrong variant fails: one draw for the whole message, whatever its size.
        assert segments < 4 or stats.binomtest(found, n, 1.0 - p ** (k + 1)).pvalue < 1e-6


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
        (10.2, 11.5),
        (20.0, 21.0),
    ],
)
def test_in_an_outage_nothing_moves_and_everything_waits(at: float, arrives: float) -> None:
    # 5 to 8; then two that overlap, 9 to 10 and 9.5 to 10.5.
    link = OutageLink(SECOND, ((9.5, 1.0), (5.0, 3.0), (9.0, 1.0)))
    assert at + link.delay(0, True, at, rng()) == pytest.approx(arrives, abs=1e-12)


def test_an_outage_keeps_the_link_busy() -> None:
    link = OutageLink(SLOW, ((1.0, 2.0),))
    assert link.busy(500_000, True, 0.75) == pytest.approx(2.5)
    assert link.busy(500_000, True, 1.5) == pytest.approx(2.0)


@pytest.mark.parametrize("outage", [(-1.0, 1.0), (0.0, 0.0), (math.nan, 1.0), (0.0, math.inf)])
def test_an_outage_that_cannot_be_is_refused(outage: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="outage"):
        OutageLink(NOTHING, (outage,))
