"""A connection in specact's own protocol."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from msgspec.structs import replace

from specact.errors import RemoteError, WireError
from specact.remote.endpoint import Endpoint
from specact.remote.stream import Stream, StreamClosedError
from specact.wire import messages
from specact.wire.exchange import HANDSHAKE_BYTES, Contract, Request
from specact.wire.messages import ErrorCode, Failure, Reply, Welcome, bad, check_terms, printable


class NativeConversation:
    """A connection after its handshake, used by one thread at a time; without a contract it asks for the server's.

    Its methods raise StreamClosedError if it has ended, and :meth:`receive` WireError for an unreadable message.

    Attributes:
        single: whether an outstanding reply blocks further requests.
        welcome: the server's.

    Raises:
        RemoteError: if the server cannot be reached in time, or refuses this device, or is not the one expected.
    """

    single = False

    def __init__(
        self, endpoint: Endpoint, timeout: float, robot: str, contract: Contract | None, jpeg_quality: int | None = None
    ) -> None:
        until, self._contract, self._jpeg_quality = time.monotonic() + timeout, contract, jpeg_quality
        limit = HANDSHAKE_BYTES if contract is None else contract.max_message_bytes
        terms = () if contract is None else (contract.family, dict(contract.spec))
        self._stream = Stream(endpoint, messages.PATH, "Bearer", timeout, limit)
        try:
            # The server may have refused and closed already; then it has said why.
            with suppress(StreamClosedError):
                self._stream.send(
                    messages.encode(messages.Hello(messages.PROTOCOL, robot, *terms)), until - time.monotonic()
                )
            self.welcome = self._read_welcome(until)
        except (StreamClosedError, WireError) as error:
            self.close()
            raise RemoteError(f"{endpoint} refuses this device: {printable(str(error))}") from None

    @property
    def last_activity_s(self) -> float:
        """When it was last known to be alive, in seconds of the monotonic clock."""
        return self._stream.last_activity_s

    def send(
        self, kind: str, request: Request, identity: int, deadline_ms: float, report: Mapping[str, int], timeout: float
    ) -> None:
        """Sends a request within ``timeout`` seconds."""
        assert self._contract is not None, "otherwise there are no requests"
        message = messages.ask(request, self._contract, kind, identity, deadline_ms, report, self._jpeg_quality)
        self._stream.send(messages.encode(message), timeout)

    def receive(self, timeout: float) -> Reply | Failure | None:
        """The next reply, or None if none arrives within ``timeout`` seconds; 0 does not block."""
        message = self._stream.receive(timeout)
        if message is None:
            return None
        if isinstance(message[0], str):
            raise bad("text messages are not part of the protocol")
        return messages.read_reply(message[0])

    def ping(self) -> None:
        """Asks for a sign of life."""
        self._stream.ping()

    def close(self) -> None:
        """Closes it immediately; idempotent."""
        self._stream.close()

    def _read_welcome(self, until: float) -> Welcome:
        message = self._stream.receive(max(0.0, until - time.monotonic()))
        if message is None:
            raise StreamClosedError("the server did not answer the hello in time")
        welcome = messages.read_welcome(message[0] if isinstance(message[0], bytes) else b"")
        if self._contract is not None:
            check_terms(self._contract, welcome.family, welcome.spec)
            # A server may offer more.
            if any(welcome.kinds.get(name) != arrays for name, arrays in self._contract.describe().items()):
                raise WireError(
                    ErrorCode.MISMATCH,
                    "device and server differ in the arrays of their messages; install the same version of specact, "
                    "or of the family, on both",
                )
        texts = {name: printable(getattr(welcome, name), 64) for name in ("bundle", "target", "version", "family")}
        return replace(welcome, **texts)
