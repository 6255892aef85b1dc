"""One request and its reply, with every stage timed."""

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
    """A request that left when this was made.

    Args:
        client: of the server.
        kind: the request's type.
        make: the request, given its id.
        deadline_s: from now; no reply is waited for any longer.
        patient: whether to wait, if need be, until the transport is free.
    """

    def __init__(
        self, client: Client, kind: str, make: Callable[[int], Request], deadline_s: float, patient: bool = True
    ) -> None:
        self._client, self._exchange = client, client.dialect.exchanges[kind]
        self._left = time.monotonic()
        self._until = self._left + deadline_s
        self._id = client.send(
            kind,
            lambda identity: request_fields(make(identity), client.dialect.observation, client.jpeg_quality),
            deadline_s,
            patient,
        )
        self._encode_s = time.monotonic() - self._left

    @property
    def left(self) -> bool:
        """Whether it could be sent."""
        return self._id is not None

    @property
    def pending(self) -> bool:
        """Whether :meth:`reply` would have to wait."""
        return self._id is not None and time.monotonic() < self._until and not self._client.answered(self._id)

    def reply(self, asked: float) -> tuple[Arrays, OffloadTimes] | Miss:
        """Waits for the reply's arrays, until the deadline at most.

        Args:
            asked: when the reply was wanted, in seconds of the monotonic clock; what had passed before is not counted
                as waiting.
        """
        left = self._until - time.monotonic()
        if self._id is not None:
            found = self._client.wait(self._id, left)
        else:
            # Waiting until the transport was free can have used up all the time there was.
            found = "disconnected" if left > 0.0 else "deadline"
        arrived = time.monotonic()
        if isinstance(found, str):
            return Miss(found, OffloadTimes(network=arrived - asked), sent=self.left)
        try:
            reply = read_reply(found, self._exchange)
        except WireError:
            return Miss("invalid", OffloadTimes(network=arrived - asked))
        finished = time.monotonic()
        if isinstance(reply, ErrorReply):
            return Miss(_CAUSES.get(reply.code, "refused"), OffloadTimes(network=finished - asked))
        return reply.arrays, self._times(reply.times, arrived, finished, asked)

    def _times(self, server: ServerTimes, arrived: float, finished: float, asked: float) -> OffloadTimes:
        # Only durations cross the wire: what the server did not need, the network did. Nor can it have needed more than
        # there was, whatever it says.
        queue, target = server.queue_ms / 1e3, server.target_ms / 1e3
        there_was = max(0.0, arrived - self._left - self._encode_s)
        at_server = max(server.total_ms / 1e3, queue + target)
        true = min(1.0, there_was / at_server) if at_server else 1.0
        at_both_ends = self._encode_s + finished - arrived + max(0.0, true * (at_server - queue - target))
        share = min(1.0, (finished - asked) / (finished - self._left))
        return OffloadTimes(
            encode=share * at_both_ends,
            network=share * max(0.0, there_was - true * at_server),
            queue=share * true * queue,
            target=share * true * target,
        )
