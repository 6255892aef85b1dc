"""Link emulation by the kernel (netem): its options, and a context manager."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from specact.errors import ConfigError
from specact.links.model import AddedDelay, Link, LossyLink, SteadyLink


def netem_options(link: Link, up: bool) -> str | None:
    """The options of ``tc qdisc add dev DEV root netem`` that emulate one direction of this link.

    None for a link that is recorded or has outages. A retransmission timeout has no option, because TCP has its own.
    ``up`` is the direction that leaves DEV on the robot.
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
    """Shapes all traffic that leaves a network device as on this link, inside the context; needs root.

    An existing queueing discipline of the device is neither replaced nor removed. Yields the command for it.

    Raises:
        ConfigError: for an unknown device, a recorded link or outages, or if ``tc`` fails.
    """
    devices = sorted(name for _, name in socket.if_nameindex())
    if device not in devices:
        raise ConfigError(f"unknown network device {device!r}; available: {', '.join(devices)}")
    if (options := netem_options(link, up)) is None:
        raise ConfigError("netem cannot emulate a recorded link, nor outages; use the relay, specact proxy")
    command = f"tc qdisc add dev {device} root netem {options}"
    _tc(command)
    try:
        yield command
    finally:
        _tc(f"tc qdisc del dev {device} root netem")


def _tc(command: str) -> None:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
    except OSError as error:
        done, said = None, f"{error.strerror}; tc is of the package iproute2"
    if done is None or done.returncode:
        raise ConfigError(
            f"{command!r} failed ({said}); it needs root, a kernel with sch_netem, and a device without another "
            "traffic shaper; the relay, specact proxy, needs none of them"
        )
