"""Latency of a link and a server, measured before a robot moves."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specact.errors import RemoteError
from specact.remote.client import Client
from specact.rng import StepAddress
from specact.types import Miss
from specact.wire.exchange import Request

_TIMEOUT_MS = 2000.0


@dataclass(frozen=True)
class Probe:
    """Latencies of consecutive requests.

    Attributes:
        total_ms, network_ms, queue_ms, target_ms: of each answered request, ``[n]``.
        lost: requests without a reply within two seconds.
    """

    total_ms: NDArray[np.float64]
    network_ms: NDArray[np.float64]
    queue_ms: NDArray[np.float64]
    target_ms: NDArray[np.float64]
    lost: int

    @property
    def deadline_ms(self) -> float:
        """A recommended deadline: 1.2 times the 0.99 quantile of the total latency."""
        return 1.2 * float(np.quantile(self.total_ms, 0.99))


def probe(client: Client, requests: int, pause_s: float) -> Probe:
    """Sends requests one after the other, with a pause in between, as a robot would.

    Args:
        client: connected to the server.
        requests: number of requests, at least 1.
        pause_s: between two of them; the control period [s].

    Raises:
        RemoteError: if none of them was answered.
    """
    window = client.contract.observation.zeros()
    rows, causes = [], []
    for step in range(requests):
        request = Request(window, StepAddress(0, 0, 0, step))
        reply = client.request("infer", request, _TIMEOUT_MS, wait_if_busy=True).result()
        if isinstance(reply, Miss):
            causes.append(reply.cause)
        else:
            rows.append((reply[1].total, reply[1].network, reply[1].queue, reply[1].target))
        time.sleep(pause_s)
    if not rows:
        raise RemoteError(f"none of {requests} requests was answered: {', '.join(sorted(set(causes)))}")
    total, network, queue, target = 1e3 * np.array(rows).T
    return Probe(total, network, queue, target, len(causes))
