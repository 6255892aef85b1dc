"""Latency of a link and a server, measured before a robot moves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specact.errors import RemoteError
from specact.observation import Window
from specact.remote.client import Client
from specact.remote.pending import send_request
from specact.rng import StepAddress
from specact.types import Miss
from specact.wire.messages import Request

_TIMEOUT_S = 2.0


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
    window = client.dialect.observation.zeros()
    rows, causes = [], []
    for number in range(requests):
        address = StepAddress(0, 0, 0, number)
        request = partial(_request, window, address)
        found = send_request(client, "infer", request, _TIMEOUT_S, wait_if_busy=True).result()
        if isinstance(found, Miss):
            causes.append(found.cause)
        else:
            times = found[1]
            rows.append((times.total, times.network, times.queue, times.target))
        time.sleep(pause_s)
    if not rows:
        raise RemoteError(f"none of {requests} requests was answered: {', '.join(sorted(set(causes)))}")
    total, network, queue, target = 1e3 * np.array(rows).T
    return Probe(total, network, queue, target, len(causes))


def _request(window: Window, address: StepAddress, identity: int) -> Request:
    return Request("infer", identity, 1e3 * _TIMEOUT_S, window, address)
