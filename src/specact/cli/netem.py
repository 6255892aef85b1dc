"""``specact netem`` has the kernel shape a network device like a link."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from specact.cli.options import Options
from specact.cli.output import say
from specact.cli.proxy import ending_signals
from specact.links.link import load_link
from specact.links.netem import kernel_shaped


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
