"""The server as an application of Ray Serve: replicas of the whole server, each with a target and batches of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from specact.errors import ConfigError
from specact.server.app import create_app
from specact.server.service import Service
from specact.server.settings import ServerSettings
from specact.wire.messages import Responder


class Replica:
    """One of the servers, in a process of its own, which loads the target itself.

    Args:
        load: loads the target.
        settings: see :class:`~specact.server.settings.ServerSettings`; where it listens is the affair of Serve's proxy.
    """

    def __init__(self, load: Callable[[], Responder], settings: ServerSettings) -> None:
        self._service = Service(load(), settings)

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._service)

    async def check_health(self) -> None:
        """Asked by Serve, which puts another replica in the place of one that fails here."""
        if not self._service.batcher.ready:
            raise ConfigError("the target takes no requests")


def application(
    load: Callable[[], Responder], settings: ServerSettings, *, replicas: int = 1,
    resources: Mapping[str, float] | None = None,
) -> Application:  # fmt: skip
    """What ``serve.run`` runs.

    Robots speak to Serve's proxy as they do to a server. A WebSocket stays with the replica that took it; a new one goes
    to the replica with fewer. Requests of one replica's robots share its batches, made by
    :class:`~specact.server.batcher.Batcher`, which knows robots and deadlines; ``serve.batch`` knows neither.

    Args:
        load: loads the target, in each replica; a function of a module, or a partial of one.
        settings: of each replica. Robots, queues and connections are counted in each for itself.
        replicas: their number.
        resources: of each: ``num_cpus`` and ``num_gpus``; one CPU if None.

    Raises:
        ConfigError: for less than one replica, or settings that are Serve's own affair: certificates.
    """
    if replicas < 1:
        raise ConfigError(f"replicas must be at least 1, got {replicas}")
    if settings.certificate is not None:
        raise ConfigError("the proxy of Ray Serve holds the certificate: give it ssl_certfile and ssl_keyfile")
    deployed = serve.deployment(
        serve.ingress()(Replica),
        name="specact",
        num_replicas=replicas,
        # A stream is one request for as long as it lasts.
        max_ongoing_requests=settings.max_robots + settings.max_pending,
        ray_actor_options=dict(resources or {"num_cpus": 1}),
    )
    return deployed.bind(load, settings)
