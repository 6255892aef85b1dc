"""Telling the kernel's network emulator a link."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.links.link import Link, load_link
from specact.links.netem import kernel_shaped, netem_options
from specact.links.recordings import TraceLink

WIFI = "delay 6.027ms 0.214ms distribution normal rate 55400kbit"
RECORDED, INTERRUPTED = TraceLink(np.array([1.0])), load_link("lan+loss=0.1+outage=5:3")


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("wifi-paper", WIFI, WIFI),
        ("5g", "delay 10.000ms 2.828ms distribution normal rate 50000kbit",
         "delay 10.000ms 2.828ms distribution normal rate 100000kbit"),
        ("wifi-paper+delay=20+rate=2+loss=0.3",
         *["delay 16.027ms 0.214ms distribution normal rate 2000kbit loss random 30%"] * 2),
        ("loopback", *["delay 0.000ms rate 1000000000kbit"] * 2),
    ],
)  # fmt: skip
def test_a_steady_link_in_the_words_of_tc(name: str, up: str, down: str) -> None:
    link = load_link(name)
    assert (netem_options(link, up=True), netem_options(link, up=False)) == (up, down)


@pytest.mark.parametrize("link", [RECORDED, INTERRUPTED])
def test_recordings_and_outages_have_no_such_words(link: Link) -> None:
    assert netem_options(link, up=True) is None
    with pytest.raises(ConfigError, match="recorded"), kernel_shaped("lo", link, up=True):
        pytest.fail("it was shaped")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a ``tc`` was called with that stands in for a kernel with netem, and fails where the file REFUSE exists."""
    tool, log = tmp_path / "tc", tmp_path / "log"
    tool.write_text(
        f'#!/bin/sh\necho "tc $*" >> {shlex.quote(str(log))}\n'
        f"if [ -e {shlex.quote(f'{tmp_path}/REFUSE')} ]; then echo 'Operation not permitted' >&2; exit 2; fi\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return log


def test_the_kernel_shapes_for_a_while_and_then_no_longer(log: Path) -> None:
    add = f"tc qdisc add dev lo root netem {WIFI}"
    with kernel_shaped("lo", load_link("wifi-paper"), up=True) as command:
        assert command == add and log.read_text().splitlines() == [add]
    assert log.read_text().splitlines() == [add, "tc qdisc del dev lo root netem"]


def test_a_kernel_that_refuses_is_named_and_nothing_is_removed(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (log.parent / "REFUSE").touch()
    with pytest.raises(ConfigError, match="not permitted"), kernel_shaped("lo", load_link("lan"), up=True):
        pytest.fail("it was not shaped")
    assert len(log.read_text().splitlines()) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="iproute2"), kernel_shaped("lo", load_link("lan"), up=True):
        pytest.fail("it was not shaped")
    with pytest.raises(ConfigError, match="--help"), kernel_shaped("--help", load_link("lan"), up=True):
        pytest.fail("it was shaped")
