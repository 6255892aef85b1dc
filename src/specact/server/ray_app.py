"""The server as an application of Ray Serve: replicas of the whole server, each with its own target and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from ray import serve
from ray.serve import Application

from specact.errors import ConfigError
from specact.server.app import create_app
from specact.server.service import Service
from specact.server.settings import ServerSettings
from specact.wire.messages import Responder


class Replica:
    """One replica of the server, in its own process, with its own target.

    Args:
        load: loads the target.
        settings: see :class:`~specact.server.settings.ServerSettings`; host and port are those of Serve's proxy.
    """

    def __init__(self, load: Callable[[], Responder], settings: ServerSettings) -> None:
        self._service = Service(load(), settings)

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._service)

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica that fails here."""
        if not self._service.batcher.ready:
            raise ConfigError("the target takes no requests")


class AppArguments(BaseModel, extra="forbid", frozen=True):
    """Arguments of an application for ``serve run`` and ``serve deploy``.

    Attributes:
        target: a bundle, whose target is served, or a policy; see ``specact serve --help``.
        steps, provider, threads: see there.
        replicas: number of servers.
        num_cpus, num_gpus: that Ray reserves for each.
        host: where Serve's proxies listen; with the default, all addresses, a token is needed.
        max_batch, max_queue, max_wait_ms, max_robots: of each replica, see
            :class:`~specact.server.settings.ServerSettings`.
    """

    target: str
    steps: int = 10
    provider: str = "CPUExecutionProvider"
    threads: int = 1
    replicas: int = 1
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    host: str = "0.0.0.0"
    max_batch: int = 16
    max_queue: int = 256
    max_wait_ms: float = 0.0
    max_robots: int = 1024


def read_arguments(args: Mapping[str, Any]) -> AppArguments:
    """The arguments of an application; on a command line all of them are strings.

    Raises:
        ConfigError: for one that is missing, unknown, or of the wrong type.
    """
    try:
        return AppArguments.model_validate(args)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(
            f"{problems}. An application takes {', '.join(AppArguments.model_fields)}, as NAME=VALUE"
        ) from None


def application(
    load: Callable[[], Responder], settings: ServerSettings, replicas: int, resources: Mapping[str, float]
) -> Application:
    """The application for ``serve.run``.

    Robots connect to Serve's proxy as to a server. A WebSocket stays with its replica; a new one goes to the less
    loaded of two replicas. Requests of one replica's robots share its batches, made by
    :class:`~specact.server.batcher.Batcher`, which takes account of robots and deadlines, unlike ``serve.batch``.

    Args:
        load: loads the target, in each replica; a module-level function, or a partial of one.
        settings: of each replica; limits of robots, queues and connections apply per replica.
        replicas: their number.
        resources: of each: ``num_cpus`` and ``num_gpus``.

    Raises:
        ConfigError: for less than one replica, or a certificate, which Serve's proxy needs instead.
    """
    if replicas < 1:
        raise ConfigError(f"replicas must be at least 1, got {replicas}")
    if settings.certificate is not None:
        raise ConfigError("the proxy of Ray Serve holds the certificate: give it ssl_certfile and ssl_keyfile")
    deployed: Any = serve.deployment(
        serve.ingress()(Replica),
        name="specact",
        num_replicas=replicas,
        # For Serve a stream counts as one ongoing request.
        max_ongoing_requests=settings.max_robots + settings.max_pending,
        ray_actor_options=dict(resources),
    )
    made: Application = deployed.bind(load, settings)
    return made
