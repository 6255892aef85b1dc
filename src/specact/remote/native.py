"""A connection in specact's own protocol."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from msgspec.structs import replace

from specact.errors import RemoteError, WireError
from specact.remote.endpoint import Endpoint
from specact.remote.stream import Stream, StreamClosedError
from specact.wire.exchange import HANDSHAKE_BYTES, Contract, Request
from specact.wire.messages import (
    PATH,
    PROTOCOL,
    ErrorCode,
    Failure,
    Hello,
    Reply,
    Welcome,
    ask,
    bad,
    check_terms,
    encode,
    printable,
    read_reply,
    read_welcome,
)  # fmt: skip


class NativeConversation:
    """See :class:`~specact.remote.client.Conversation`; without a contract it asks for the server's, and for no more.

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
        self._stream = Stream(endpoint, PATH, "Bearer", timeout, limit)
        try:
            # The server may have refused and closed already; then it has said why.
            with suppress(StreamClosedError):
                self._stream.send(encode(Hello(PROTOCOL, robot, *terms)), until - time.monotonic())
            self.welcome = self._read_welcome(until)
        except (StreamClosedError, WireError) as error:
            self.close()
            raise RemoteError(f"{endpoint} refuses this device: {printable(str(error))}") from None

    @property
    def last_activity_s(self) -> float:
        return self._stream.last_activity_s

    def send(
        self, kind: str, request: Request, identity: int, deadline_ms: float, report: Mapping[str, int], timeout: float
    ) -> None:
        assert self._contract is not None, "otherwise there are no requests"
        message = ask(request, self._contract, kind, identity, deadline_ms, report, self._jpeg_quality)
        self._stream.send(encode(message), timeout)

    def receive(self, timeout: float) -> Reply | Failure | None:
        message = self._stream.receive(timeout)
        if message is None:
            return None
        if isinstance(message[0], str):
            raise bad("text messages are not part of the protocol")
        return read_reply(message[0])

    def ping(self) -> None:
        self._stream.ping()

    def close(self) -> None:
        self._stream.close()

    def _read_welcome(self, until: float) -> Welcome:
        message = self._stream.receive(max(0.0, until - time.monotonic()))
        if message is None:
            raise StreamClosedError("the server did not answer the hello in time")
        welcome = read_welcome(message[0] if isinstance(message[0], bytes) else b"")
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
