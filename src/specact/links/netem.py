"""Whether this machine's kernel can shape a link itself, and how it would be told to. Nothing is changed here."""

from __future__ import annotations

import gzip
import platform
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from specact.links.faults import LossyLink, OutageLink
from specact.links.hop import HopLink
from specact.links.model import Link
from specact.links.steady import SteadyLink


@dataclass(frozen=True)
class Netem:
    """What was found of the kernel's network emulator.

    Attributes:
        available: whether both the emulator and the tool ``tc`` that sets it up are there.
        why: what this is known from, as half a sentence.
    """

    available: bool
    why: str


def find_netem(root: Path = Path("/"), release: str | None = None) -> Netem:
    """Looks for the kernel's ``sch_netem`` and for ``tc``; needs no privilege.

    A container may see neither the modules nor the configuration of the kernel it runs on; what is not seen counts as
    not there.

    Args:
        root: where the file system begins.
        release: of the kernel; the running one if not given.
    """
    found = _evidence(root, release or platform.release())
    if not found:
        return Netem(False, "the kernel shows no sch_netem, neither loaded nor built in nor as a module")
    if not any(shutil.which("tc", path=str(root / place)) for place in ("usr/sbin", "sbin", "usr/bin", "bin")):
        return Netem(False, f"the kernel has sch_netem ({found}), but there is no tc to set it up (package iproute2)")
    return Netem(True, found)


def netem_options(link: Link, up: bool) -> str | None:
    """What ``tc qdisc add dev DEV root netem`` needs so that what leaves DEV travels as on this link.

    The steady part only: outages are left out, and recordings have no such form.

    Args:
        link: the link.
        up: which direction leaves DEV: upwards on the robot, down on the server.

    Returns:
        The options, or None for a link that is not steady.
    """
    extra_ms, rate, loss = 0.0, float("inf"), 0.0
    while not isinstance(link, SteadyLink):
        if isinstance(link, HopLink):
            extra_ms, rate = extra_ms + link.delay_ms / 2.0, min(rate, link.rate_mbit_s)
        elif isinstance(link, LossyLink):
            loss = 1.0 - (1.0 - loss) * (1.0 - link.loss)
        elif not isinstance(link, OutageLink):
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


def _evidence(root: Path, release: str) -> str:
    """Where the kernel says that it has netem; empty if nowhere."""
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
