"""``specact proxy`` relays a connection like a slow link; ``specact netem`` has the kernel shape a device like one."""

from __future__ import annotations

import ipaddress
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from specact.cli.options import Options
from specact.cli.output import say
from specact.errors import ConfigError
from specact.links.link import load_link
from specact.links.shaper import Shaper, kernel_shaped, resolve
from specact.records import Seed


@dataclass(frozen=True)
class Proxy(Options):
    """Relay TCP connections between a robot and its server like a link: delay, jitter, rate, losses and outages.

    Runs until Ctrl-C or SIGTERM. specact netem has the kernel do it, without a relay.
    """

    target: str = "127.0.0.1:8600"  # HOST:PORT of the server
    listen: str = "127.0.0.1:8601"  # HOST:PORT that the robot connects to; port 0 selects a free one
    # loopback, wifi-paper, lan, 5g, lte, rtt:PATH or mahimahi:UP_PATH,DOWN_PATH, then any of +delay=MS, +rate=MBIT_S,
    # +loss=PROBABILITY, +rto=MS, +outage=START_S:DURATION_S, +start=S, +period=MS
    link: str = "wifi-paper"
    seed: Seed = 0  # random seed of delays and losses
    # allow a --listen address that other machines can reach. The relay has no authentication.
    allow_remote: bool = False

    def run(self) -> None:
        model = load_link(self.link)
        host, port = _end_point("target", self.target)
        listen_host, listen_port = _end_point("listen", self.listen)
        if port == 0:
            raise ConfigError("--target needs the server's port, which cannot be 0")
        address = resolve(listen_host, listen_port)[1][0].partition("%")[0]
        if not self.allow_remote and not ipaddress.ip_address(address).is_loopback:
            raise ConfigError(
                f"--listen {self.listen} can be reached from other machines, and the relay has no authentication; "
                "listen on 127.0.0.1, or add --allow-remote"
            )
        relay = Shaper(
            model, host, port, seed=self.seed, listen_host=listen_host, listen_port=listen_port, on_event=_print_event
        )
        with ending_signals() as ends, relay:
            at = f"[{listen_host}]" if ":" in listen_host else listen_host
            say(f"listening on {at}:{relay.port} for {self.target}, link {self.link}, seed {self.seed}; Ctrl-C ends")
            signal.sigwait(ends)
        say(relay.summary())


@dataclass(frozen=True)
class Netem(Options):
    """Shape what leaves a network device like a link, by the kernel's netem, until Ctrl-C or SIGTERM; needs root."""

    device: Positional[str]  # network device, such as wlan0
    link: str = "wifi-paper"  # link with constant parameters, without outages and recordings; see specact proxy --help
    end: Literal["robot", "server"] = "robot"  # which end of the link this machine is

    def run(self) -> None:
        with ending_signals() as ends, kernel_shaped(self.device, load_link(self.link), self.end == "robot") as command:
            say(f"shaped by the kernel until Ctrl-C: {command}")
            signal.sigwait(ends)
        say(f"the configuration of {self.device} is restored")


@contextmanager
def ending_signals() -> Iterator[set[signal.Signals]]:
    """The signals that end this command, for ``sigwait``: blocked inside, also in threads that are started there."""
    ends = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        yield ends
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_point(flag: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ConfigError(f"--{flag} must be HOST:PORT with a port from 0 to 65535, as in 127.0.0.1:8600; got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _print_event(connection: int, kind: str, up_bytes: int, down_bytes: int) -> None:
    passed = "" if kind == "opened" else f", {up_bytes} bytes up, {down_bytes} bytes down"
    say(f"connection {connection} {kind}{passed}")
