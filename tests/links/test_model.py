"""What every link has to keep, and each model by itself."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specact.errors import ConfigError
from specact.links.link import LINKS, load_link
from specact.links.model import (
    AddedDelay,
    Link,
    LossyLink,
    MahimahiLink,
    OutageLink,
    SteadyLink,
    TraceLink,
    read_series,
    round_trip,
)

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
        wanted, hits = (1.0 - p ** (k + 1)) ** segments, int((counts.round() <= k).sum())
        assert stats.binomtest(hits, n, wanted).pvalue > 1e-6 / 4
        # A wrong variant fails: one draw for the whole message, whatever its size.
        assert segments < 4 or stats.binomtest(hits, n, 1.0 - p ** (k + 1)).pvalue < 1e-6


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


# ---- recordings ------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)


# Round trips: 10, 20 and 40 ms; back to back they cover [0, 10), [10, 30) and [30, 70) ms.
RTTS = np.array([10.0, 20.0, 40.0])


@pytest.mark.parametrize(
    ("link", "ways_ms"),
    [
        (TraceLink(RTTS), {0: 5, 9.999: 5, 10: 10, 29.999: 10, 30: 20, 69.999: 20, 70: 5, 150: 10}),
        (TraceLink(RTTS, period_ms=100.0), {0: 5, 99.999: 5, 100: 10, 200: 20, 299.999: 20, 300: 5}),
        (TraceLink(RTTS, start_s=0.03), {0: 20, 39.9: 20, 40: 5}),
    ],
)
def test_each_round_trip_stands_for_its_own_time_or_for_one_period(link: TraceLink, ways_ms: dict[float, int]) -> None:
    for at_ms, way_ms in ways_ms.items():
        assert link.delay(10**6, True, at_ms / 1e3, RNG) == link.delay(0, False, at_ms / 1e3, RNG) == way_ms / 1e3


def test_moments_are_exact_long_after_the_start() -> None:
    # 0.1 s periods for a week: in floating point 0.1 k / 0.1 falls short of k for every tenth k or so.
    link = TraceLink(np.arange(1.0, 8.0), period_ms=100.0)
    ks = np.random.default_rng(1).integers(0, 6_048_000, 2000)
    delays = [link.delay(1, True, k * 0.1, RNG) * 2e3 - 1.0 for k in ks]
    np.testing.assert_allclose(delays, ks % 7, atol=1e-9)
    assert (np.floor(ks * 0.1 / 0.1) != ks).any() or (np.floor((ks * 0.1 % 0.7) / 0.1) != ks % 7).any()


@pytest.mark.parametrize(
    ("kind", "content", "line"),
    [
        *(("rtt", f"1\n2\n{wrong}\n", 3) for wrong in ("", "abc", "0", "-1", "nan", "inf", "1e10", "1,5", "1_000")),
        *(("mahimahi", content, line) for content, line in (
            ("0\n5\n4\n", 3), ("1.5\n", 1), ("-1\n2\n", 1), ("1\n\n2\n", 2), ("0\n0\n", 2), ("nan\n", 1))),
    ],
)  # fmt: skip
def test_a_line_that_is_no_round_trip_or_delivery_is_named(kind: str, content: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "series").write_text(content)
    (tmp_path / "down").write_text("1\n")
    path = tmp_path / "series"
    with pytest.raises(ConfigError, match=rf"series.*: line {line} "):
        load_link(f"rtt:{path}" if kind == "rtt" else f"mahimahi:{path},{tmp_path / 'down'}")
    with pytest.raises(ConfigError, match="1-D array"):
        TraceLink(np.zeros((1, 1)))


def test_files_that_cannot_be_read_are_refused_and_any_line_end_will_do(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path in (tmp_path / "empty", tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            read_series(path)
    (tmp_path / "series").write_bytes(b"1.5\r\n 2 \n3e1")
    np.testing.assert_array_equal(read_series(tmp_path / "series"), [1.5, 2.0, 30.0])


def test_a_replayed_link_cannot_be_changed() -> None:
    mine = np.array([10.0])
    link = TraceLink(mine)
    mine[0] = 99.0
    assert link.delay(1, True, 0.0, RNG) == 0.005
    with pytest.raises(ValueError, match="read-only"):
        link.rtt_ms[0] = 1.0


# Deliveries at 1, 3, 3 and 10 ms, then at 11, 13, 13, 20, ...
DELIVERIES = MahimahiLink(np.array([1, 3, 3, 10]), np.array([1]))


@pytest.mark.parametrize(
    ("at_ms", "size", "leaves_ms"),
    [
        (0, 0, 1), (0, 1500, 1), (0, 1501, 3), (0, 4501, 10), (0, 6001, 11), (3, 3001, 10), (3.000001, 1, 10),
        (10, 1, 10),  # the last of a lap is still there at its own moment
        (10, 1501, 11), (10.000001, 1, 11), (25, 15_001, 53), (10_000_003, 1500, 10_000_003),
    ],
)  # fmt: skip
def test_a_packet_leaves_at_every_recorded_moment(at_ms: float, size: int, leaves_ms: float) -> None:
    assert at_ms + 1e3 * DELIVERIES.delay(size, True, at_ms / 1e3, RNG) == pytest.approx(leaves_ms, abs=1e-5)
    busy_ms = 1e3 * DELIVERIES.busy(size, True, at_ms / 1e3)
    assert at_ms + busy_ms == pytest.approx(leaves_ms, abs=2e-6 + 1e-12 * at_ms)


def test_a_next_message_gets_other_opportunities() -> None:
    link, at, left = DELIVERIES, 0.0, []
    for _ in range(5):
        left.append(round(1e3 * (at + link.delay(1500, True, at, RNG)), 3))
        at += link.busy(1500, True, at)
    assert left == [1, 3, 10, 11, 13]  # the second of each pair at 3 is what sharing a millisecond costs


def test_directions_have_traces_of_their_own() -> None:
    link = MahimahiLink(np.array([5]), np.array([2]))
    assert link.delay(1, True, 0.0, RNG) == 0.005 and link.delay(1, False, 0.0, RNG) == 0.002
    assert MahimahiLink(np.array([5]), np.array([2]), start_s=0.004).delay(1, True, 0.0, RNG) == pytest.approx(0.001)


@given(
    steps=st.lists(st.integers(0, 4), min_size=1, max_size=8), at_us=st.integers(0, 60_000), packets=st.integers(1, 30)
)
def test_deliveries_are_those_found_by_counting(steps: list[int], at_us: int, packets: int) -> None:
    trace = np.cumsum(steps)
    if trace[-1] == 0:
        trace[-1] = 1
    laps = 100 + 60 // int(trace[-1])
    moments = [lap * int(trace[-1]) + int(moment) for lap in range(laps) for moment in trace]
    counted = [moment for moment in moments if moment * 1000 >= at_us][packets - 1]
    delay = MahimahiLink(trace, trace).delay(packets * 1500, True, at_us / 1e6, RNG)
    assert delay == pytest.approx(counted / 1e3 - at_us / 1e6, abs=1e-9)
