"""Link emulation by the kernel (netem): detection, options, and a context manager."""

from __future__ import annotations

import gzip
import platform
import shutil
import socket
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specact.errors import ConfigError
from specact.links.faults import LossyLink
from specact.links.model import AddedDelay, Link, SteadyLink


@dataclass(frozen=True)
class Netem:
    """Availability of the kernel's network emulator.

    Attributes:
        available: whether the kernel has the emulator and the tool ``tc`` is installed.
        why: the reason, as a clause.
    """

    available: bool
    why: str


def find_netem(root: Path = Path("/"), release: str | None = None) -> Netem:
    """Looks for the kernel's ``sch_netem`` and for ``tc``; needs no privilege.

    A container may not see its kernel's modules and configuration; then netem counts as not available.

    Args:
        root: root of the file system.
        release: of the kernel; the running one if None.
    """
    found = _evidence(root, release or platform.release())
    if not found:
        return Netem(False, "the kernel shows no sch_netem, neither loaded nor built in nor as a module")
    if not any(shutil.which("tc", path=str(root / place)) for place in ("usr/sbin", "sbin", "usr/bin", "bin")):
        return Netem(False, f"the kernel has sch_netem ({found}), but there is no tc to set it up (package iproute2)")
    return Netem(True, found)


def netem_options(link: Link, up: bool) -> str | None:
    """The options of ``tc qdisc add dev DEV root netem`` that emulate one direction of this link.

    A retransmission timeout has no option, because TCP has its own.

    Args:
        link: the link.
        up: the direction that leaves DEV: up on the robot, down on the server.

    Returns:
        The options, or None for a link that is recorded or has outages.
    """
    extra_ms, rate, loss = 0.0, float("inf"), 0.0
    while not isinstance(link, SteadyLink):
        if isinstance(link, AddedDelay):
            extra_ms, rate = extra_ms + link.delay_ms / 2.0, min(rate, link.rate_mbit_s)
        elif isinstance(link, LossyLink):
            loss = 1.0 - (1.0 - loss) * (1.0 - link.loss)
        else:
            return None
        link = link.link
    options = [f"delay {link.rtt_ms / 2.0 + extra_ms:.3f}ms"]
    if link.jitter_ms:
        options.append(f"{link.jitter_ms / 2.0**0.5:.3f}ms distribution normal")
    rate = min(rate, link.up_mbit_s if up else link.down_mbit_s)
    if rate < float("inf"):
        options.append(f"rate {rate * 1e3:.0f}kbit")
    if loss:
        options.append(f"loss random {100.0 * loss:g}%")
    return " ".join(options)


@contextmanager
def kernel_shaped(device: str, link: Link, up: bool) -> Iterator[str]:
    """Shapes the traffic that leaves a network device as on this link, inside the context; needs root.

    An existing queueing discipline of the device is neither replaced nor removed.

    Args:
        device: such as ``wlan0``; everything that leaves it is delayed, not only what goes to one server.
        link: with constant parameters; without outages.
        up: the direction that leaves the device.

    Yields:
        The command that configured it.

    Raises:
        ConfigError: if the device or netem is not available, for a recorded link or outages, or if ``tc`` fails.
    """
    devices = sorted(name for _, name in socket.if_nameindex())
    if device not in devices:
        raise ConfigError(f"unknown network device {device!r}; available: {', '.join(devices)}")
    netem, options = find_netem(), netem_options(link, up)
    if not netem.available:
        raise ConfigError(f"the kernel cannot shape {device}: {netem.why}; use the relay, specact proxy")
    if options is None:
        raise ConfigError("netem cannot emulate a recorded link, nor outages; use the relay, specact proxy")
    command = f"tc qdisc add dev {device} root netem {options}"
    _tc(command)
    try:
        yield command
    finally:
        _tc(f"tc qdisc del dev {device} root netem")


def _tc(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise ConfigError(f"{command!r} failed ({said}); it needs root, and a device without another traffic shaper")


def _evidence(root: Path, release: str) -> str:
    """Where the kernel lists netem; empty if nowhere."""
    modules = root / "lib" / "modules" / release
    if any(line.split(" ")[0] == "sch_netem" for line in _lines(root / "proc" / "modules")):
        return "loaded, in /proc/modules"
    for name, state in (("modules.builtin", "built in"), ("modules.dep", "a module")):
        if any(_is_netem(line) for line in _lines(modules / name)):
            return f"{state}, in /lib/modules/{release}/{name}"
    for config in (root / "proc" / "config.gz", root / "boot" / f"config-{release}"):
        if "CONFIG_NET_SCH_NETEM=y" in _lines(config):
            return f"built in, in /{config.relative_to(root)}"
    return ""


def _is_netem(line: str) -> bool:
    return line.split(":")[0].strip().split("/")[-1].split(".")[0] == "sch_netem"


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode(errors="replace").splitlines()
    except (OSError, EOFError, zlib.error):
        return []
