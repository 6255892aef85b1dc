"""Replay of round trips and of delivery opportunities, and the files they come from."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specact.errors import ConfigError
from specact.links.link import load_link
from specact.links.model import MahimahiLink, TraceLink, read_series

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
    found = [link.delay(1, True, k * 0.1, RNG) * 2e3 - 1.0 for k in ks]
    np.testing.assert_allclose(found, ks % 7, atol=1e-9)
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
