"""Links by name."""

from pathlib import Path

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.links.link import LINKS, load_link
from specact.links.model import AddedDelay, LossyLink, MahimahiLink, OutageLink, SteadyLink, TraceLink


@pytest.fixture
def series(tmp_path: Path) -> Path:
    path = tmp_path / "up+down, really=1.csv"  # what separates names may appear in a path, but for mahimahi's comma
    path.write_text("10\n20\n")
    return path


def test_presets_are_those_documented() -> None:
    assert set(LINKS) == {"loopback", "wifi-paper", "lan", "5g", "lte"}
    assert load_link("wifi-paper") == SteadyLink(12.054, 0.302, 55.4, 55.4)
    for name, link in LINKS.items():
        assert load_link(name) is link
        assert link.jitter_ms <= link.rtt_ms / 5  # where mean and deviation hold within 4 %


def test_additions_are_the_same_in_any_order() -> None:
    wanted = OutageLink(LossyLink(AddedDelay(LINKS["lan"], 20.0, 2.0), 0.3, 500.0), ((5.0, 3.0), (9.0, 0.5)))
    assert load_link("lan+rate=2+delay=20+loss=0.3+rto=500+outage=5:3+outage=9:0.5") == wanted
    assert load_link("lan+outage=9:.5+rto=500+outage=5:3+loss=.3+delay=20+rate=2.0") == wanted
    assert load_link("lan+delay=20") == AddedDelay(LINKS["lan"], 20.0)
    assert load_link("wifi-paper+loss=0.3") == LossyLink(LINKS["wifi-paper"], 0.3)


def test_recordings_by_path(series: Path, tmp_path: Path) -> None:
    link = load_link(f"rtt:{series}")
    assert isinstance(link, TraceLink)
    np.testing.assert_array_equal(link.rtt_ms, [10.0, 20.0])
    late = load_link(f"rtt:{series}+start=1.5+period=20")
    assert isinstance(late, TraceLink) and (late.start_s, late.period_ms) == (1.5, 20.0)
    up, down = tmp_path / "up", tmp_path / "down"
    up.write_text("1\n2\n")
    down.write_text("3\n")
    both = load_link(f"mahimahi:{up},{down}+start=2")
    assert isinstance(both, MahimahiLink) and both.start_s == 2.0
    assert both.up.tolist() == [1, 2] and both.down.tolist() == [3]
    assert isinstance(load_link(f"rtt:{series}+loss=0.1"), LossyLink)


WRONG = {
    "": "mahimahi:UP_PATH,DOWN_PATH", "wifi-papr": "wifi-paper", "wifi-papr+loss=0.1": "wifi-paper",
    "wifi-paper+loss": "wifi-paper", "rttt:x": "rttt:x", "lan+los=0.3": "loss", "lan+loss=1": "loss",
    "lan+loss=much": "much", "lan+loss=0.1+loss=0.2": "twice", "lan+rto=300": "loss=", "lan+loss=0.1+rto=0": "rto_ms",
    "lan+rate=0": "rate_mbit_s", "lan+rate=nan": "rate_mbit_s", "lan+delay=-1": "delay_ms",
    "lan+outage=5": "START:DURATION", "lan+outage=5:": "outage=", "lan+outage=5:-1": "duration",
    "lan+start=5": "start=", "lan+period=5": "period=", "mahimahi:a,b+period=5": "period=",
    "mahimahi:one": "two files", "mahimahi:a,b,c": "two files", "rtt:nowhere.csv": "nowhere.csv", "rtt:": "directory",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_name_is_said(name: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[name]):
        load_link(name)
