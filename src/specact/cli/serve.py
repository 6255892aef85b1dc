"""``specact serve`` puts a bundle's target where robots can ask it."""

from __future__ import annotations

import os
from pathlib import Path

from specact.cli.output import remarks
from specact.errors import ConfigError


def serve(
    bundle: str,
    host: str = "127.0.0.1",
    port: int = 8600,
    token_file: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    max_batch: int = 16,
    max_queue: int = 256,
    max_wait_ms: float = 0.0,
    provider: str = "CPUExecutionProvider",
    threads: int = 1,
) -> None:
    """Serve a bundle's target to robots: WebSocket stream, JSON over HTTP, /healthz, /metrics and a status page.

    Args:
        bundle: path or name of a bundle.
        host: address to listen on; one that other machines can reach needs a token.
        port: port to listen on; 0 takes a free one.
        token_file: file with the bearer token that devices must show; the variable SPECACT_TOKEN if not given.
        certificate: PEM file for TLS.
        key: PEM file of its key.
        max_batch: requests answered by one inference, at most.
        max_queue: requests that may wait; more are refused as overloaded.
        max_wait_ms: how long the target waits for a batch to fill; 0 takes what is queued when it becomes free.
        provider: execution provider of ONNX Runtime, such as CUDAExecutionProvider.
        threads: threads of one inference.
    """
    from specact.policies.bundle import load_bundle
    from specact.server.serve import serve as run
    from specact.server.service import Service
    from specact.server.settings import ServerSettings

    settings = ServerSettings(
        host=host, port=port, token=read_token(token_file), certificate=certificate, key=key,
        max_batch=max_batch, max_queue=max_queue, max_wait_ms=max_wait_ms,
    )  # fmt: skip
    service = Service(load_bundle(bundle, provider=provider, threads=threads), settings)

    def announce(url: str) -> None:
        page = url.replace("ws", "http", 1)
        remarks.print(f"serving {service.bundle.name} on {url}; status page {page}/", highlight=False, soft_wrap=True)

    run(service, announce)
    remarks.print("stopped; everything under way was answered", highlight=False)


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
