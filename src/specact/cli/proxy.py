"""``specact proxy`` puts a link model between a robot and its server."""

from __future__ import annotations

import ipaddress
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np

from specact.cli.options import refuse_unused
from specact.cli.output import results
from specact.errors import ConfigError
from specact.links.link import load_link
from specact.links.listener import resolve
from specact.links.model import Link
from specact.links.netem import find_netem, kernel_shaped, netem_options
from specact.links.shaper import LinkEvent, Shaper

_TARGET, _LISTEN = "127.0.0.1:8600", "127.0.0.1:8601"


def proxy(
    target: str = _TARGET,
    listen: str = _LISTEN,
    link: str = "wifi-paper",
    seed: int = 0,
    allow_remote: bool = False,
    netem: str | None = None,
    end: Literal["robot", "server"] = "robot",
) -> None:
    """Relay TCP connections between a robot and its server with the delay, jitter, rate, losses and outages of a link.

    Runs until Ctrl-C or SIGTERM.

    Args:
        target: HOST:PORT of the server.
        listen: HOST:PORT that the robot connects to; port 0 selects a free one.
        link: loopback, wifi-paper, lan, 5g, lte, rtt:PATH or mahimahi:UP_PATH,DOWN_PATH, then any of +delay=MS,
            +rate=MBIT_S, +loss=PROBABILITY, +rto=MS, +outage=START_S:DURATION_S, +start=S, +period=MS.
        seed: random seed of delays and losses.
        netem: instead of a relay, configure netem on this network device until the command ends; needs root. Supports
            constant link parameters only, without outages and recordings.
        end: with --netem: which end of the link this machine is.
        allow_remote: allow a --listen address that other machines can reach. The relay has no authentication.
    """
    if netem is None:
        refuse_unused({"end": end != "robot"}, "is for --netem; add that, or leave it out")
    else:
        refuse_unused(
            {
                "target": target != _TARGET, "listen": listen != _LISTEN, "seed": seed != 0,
                "allow_remote": allow_remote,
            },
            "is for the relay; leave it out with --netem",
        )  # fmt: skip
    model = load_link(link)
    with _signals_blocked() as ends:  # threads inherit the mask, so that signals do not interrupt them
        if netem is not None:
            with kernel_shaped(netem, model, end == "robot") as command:
                _print(f"shaped by the kernel until Ctrl-C: {command}")
                signal.sigwait(ends)
            _print(f"the configuration of {netem} is restored")
            return
        (host, port), (here, door) = _relayed(target, listen, allow_remote)
        with Shaper(model, host, port, seed=seed, listen_host=here, listen_port=door, on_event=_print_event) as shaper:
            at = f"[{here}]" if ":" in here else here
            first = f"listening on {at}:{shaper.port} for {target}, link {link}, seed {seed}; Ctrl-C ends"
            _print("\n".join([first, *mechanism(model)]))
            signal.sigwait(ends)
        _print(_summary(shaper))


@contextmanager
def _signals_blocked() -> Iterator[set[signal.Signals]]:
    """Blocks the signals that end this command, for ``sigwait``, and yields them."""
    ends = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        yield ends
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _relayed(target: str, listen: str, allow_remote: bool) -> tuple[tuple[str, int], tuple[str, int]]:
    """Host and port of the server, and of the relay's own address."""
    (host, port), (here, door) = _end_point("target", target), _end_point("listen", listen)
    if port == 0:
        raise ConfigError("--target needs the server's port, which cannot be 0")
    if not allow_remote and not ipaddress.ip_address(resolve(here, door)[1][0].split("%")[0]).is_loopback:
        raise ConfigError(
            f"--listen {listen} can be reached from other machines, and the relay has no authentication; "
            "listen on 127.0.0.1, or add --allow-remote"
        )
    return (host, port), (here, door)


def mechanism(link: Link) -> list[str]:
    """Lines about what shapes the link, and whether the kernel could."""
    lines = ["shaped by a relay in this process; the network configuration of the machine is unchanged"]
    netem = find_netem()
    if not netem.available:
        return [*lines, f"kernel netem: not available here, {netem.why}; the relay does not need it"]
    lines.append(f"kernel netem: available ({netem.why}), not used by the relay")
    ways = [(end, netem_options(link, up)) for end, up in (("robot", True), ("server", False))]
    if any(options is None for _, options in ways):
        return [*lines, "  it cannot emulate this link, which is recorded or has outages"]
    lines.append("  to use it: specact proxy --netem DEV as root, or manually:")
    return lines + [f"  on the {end}: tc qdisc add dev DEV root netem {options}" for end, options in ways]


def _end_point(flag: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ConfigError(f"--{flag} must be HOST:PORT with a port from 0 to 65535, as in 127.0.0.1:8600; got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _print_event(event: LinkEvent) -> None:
    passed = "" if event.kind == "opened" else f", {event.up_bytes} bytes up, {event.down_bytes} bytes down"
    _print(f"connection {event.connection} {event.kind}{passed}")


def _summary(shaper: Shaper) -> str:
    counts = f"{shaper.connections} connections, {shaper.up_bytes} bytes up, {shaper.down_bytes} bytes down"
    late = 1e3 * shaper.lateness
    if not len(late):
        return counts
    median, high = np.quantile(late, [0.5, 0.99])
    return (
        f"{counts}; of the last {len(late)} messages half left {median:.3f} ms late or less, 99 % {high:.3f} ms or less"
    )


def _print(line: str) -> None:
    results.print(line, highlight=False, soft_wrap=True)
