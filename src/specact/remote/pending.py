"""One request and its reply, with the time of every stage."""

from __future__ import annotations

import time
from collections.abc import Callable

from specact.errors import WireError
from specact.remote.client import Client
from specact.types import Cause, Miss, OffloadTimes
from specact.wire.checks import ErrorCode
from specact.wire.dialect import Arrays
from specact.wire.messages import ErrorReply, Request, ServerTimes, read_reply, request_fields

_CAUSES: dict[ErrorCode, Cause] = {ErrorCode.OVERLOADED: "overloaded", ErrorCode.EXPIRED: "expired"}


class PendingRequest:
    """A request that is sent on construction.

    Args:
        client: of the server.
        kind: the request's type.
        make: the request from its id.
        deadline_s: for the reply, from now.
        wait_if_busy: see :meth:`~specact.remote.client.Client.send`.
    """

    def __init__(
        self, client: Client, kind: str, make: Callable[[int], Request], deadline_s: float, wait_if_busy: bool = True
    ) -> None:
        self._client, self._exchange = client, client.dialect.exchanges[kind]
        self._sent_s = time.monotonic()
        self._until = self._sent_s + deadline_s
        self._id = client.send(
            kind,
            lambda identity: request_fields(make(identity), client.dialect.observation, client.jpeg_quality),
            deadline_s,
            wait_if_busy,
        )
        self._encode_s = time.monotonic() - self._sent_s

    @property
    def sent(self) -> bool:
        """Whether it could be sent."""
        return self._id is not None

    @property
    def pending(self) -> bool:
        """Whether :meth:`reply` would block."""
        return self._id is not None and time.monotonic() < self._until and not self._client.has_reply(self._id)

    def reply(self, asked: float) -> tuple[Arrays, OffloadTimes] | Miss:
        """Waits for the reply's arrays, until the deadline at most.

        Args:
            asked: when the caller started to wait, in seconds of the monotonic clock; time before it is not counted.
        """
        left = self._until - time.monotonic()
        if self._id is not None:
            found = self._client.wait(self._id, left)
        else:
            # Waiting for a busy transport may have used up the deadline.
            found = "disconnected" if left > 0.0 else "deadline"
        arrived = time.monotonic()
        if isinstance(found, str):
            return Miss(found, OffloadTimes(network=arrived - asked), sent=self.sent)
        try:
            reply = read_reply(found, self._exchange)
        except WireError:
            return Miss("invalid", OffloadTimes(network=arrived - asked))
        finished = time.monotonic()
        if isinstance(reply, ErrorReply):
            return Miss(_CAUSES.get(reply.code, "refused"), OffloadTimes(network=finished - asked))
        return reply.arrays, self._times(reply.times, arrived, finished, asked)

    def _times(self, server: ServerTimes, arrived: float, finished: float, asked: float) -> OffloadTimes:
        # The server reports durations only: the rest of the elapsed time is the network's. Reported durations are
        # scaled down if they exceed the elapsed time.
        queue, target = server.queue_ms / 1e3, server.target_ms / 1e3
        elapsed = max(0.0, arrived - self._sent_s - self._encode_s)
        at_server = max(server.total_ms / 1e3, queue + target)
        scale = min(1.0, elapsed / at_server) if at_server else 1.0
        at_both_ends = self._encode_s + finished - arrived + max(0.0, scale * (at_server - queue - target))
        share = min(1.0, (finished - asked) / (finished - self._sent_s))
        return OffloadTimes(
            encode=share * at_both_ends,
            network=share * max(0.0, elapsed - scale * at_server),
            queue=share * scale * queue,
            target=share * scale * target,
        )
