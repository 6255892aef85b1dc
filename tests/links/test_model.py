"""What every link has to keep, and steady links in particular."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specact.errors import ConfigError
from specact.links.faults import LossyLink, OutageLink
from specact.links.link import LINKS
from specact.links.model import AddedDelay, Link, SteadyLink, round_trip
from specact.links.recordings import MahimahiLink, TraceLink

WIFI = LINKS["wifi-paper"]
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


@dataclass
class Recorder:
    """A link that takes 1 s up and 2 s down and keeps what it was asked."""

    asked: list[tuple[int, bool, float]]

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        self.asked.append((payload_bytes, up, at))
        return 1.0 if up else 2.0

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        return 0.0


@pytest.mark.parametrize("name", EVERY)
def test_delays_are_finite_and_never_negative_and_the_same_stream_gives_the_same(name: str) -> None:
    link, moments = EVERY[name], np.random.default_rng(1).uniform(0.0, 20.0, 300)
    for up in (True, False):
        for at in (0.0, *moments):
            size = int(1e4 * at) % 3001
            delay = link.delay(size, up, at, np.random.default_rng(2))
            assert 0.0 <= delay < math.inf and isinstance(delay, float)
            assert link.delay(size, up, at, np.random.default_rng(2)) == delay
            assert 0.0 <= link.busy(size, up, at) <= delay + 2e-9


def test_the_reply_starts_down_when_the_request_arrived() -> None:
    link = Recorder([])
    assert round_trip(link, 10, 20, 5.0, np.random.default_rng(0)) == 3.0
    assert link.asked == [(10, True, 5.0), (20, False, 6.0)]


def test_without_jitter_a_steady_link_is_arithmetic() -> None:
    link, rng = SteadyLink(10.0, 0.0, 8.0, 16.0), np.random.default_rng(0)
    assert link.delay(1000, True, 3.0, rng) == pytest.approx(5e-3 + 1e-3, abs=1e-15)
    assert link.delay(1000, False, 3.0, rng) == pytest.approx(5e-3 + 0.5e-3, abs=1e-15)
    assert link.busy(1000, True, 3.0) == pytest.approx(1e-3, abs=1e-15)
    assert SteadyLink(10.0, 0.0, math.inf, math.inf).delay(10**9, True, 0.0, rng) == 5e-3


def moments_fit(round_trips: np.ndarray, rtt: float, jitter: float) -> bool:
    """Whether mean and deviation are the wanted ones: normal samples, error rate 1e-6 for both together."""
    z, n = stats.norm.isf(1e-6 / 4), len(round_trips)
    mean = abs(round_trips.mean() - rtt) < z * jitter / math.sqrt(n)
    return bool(mean and abs(round_trips.std() - jitter) < z * jitter / math.sqrt(2 * n))


def test_mean_and_deviation_of_the_round_trip_are_those_of_the_paper() -> None:
    rng, n = np.random.default_rng(3), 20_000
    link = SteadyLink(WIFI.rtt_ms, WIFI.jitter_ms, math.inf, math.inf)
    assert moments_fit(np.array([1e3 * round_trip(link, 0, 0, 0.0, rng) for _ in range(n)]), 12.054, 0.302)

    # Wrong variants fail: the whole jitter in each direction, and its half.
    for share in (1.0, 0.5):
        ways = rng.normal(12.054 / 2, share * 0.302, size=(n, 2))
        assert not moments_fit(ways.sum(axis=1), 12.054, 0.302)


def test_no_direction_falls_below_a_quarter_of_the_round_trip() -> None:
    link, rng = SteadyLink(8.0, 100.0, math.inf, math.inf), np.random.default_rng(4)
    ways = [link.delay(0, True, 0.0, rng) for _ in range(200)]
    assert min(ways) == 2e-3  # half of all draws are below


def test_the_floor_hardly_moves_mean_and_deviation_where_the_documentation_says_so() -> None:
    # At a fifth of the round trip, by less than 4 % of the jitter; from 10^6 draws, standard error 0.1 %.
    ways = np.maximum(1.25, np.random.default_rng(5).normal(2.5, 1 / math.sqrt(2.0), size=(2, 1_000_000)))
    assert abs(ways.sum(axis=0).mean() - 5.0) < 0.04 and abs(ways.sum(axis=0).std() - 1.0) < 0.04
    # The link draws from that law: Kolmogorov-Smirnov, error rate 1e-6.
    link, rng = SteadyLink(5.0, 1.0, math.inf, math.inf), np.random.default_rng(6)
    drawn = [1e3 * round_trip(link, 0, 0, 0.0, rng) for _ in range(10_000)]
    assert stats.ks_2samp(drawn, ways.sum(axis=0)).pvalue > 1e-6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rtt_ms": -1.0}, "rtt_ms"),
        ({"rtt_ms": math.nan}, "rtt_ms"),
        ({"rtt_ms": math.inf}, "rtt_ms"),
        ({"jitter_ms": -0.1}, "jitter_ms"),
        ({"up_mbit_s": 0.0}, "up_mbit_s of a link must be above 0"),
        ({"down_mbit_s": math.nan}, "down_mbit_s"),
    ],
)
def test_a_steady_link_refuses_what_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SteadyLink(**{"rtt_ms": 1.0, "jitter_ms": 0.0, "up_mbit_s": 1.0, "down_mbit_s": 1.0} | changes)
