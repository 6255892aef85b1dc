"""``specact serve`` serves a target to robots."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional

from specact.bundle.network import Compute
from specact.cli.options import ConfigFile, Flat, Maybe, Options, Rare, read_token
from specact.cli.output import remark
from specact.records import Count
from specact.server.access import Address, Limits


@dataclass(frozen=True)
class Serve(Options):
    """Serve a target to robots, with /healthz, /metrics and a status page. More options: --help-all.

    The bearer token that devices must send is the variable SPECACT_TOKEN, or in a file of --tokens for each robot.
    """

    # pair, whose target is served, a target in stages, as specact split writes it, or any chunk policy: a bundle,
    # BUNDLE#target, a .toml file that describes an ONNX file, lerobot:PATH@HZ, openpi:ws://HOST:PORT#FILE.toml or
    # MODULE:NAME
    policy: Positional[str]
    # of a pair of chunk policies or of FLASH's block: its target, where it does not name one, likewise
    target: Maybe[str] = None
    token_file: Maybe[Path] = None  # file with the bearer token, instead of SPECACT_TOKEN
    address: Flat[Address] = field(default_factory=Address)
    compute: Flat[Compute] = field(default_factory=Compute)
    steps: Maybe[Count] = None  # Euler steps of a flow policy, the most that robots may ask for; 10 if not given
    config: ConfigFile = None  # file of options; what is typed goes first
    limits: Rare[Limits] = field(default_factory=Limits)

    def run(self) -> None:
        from specact.load import load_exchange

        exchange = load_exchange(self.policy, target=self.target, steps=self.steps, compute=self.compute)
        from specact.server.serve import serve
        from specact.server.service import Service

        service = Service(exchange, self.limits, self.address, read_token(self.token_file))

        def announce(url: str) -> None:
            page = url.replace("ws", "http", 1)
            remark(f"serving {service.welcome.bundle} on {url}; status page {page}/, as JSON {page}/v1/status")

        serve(service, announce)
        left = service.abandoned
        answered = f"{left} requests under way were not answered" if left else "everything under way was answered"
        remark(f"stopped; {answered}")
