"""Joins this process to a Ray cluster, or starts one on this machine."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from specact.errors import ConfigError

HERE = "here"
# Ray's own timeout is minutes.
_CONNECT_TIMEOUT_S = 5.0


def check_place(on: str) -> None:
    """Refuses anything but ``here``, ``ray`` and ``ray:ADDRESS``.

    Raises:
        ConfigError: for another place.
    """
    if on != HERE and on.partition(":")[0] != "ray":
        raise ConfigError(f"work is done on here, ray, or ray:ADDRESS with the address of a cluster, not on {on!r}")


def join(on: str, cpus: int | None = None) -> bool:
    """Joins a cluster, unless this process is already in one.

    Args:
        on: ``ray:HOST:PORT``, with the address of the cluster's head, or ``ray:auto`` for that of this machine or of
            the current Ray job; or ``ray`` for a new cluster on this machine, not reachable from others, without
            dashboard and usage reports, which ends with this process.
        cpus: of a new cluster; None for all of this machine.

    Returns:
        Whether a cluster was joined; leave it with ``ray.shutdown``.

    Raises:
        ConfigError: if there is no such cluster, or it refuses the connection.
    """
    address = on.partition(":")[2]
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Read when Ray is imported: without it Ray's processes listen on all addresses.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        options |= {"num_cpus": cpus, "include_dashboard": False}

    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        return False
    try:
        if address not in ("", "auto"):
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
        ray.init(address=address or "local", **options)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"cannot join a Ray cluster ({on}): {error}; on one of its machines give the address of its head, such as "
            "ray:10.0.0.5:6379, or ray:auto"
        ) from None
    return True
