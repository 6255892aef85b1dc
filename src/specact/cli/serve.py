"""``specact serve`` puts a target where robots can query it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specact.cli.output import remarks
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
    """Serve a target to robots: WebSocket stream, JSON over HTTP, /healthz, /metrics and a status page.

    Args:
        bundle: path or name of a bundle, or MODULE:NAME for a pair of your own, whose target is served; or a target in
            stages, as specact split writes it.
        policy: instead, any chunk policy or target of your own: MODULE:NAME, a .toml file that describes an ONNX file,
            lerobot:PATH@HZ for what LeRobot saved and its control rate, a flow bundle, or BUNDLE#target.
        target: with --bundle, of FLASH's block alone: the flow policy that it drafts for, such as lerobot:PATH@HZ.
        host: address to listen on; one that other machines can reach needs a token.
        port: port to listen on; 0 selects a free one.
        token_file: file with the bearer token that devices must send; the variable SPECACT_TOKEN if not given.
        tokens: file with a token for each robot: a name, a space and its token on each line; read again on SIGHUP.
        certificate: PEM file for TLS; read again on SIGHUP.
        key: PEM file of its key.
        max_batch: requests answered by one inference, at most.
        max_queue: requests that may wait; more are refused as overloaded.
        max_under_way: requests of one robot that may be under way; more wait in its connection.
        max_wait_ms: how long the target waits for a batch to fill; 0 takes what is queued when it becomes free.
        inline_below_ms: a bundle's target whose inference takes less runs on the event loop; all others in a thread.
        max_robots: robots with a stream; more are refused as overloaded.
        max_pending: connections that have not sent a token or a hello yet; the oldest are closed for new ones.
        max_per_address: connections from one address.
        access_log: file for one line of JSON about each connection and each refusal; opened again on SIGHUP.
        log_steps: also one line about each answered request.
        provider: execution provider of ONNX Runtime, such as CUDAExecutionProvider.
        threads: threads of one inference.
        steps: Euler steps of a flow policy.
    """
    from specact.families.load import load_responder
    from specact.server.serve import serve as run
    from specact.server.service import Service
    from specact.server.settings import ServerSettings

    settings = ServerSettings(
        host=host, port=port, token=read_token(token_file), tokens=tokens, certificate=certificate, key=key,
        max_batch=max_batch, max_queue=max_queue, max_under_way=max_under_way, max_wait_ms=max_wait_ms,
        inline_below_ms=inline_below_ms, max_robots=max_robots, max_pending=max_pending,
        max_per_address=max_per_address, access_log=access_log, log_steps=log_steps,
    )  # fmt: skip
    if (bundle is None) == (policy is None):
        raise ConfigError("give either --bundle or --policy, the target to serve")
    responder = load_responder(str(policy or bundle), target=target, steps=steps, provider=provider, threads=threads)
    service = Service(responder, settings)

    def announce(url: str) -> None:
        page = url.replace("ws", "http", 1)
        remarks.print(f"serving {service.name} on {url}; status page {page}/", highlight=False, soft_wrap=True)

    run(service, announce)
    left = service.abandoned
    done = "everything under way was answered" if not left else f"{left} requests under way were not answered in time"
    remarks.print(f"stopped; {done}", highlight=False)


def app(args: dict[str, Any]) -> Any:
    """The server as an application of Ray Serve: ``serve run specact.cli.serve:app bundle=ball replicas=2``.

    Args:
        args: see :class:`~specact.server.ray_app.AppArguments`. The token is the variable SPECACT_TOKEN.

    Raises:
        ConfigError: for arguments or settings that cannot be used.
    """
    from functools import partial

    from specact.families.load import load_responder
    from specact.server.ray_app import application, read_arguments
    from specact.server.settings import ServerSettings

    asked = read_arguments(args)
    load = partial(load_responder, asked.target, steps=asked.steps, provider=asked.provider, threads=asked.threads)
    settings = ServerSettings(
        host=asked.host, token=read_token(None), max_batch=asked.max_batch, max_queue=asked.max_queue,
        max_wait_ms=asked.max_wait_ms, max_robots=asked.max_robots,
    )  # fmt: skip
    return application(load, settings, asked.replicas, {"num_cpus": asked.num_cpus, "num_gpus": asked.num_gpus})


def read_token(file: Path | None) -> str | None:
    """The token from a file, else from SPECACT_TOKEN, else None: never from the command line, where others see it.

    Raises:
        ConfigError: if the file cannot be read.
    """
    if file is None:
        return os.environ.get("SPECACT_TOKEN") or None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a token from {file}: {error}") from None
