"""Finding the kernel's network emulator, and telling it a link."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.links import netem
from specact.links.link import Link, load_link
from specact.links.netem import Netem, find_netem, kernel_shaped, netem_options
from specact.links.recordings import TraceLink

RELEASE = "6.1.0-test"
MODULES = f"lib/modules/{RELEASE}"


def machine(root: Path, files: dict[str, str | bytes], tc: bool = True) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if tc:
        tool = root / "usr" / "sbin" / "tc"
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.touch(mode=0o755)
    return root


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"proc/modules": "nf 1 0 - Live\nsch_netem 28672 0 - Live 0x0\n"}, "loaded"),
        ({f"{MODULES}/modules.builtin": "kernel/net/sched/sch_netem.ko\n"}, "built in"),
        ({f"{MODULES}/modules.dep": "kernel/a.ko:\nkernel/net/sched/sch_netem.ko.zst: kernel/a.ko\n"}, "a module"),
    ],
)
def test_netem_is_found_where_the_kernel_shows_it(tmp_path: Path, files: dict[str, str | bytes], says: str) -> None:
    found = find_netem(machine(tmp_path / "with", files), RELEASE)
    assert found.available and says in found.why
    without = find_netem(machine(tmp_path / "without", files, tc=False), RELEASE)
    assert not without.available and "no tc" in without.why


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/modules": "sch_netemu 1 0\n", f"{MODULES}/modules.dep": "kernel/x.ko: kernel/net/sched/sch_netem.ko\n"},
        {"lib/modules/another/modules.builtin": "kernel/net/sched/sch_netem.ko\n"},
    ],
)
def test_netem_is_not_found_where_it_is_not(tmp_path: Path, files: dict[str, str | bytes]) -> None:
    found = find_netem(machine(tmp_path, files), RELEASE)
    assert not found.available and "no sch_netem" in found.why


def test_it_looks_at_this_machine_without_harm() -> None:
    assert find_netem().why


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("wifi-paper", "delay 6.027ms 0.214ms distribution normal rate 55400kbit", None),
        ("5g", "delay 10.000ms 2.828ms distribution normal rate 50000kbit",
         "delay 10.000ms 2.828ms distribution normal rate 100000kbit"),
        ("wifi-paper+delay=20+rate=2+loss=0.3",
         "delay 16.027ms 0.214ms distribution normal rate 2000kbit loss random 30%", None),
        ("loopback", "delay 0.000ms rate 1000000000kbit", None),
    ],
)  # fmt: skip
def test_a_steady_link_in_the_words_of_tc(name: str, up: str, down: str | None) -> None:
    assert netem_options(load_link(name), up=True) == up
    assert netem_options(load_link(name), up=False) == (down or up)


def test_a_recording_has_no_such_words() -> None:
    assert netem_options(TraceLink(np.array([1.0])), up=True) is None


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with netem, and a ``tc`` that writes down what it is told; it fails where the file REFUSE exists.

    It stands in for a kernel with netem, which machines that run tests seldom have.
    """
    tool, log = tmp_path / "tc", tmp_path / "told"
    tool.write_text(
        f'#!/bin/sh\necho "tc $*" >> {shlex.quote(str(log))}\n'
        f"if [ -e {shlex.quote(f'{tmp_path}/REFUSE')} ]; then echo 'Operation not permitted' >&2; exit 2; fi\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(netem, "find_netem", lambda: Netem(True, "loaded"))
    return log


def test_the_kernel_shapes_for_a_while_and_then_no_longer(told: Path) -> None:
    add = "tc qdisc add dev lo root netem delay 6.027ms 0.214ms distribution normal rate 55400kbit"
    with kernel_shaped("lo", load_link("wifi-paper"), up=True) as said:
        assert said == add
        assert told.read_text().splitlines() == [add]
    assert told.read_text().splitlines() == [add, "tc qdisc del dev lo root netem"]


def test_a_kernel_that_refuses_is_named_and_nothing_is_removed(told: Path) -> None:
    (told.parent / "REFUSE").touch()
    with (
        pytest.raises(ConfigError, match=r"failed \(Operation not permitted\); it needs root"),
        kernel_shaped("lo", load_link("lan"), up=True),
    ):
        pytest.fail("it was not shaped")
    assert len(told.read_text().splitlines()) == 1


def test_what_the_kernel_cannot_do_is_refused_before_it_is_asked(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str, link: Link, why: str) -> None:
        with pytest.raises(ConfigError, match=why), kernel_shaped(device, link, up=True):
            pytest.fail("it was shaped")

    refuse("--help", load_link("lan"), "unknown network device '--help'; available: .*lo")
    refuse("lo", TraceLink(np.array([1.0])), "cannot emulate a recorded link")
    refuse("lo", load_link("lan+loss=0.1+outage=5:3"), "nor outages; use the relay")
    monkeypatch.setattr(netem, "find_netem", lambda: Netem(False, "the kernel shows none"))
    refuse("lo", load_link("lan"), "cannot shape lo: the kernel shows none; use the relay")
    assert not told.exists()
