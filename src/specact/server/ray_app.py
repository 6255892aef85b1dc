"""The server on Ray: each replica of an application of Ray Serve is a whole server with a port of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
import uvloop
from msgspec import Meta
from ray import serve
from ray.serve import Application
from ray.util import get_node_ip_address

from specact.errors import ConfigError
from specact.records import Count, NotNegative
from specact.server.access import Access
from specact.server.serve import bind, run
from specact.server.service import Service
from specact.server.settings import Address, Limits
from specact.wire.exchange import Exchange


class Arguments(Limits, frozen=True, kw_only=True):
    """Arguments of an application for ``serve run`` and ``serve deploy``: those of the limits, and these.

    Attributes:
        target: a bundle, whose target is served, or a policy; see ``specact serve --help``.
        steps, provider, threads: see there.
        replicas: number of servers.
        num_cpus, num_gpus: that Ray reserves for each.
        host: address on which each server listens; one that other machines can reach needs a token.
        port: of the first server of a machine; the next ones take the following free ports.
    """

    target: str
    steps: Count | None = None
    provider: str = "CPUExecutionProvider"
    threads: Count = 1
    replicas: Count = 1
    num_cpus: NotNegative = 1.0
    num_gpus: NotNegative = 0.0
    host: str = "0.0.0.0"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8600


class Replica:
    """One server, in its own process.

    Args:
        load: loads the target.
        settings: of the application.
        token: that devices must send, or None.
    """

    def __init__(self, load: Callable[[], Exchange[Any]], settings: Arguments, token: str | None) -> None:
        exchange, last = load(), min(65535, settings.port + settings.replicas - 1)
        for port in range(settings.port, last + 1):
            self._service = Service(exchange, settings, Address(settings.host, port), token)
            try:
                listener = bind(self._service)
                break
            except ConfigError:
                if port == last:
                    raise
        self._service.batcher.warm_up()
        host = settings.host if Address(settings.host).is_loopback() else get_node_ip_address()
        self._url = f"ws://{host}:{port}"
        serve_it = partial(uvloop.run, run(self._service, listener, lambda url: None))
        threading.Thread(target=serve_it, name="specact server", daemon=True).start()

    async def __call__(self, request: Any) -> dict[str, str]:
        """The address of this server, for a robot that asks Serve's proxy for one."""
        return {"url": self._url}

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica that fails here."""
        if not self._service.ready:
            raise ConfigError("the target takes no requests")


def read_arguments(args: Mapping[str, Any]) -> Arguments:
    """The arguments of an application; on a command line all of them are strings.

    Raises:
        ConfigError: for one that is missing, unknown, or not allowed.
    """
    try:
        return msgspec.convert(dict(args), Arguments, strict=False)
    except msgspec.ValidationError as error:
        names = ", ".join(Arguments.__struct_fields__)
        raise ConfigError(f"{error}. An application takes {names}, as NAME=VALUE") from None


def application(load: Callable[[], Exchange[Any]], settings: Arguments, token: str | None) -> Application:
    """The application for ``serve.run``: Ray places the servers, and replaces those that fail.

    Robots connect to a server itself, so that no message passes through Ray: to an address from Serve's proxy
    (``GET /`` answers ``{"url": "ws://..."}``), or to a reverse proxy. Each replica calls ``load``, a module-level
    function or a partial of one; devices must send the ``token``, if there is one.

    Raises:
        ConfigError: if other machines could connect without a token.
    """
    Access(token, Address(settings.host))
    deployed: Any = serve.deployment(
        Replica,
        name="specact",
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
    )
    made: Application = deployed.bind(load, settings, token)
    return made
