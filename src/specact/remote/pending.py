"""One request and its reply, with the time of every stage."""

from __future__ import annotations

import time
from collections.abc import Callable

from specact.errors import WireError
from specact.remote.client import Client
from specact.types import Cause, Miss, OffloadTimes
from specact.verification import Pending
from specact.wire.checks import ErrorCode
from specact.wire.dialect import Arrays
from specact.wire.messages import ErrorReply, Request, ServerTimes, read_reply, request_fields

_CAUSES: dict[ErrorCode, Cause] = {ErrorCode.OVERLOADED: "overloaded", ErrorCode.EXPIRED: "expired"}


def send_request(
    client: Client, kind: str, make: Callable[[int], Request], deadline_s: float, *, wait_if_busy: bool = False
) -> Pending[tuple[Arrays, OffloadTimes]]:
    """Sends a request; its result is the reply's arrays and the time of every stage.

    Args:
        client: of the server.
        kind: the request's type.
        make: the request from its id.
        deadline_s: for the reply, from now.
        wait_if_busy: see :meth:`~specact.remote.client.Client.send`.
    """
    exchange, started = client.dialect.exchanges[kind], time.monotonic()
    until = started + deadline_s
    identity = client.send(
        kind,
        lambda number: request_fields(make(number), client.dialect.observation, client.jpeg_quality),
        deadline_s,
        wait_if_busy,
    )
    encoded = time.monotonic()

    def done() -> bool:
        return identity is None or time.monotonic() >= until or client.has_reply(identity)

    def result() -> tuple[Arrays, OffloadTimes] | Miss:
        left = until - time.monotonic()
        if identity is not None:
            reply_fields = client.wait(identity, left)
        else:
            # Waiting for a busy transport may have used up the deadline.
            reply_fields = "disconnected" if left > 0.0 else "deadline"
        arrived = time.monotonic()
        if isinstance(reply_fields, str):
            return Miss(reply_fields, OffloadTimes(network=arrived - started), sent=identity is not None)
        try:
            reply = read_reply(reply_fields, exchange)
        except WireError:
            return Miss("invalid", OffloadTimes(network=arrived - started))
        read = time.monotonic()
        if isinstance(reply, ErrorReply):
            return Miss(_CAUSES.get(reply.code, "refused"), OffloadTimes(network=read - started))
        return reply.arrays, _stages(reply.times, encoded - started + read - arrived, arrived - encoded)

    return Pending(result, done, sent=identity is not None)


def _stages(server: ServerTimes, coding: float, elapsed: float) -> OffloadTimes:
    """The time of every stage [s]; the server reports durations only, so the rest of the elapsed time is the network's.

    Reported durations are scaled down if they exceed the elapsed time.
    """
    queue, target, elapsed = server.queue_ms / 1e3, server.target_ms / 1e3, max(0.0, elapsed)
    at_server = max(server.total_ms / 1e3, queue + target)
    scale = min(1.0, elapsed / at_server) if at_server else 1.0
    return OffloadTimes(
        encode=coding + max(0.0, scale * (at_server - queue - target)),
        network=max(0.0, elapsed - scale * at_server),
        queue=scale * queue,
        target=scale * target,
    )
