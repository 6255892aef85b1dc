"""``specact serve`` serves a target to robots."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specact.cli.output import remarks
from specact.cli.unused import refuse_unused
from specact.errors import ConfigError


def serve(
    bundle: str | None = None,
    policy: str | None = None,
    target: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8600,
    token_file: Path | None = None,
    tokens: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    max_batch: int = 16,
    max_queue: int = 256,
    max_under_way: int = 4,
    max_wait_ms: float = 0.0,
    inline_below_ms: float = 1.0,
    max_robots: int = 1024,
    max_pending: int = 256,
    max_per_address: int = 512,
    access_log: Path | None = None,
    log_steps: bool = False,
    provider: str = "CPUExecutionProvider",
    threads: int = 1,
    steps: int = 10,
) -> None:
    """Serve a target to robots, with /healthz, /metrics and a status page.

    Args:
        bundle: path or name of a bundle, or MODULE:NAME for a pair of your own, whose target is served; or a target in
            stages, as specact split writes it.
        policy: instead, any chunk policy or target of your own: MODULE:NAME, a .toml file that describes an ONNX file,
            lerobot:PATH@HZ for what LeRobot saved and its control rate, openpi:ws://HOST:PORT#FILE.toml for a policy on
            a server of openpi's protocol, a bundle of one policy, or BUNDLE#target.
        target: with --bundle BLOCK, FLASH's block alone: the flow policy that it drafts for, such as lerobot:PATH@HZ;
            with --bundle PAIR, of chunk policies: its target, where the pair does not name it.
        host: address to listen on; one that other machines can reach needs a token.
        port: port to listen on; 0 selects a free one.
        token_file: file with the bearer token that devices must send; the variable SPECACT_TOKEN if not given.
        tokens: file with a token for each robot: a name, a space and its token on each line; read again on SIGHUP.
        certificate: PEM file for TLS; read again on SIGHUP.
        key: PEM file of its key.
        max_batch: requests answered by one inference, at most.
        max_queue: requests that may wait; more are refused as overloaded.
        max_under_way: requests of one robot that may be in flight; more wait in its connection.
        max_wait_ms: how long the target waits for a batch to fill [ms]; 0 takes what is queued when it becomes free.
        inline_below_ms: a bundle's target whose inference takes less [ms] runs on the event loop, all others in a
            thread.
        max_robots: robots with a stream; more are refused as overloaded.
        max_pending: connections that have not sent a token or a hello yet; the oldest are closed for new ones.
        max_per_address: connections from one address.
        access_log: file for one line of JSON about each connection and each refusal; opened again on SIGHUP.
        log_steps: with --access-log: also one line about each answered request.
        provider: execution provider of ONNX Runtime, such as CUDAExecutionProvider; for networks on ONNX Runtime.
        threads: threads of one inference; for networks on ONNX Runtime.
        steps: Euler steps of a flow policy.
    """
    from specact.bundle.network import Compute
    from specact.families.load import load_exchange
    from specact.server.serve import serve as run
    from specact.server.service import Service
    from specact.server.settings import Address, Limits

    address = Address(host, port, tokens, certificate, key)
    limits = Limits(
        max_batch, max_queue, max_under_way, max_wait_ms, inline_below_ms, max_robots, max_pending, max_per_address,
        access_log, log_steps,
    )  # fmt: skip
    if (bundle is None) == (policy is None):
        raise ConfigError("give either --bundle or --policy, the target to serve")
    source = str(policy or bundle)
    _refuse_unused_settings(source, provider, threads, steps)
    exchange = load_exchange(source, target=target, steps=steps, compute=Compute(provider, threads))
    service = Service(exchange, limits, address, read_token(token_file))

    def announce(url: str) -> None:
        page = url.replace("ws", "http", 1)
        remarks.print(
            f"serving {service.welcome.bundle} on {url}; status page {page}/", highlight=False, soft_wrap=True
        )

    run(service, announce)
    left = service.abandoned
    done = "everything under way was answered" if not left else f"{left} requests under way were not answered in time"
    remarks.print(f"stopped; {done}", highlight=False)


def _refuse_unused_settings(source: str, provider: str, threads: int, steps: int) -> None:
    """Refuses settings of an inference that this kind of target does not have."""
    from specact.bundle.bundle import find_bundle
    from specact.bundle.manifest import read_manifest
    from specact.families.chunks.sources import kind_of_source

    kind = kind_of_source(source)
    if kind in ("lerobot", "openpi", "code"):
        refuse_unused(
            {"provider": provider != "CPUExecutionProvider", "threads": threads != 1},
            f"is for networks on ONNX Runtime, and {source} has its own runtime; leave it out",
        )
    if not (kind == "lerobot" or (kind == "folder" and read_manifest(find_bundle(source)).kind in ("flow", "flash"))):
        refuse_unused({"steps": steps != 10}, f"is for a flow policy, and {source} is none; leave it out")


def app(args: dict[str, Any]) -> Any:
    """The server as an application of Ray Serve: ``serve run specact.cli.serve:app target=ball replicas=2``.

    Args:
        args: see :class:`~specact.server.ray_app.Arguments`. The token is the variable SPECACT_TOKEN.

    Raises:
        ConfigError: for arguments or settings that cannot be used.
    """
    from functools import partial

    from specact.bundle.network import Compute
    from specact.families.load import load_exchange
    from specact.server.ray_app import application, read_arguments

    settings = read_arguments(args)
    compute = Compute(settings.provider, settings.threads)
    load = partial(load_exchange, settings.target, steps=settings.steps, compute=compute)
    return application(load, settings, read_token(None))


def read_token(file: Path | None) -> str | None:
    """The token from a file, else from SPECACT_TOKEN, else None; never from the command line, which others can read.

    Raises:
        ConfigError: if the file cannot be read.
    """
    if file is None:
        return os.environ.get("SPECACT_TOKEN") or None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a token from {file}: {error}") from None
