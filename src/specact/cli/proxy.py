"""``specact proxy`` puts a link model between a robot and its server."""

from __future__ import annotations

import ipaddress
import signal

import numpy as np

from specact.cli.output import results
from specact.errors import ConfigError
from specact.links.link import load_link
from specact.links.listener import resolve
from specact.links.model import Link
from specact.links.netem import find_netem, netem_options
from specact.links.shaper import LinkEvent, Shaper


def proxy(
    target: str = "127.0.0.1:8600",
    listen: str = "127.0.0.1:8601",
    link: str = "wifi-paper",
    seed: int = 0,
    allow_remote: bool = False,
) -> None:
    """Put a link between a robot and its server: a TCP relay with delay, jitter, rate, losses and outages.

    Runs until Ctrl-C or SIGTERM.

    Args:
        target: HOST:PORT of the server.
        listen: HOST:PORT for the robot to connect to instead; port 0 for a free one.
        link: loopback, wifi-paper, lan, 5g, lte, rtt:PATH or mahimahi:UP_PATH,DOWN_PATH, then any of +delay=MS,
            +rate=MBIT_S, +loss=PROBABILITY, +rto=MS, +outage=START_S:DURATION_S, +start=S, +period=MS.
        seed: of delays and losses.
        allow_remote: listen on an address other machines can reach; the relay itself asks nobody for a password.
    """
    model, (host, port), (here, door) = load_link(link), _end_point("target", target), _end_point("listen", listen)
    if port == 0:
        raise ConfigError("--target needs the server's port, which cannot be 0")
    if not allow_remote and not ipaddress.ip_address(resolve(here, door)[1][0].split("%")[0]).is_loopback:
        raise ConfigError(
            f"--listen {listen} can be reached from other machines, and the relay lets everyone through to {target}; "
            "listen on 127.0.0.1, or add --allow-remote if that is what you want"
        )
    ends = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # the shaper's threads inherit it, so they stay undisturbed
    try:
        with Shaper(model, host, port, seed=seed, listen_host=here, listen_port=door, on_event=_say_event) as shaper:
            at = f"[{here}]" if ":" in here else here
            first = f"listening on {at}:{shaper.port} for {target}, link {link}, seed {seed}; Ctrl-C ends"
            _say("\n".join([first, *mechanism(model)]))
            signal.sigwait(ends)
        _say(_summary(shaper))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def mechanism(link: Link) -> list[str]:
    """What shapes the link, and what else on this machine could: one line each."""
    lines = ["shaped by this process, a relay in user space; it changes nothing about the machine's network"]
    netem = find_netem()
    if not netem.available:
        return [*lines, f"kernel netem: not available here, {netem.why}; the relay does without it"]
    lines.append(f"kernel netem: available ({netem.why}), not used by the relay")
    ways = [(end, netem_options(link, up)) for end, up in (("robot", True), ("server", False))]
    if any(options is None for _, options in ways):
        return [*lines, "  it has no form for this link, which is a recording"]
    lines.append("  to let it do the steady part instead, without this relay, as root, DEV being the network device:")
    return lines + [f"  on the {end}: tc qdisc add dev DEV root netem {options}" for end, options in ways]


def _end_point(flag: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ConfigError(f"--{flag} must be HOST:PORT with a port from 0 to 65535, as in 127.0.0.1:8600; got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _say_event(event: LinkEvent) -> None:
    passed = "" if event.kind == "opened" else f", {event.up_bytes} bytes up, {event.down_bytes} bytes down"
    _say(f"connection {event.connection} {event.kind}{passed}")


def _summary(shaper: Shaper) -> str:
    counts = f"{shaper.connections} connections, {shaper.up_bytes} bytes up, {shaper.down_bytes} bytes down"
    late = 1e3 * shaper.lateness
    if not len(late):
        return counts
    median, high = np.quantile(late, [0.5, 0.99])
    return (
        f"{counts}; of the last {len(late)} messages half left {median:.3f} ms late or less, 99 % {high:.3f} ms or less"
    )


def _say(line: str) -> None:
    results.print(line, highlight=False, markup=False, soft_wrap=True)
