"""Link emulation by the kernel (netem): detection, options, and a context manager."""

from __future__ import annotations

import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specact.errors import ConfigError
from specact.links.model import AddedDelay, Link, LossyLink, SteadyLink


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

    A container may not see its kernel's modules; then netem counts as not available.

    Args:
        root: root of the file system.
        release: of the kernel; the running one if None.
    """
    modules = Path("lib/modules") / (release or platform.release())
    places = {
        "loaded": Path("proc/modules"),
        "built in": modules / "modules.builtin",
        "a module": modules / "modules.dep",
    }
    found = next((f"{state}, in /{place}" for state, place in places.items() if _is_listed(root / place)), None)
    if found is None:
        return Netem(False, "the kernel shows no sch_netem, neither loaded nor built in nor as a module")
    if not any(shutil.which("tc", path=str(root / folder)) for folder in ("usr/sbin", "sbin", "usr/bin", "bin")):
        return Netem(False, f"the kernel has sch_netem ({found}), but there is no tc to set it up (package iproute2)")
    return Netem(True, found)


def _is_listed(place: Path) -> bool:
    """Whether a line begins with the module, after its folder and before its suffix."""
    try:
        return re.search(r"^(\S*/)?sch_netem[.: ]", place.read_text(errors="replace"), re.MULTILINE) is not None
    except OSError:
        return False


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
            extra_ms, rate = extra_ms + link.delay_ms / 2.0, min(rate, link.rate_mbit_s or rate)
        elif isinstance(link, LossyLink):
            loss = 1.0 - (1.0 - loss) * (1.0 - link.loss)
        else:
            return None
        link = link.link
    options = [f"delay {link.rtt_ms / 2.0 + extra_ms:.3f}ms"]
    if link.jitter_ms:
        options.append(f"{link.jitter_ms / 2.0**0.5:.3f}ms distribution normal")
    rate = min(rate, link.up_mbit_s if up else link.down_mbit_s)
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
