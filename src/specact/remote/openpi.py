"""A server of openpi's protocol as the target: its WebSocket, and its names of observations and actions."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specact.errors import RemoteError, WireError
from specact.remote.transport import Endpoint, Fields, TransportClosedError
from specact.remote.websocket import WebSocketTransport
from specact.wire import openpi
from specact.wire.checks import ErrorCode, bad, printable
from specact.wire.dialect import Dialect
from specact.wire.handshake import Welcome, welcome_fields
from specact.wire.messages import ErrorReply, Reply, ServerTimes, reply_fields

# A reply with its inference time is unique.
_TIMING_KEY = b"infer_ms"
# Replies and metadata may contain more than actions.
_MAX_MESSAGE_BYTES = 1 << 20


class Key(NamedTuple):
    """Name and layout of an array of the observation at the server.

    Attributes:
        name: its key; ``observation/NAME`` if empty.
        channels_first: whether a camera frame is sent as ``[3, H, W]``.
    """

    name: str = ""
    channels_first: bool = False


@dataclass(frozen=True)
class OpenpiEndpoint(Endpoint):
    """Address of a server of openpi's protocol, and its format of requests.

    Attributes:
        path: of its URL.
        dialect: of its policy; the protocol supports its ``infer`` requests only.
        keys: of the observation's arrays.
        names_endpoint: whether each request contains ``endpoint: infer``, which RoboArena's servers need.
    """

    path: str = "/"
    dialect: Dialect | None = None
    keys: Mapping[str, Key] = field(default_factory=dict)
    names_endpoint: bool = False


class OpenpiTransport:
    """One WebSocket of openpi's protocol, to which specact's messages are translated.

    The protocol has no request ids: a reply belongs to the only outstanding request, and nothing is sent before it has
    arrived (``busy``). This separates a late reply from the next one without a reconnection, which a server whose
    inference blocks its event loop could not accept sooner. If a reply never arrives, the connection is closed after
    the client's ``silence_s``. Each request is preceded by a ping with its id. A message that arrives before the pong
    was sent before the server read the request, for example a duplicate reply; like any unsolicited message it closes
    the connection. So does a reply that equals the last one byte for byte, including its measured time, which detects
    later duplicates.

    Args:
        endpoint: the server.
        timeout: for connecting, the opening handshake and the metadata together [s].
        max_message_bytes: a larger reply closes the transport before it is read; at least 1 MiB.

    Attributes:
        metadata: the server's first message.

    Raises:
        RemoteError: if the server cannot be reached in time, refuses the connection, or does not send its metadata.
    """

    pings = False

    def __init__(self, endpoint: OpenpiEndpoint, timeout: float, max_message_bytes: int) -> None:
        until = time.monotonic() + timeout
        self._endpoint, self._dialect = endpoint, endpoint.dialect
        limit = max(max_message_bytes, _MAX_MESSAGE_BYTES)
        self._socket = WebSocketTransport(endpoint, timeout, limit, endpoint.path, "Api-Key")
        self.busy = False
        self.last_activity_s = time.monotonic()
        # Ids of the last encoded request, and of the request whose reply was received last.
        self._request_id = self._reply_id = 0
        self._text, self._last_payload = False, b""
        # Reply generated here: to the hello, and to requests that the protocol does not support.
        self._local_reply: Fields | None = None
        try:
            self.metadata = self._read_metadata(until)
        except (TransportClosedError, WireError) as error:
            self.close()
            raise RemoteError(f"{endpoint} does not speak openpi's protocol: {printable(str(error))}") from None

    def encode(self, fields: Fields) -> bytes:
        self._request_id = fields.get("id", 0)
        return openpi.encode(self._observation(fields)) if fields["type"] == "infer" else b""

    def decode(self, payload: bytes) -> Fields:
        if self._local_reply is not None:
            own, self._local_reply = self._local_reply, None
            return own
        if self._text:
            text = printable(payload.decode(errors="replace"))
            return reply_fields(ErrorReply(self._reply_id, ErrorCode.INTERNAL, text))
        return self._reply(openpi.decode(payload))

    def send(self, kind: str, payload: bytes, timeout: float) -> None:
        if kind == "hello":
            self._local_reply = self._welcome()
        elif kind != "infer":
            refusal = f"openpi's protocol has no requests of type {kind}"
            self._local_reply = reply_fields(ErrorReply(self._request_id, ErrorCode.BAD_MESSAGE, refusal))
        else:
            self._socket.send(kind, payload, timeout, _ping_payload(self._request_id))
            self.busy, self.last_activity_s = True, time.monotonic()

    def receive(self, timeout: float) -> bytes | None:
        if self._local_reply is not None:
            return b""
        message = self._socket.next(timeout if self.busy else 0.0)
        if message is None:
            return None
        if not self.busy or message.last_pong != _ping_payload(self._request_id):
            raise TransportClosedError("the server sent a message that answers no request, or leaves pings unanswered")
        if message.payload == self._last_payload and _TIMING_KEY in self._last_payload:
            raise TransportClosedError("the server sent a reply twice")
        self._last_payload = message.payload
        self.busy, self.last_activity_s = False, time.monotonic()
        self._reply_id, self._text = self._request_id, message.text
        return message.payload

    def ping(self) -> None:
        """Does nothing: a pong does not show whether inference blocks the server or its reply is lost."""

    def close(self) -> None:
        self._socket.close()

    def _read_metadata(self, until: float) -> Fields:
        message = self._socket.next(max(0.0, until - time.monotonic()))
        if message is None:
            raise TransportClosedError("it did not say its metadata in time")
        if message.text:
            raise bad(message.payload.decode(errors="replace"))
        return openpi.decode(message.payload)

    def _welcome(self) -> Fields:
        """The metadata as the answer to a hello.

        Raises:
            WireError: ``mismatch``.
        """
        dialect, said = self._dialect, self.metadata
        assert dialect is not None, "a device knows what it speaks"
        differs = openpi.metadata_differences(said, dialect)
        if differs:
            raise WireError(
                ErrorCode.MISMATCH, f"device and server differ in {', '.join(differs)}; serve the pair's own target"
            )
        names = (said.get(name) for name in ("bundle", "fingerprint", "specact"))
        bundle, target, version = (printable(name, 64) if isinstance(name, str) else "" for name in names)
        return welcome_fields(
            Welcome(bundle or "openpi", target, version, _MAX_MESSAGE_BYTES, dialect.family, dialect.agreed)
        )

    def _observation(self, fields: Fields) -> Fields:
        endpoint, dialect, ours = self._endpoint, self._dialect, "specact" in self.metadata
        assert dialect is not None, "a device knows what it speaks"
        sent: Fields = {"prompt": fields["instruction"]} if "instruction" in fields else {}
        if endpoint.names_endpoint:
            sent["endpoint"] = "infer"
        if ours:
            # A specact server then samples as on its own stream.
            sent["address"] = fields["address"]
        for name, array in fields["observation"].items():
            key = endpoint.keys.get(name, Key())
            if dialect.observation[name].history == 1 and not ours:
                array = array[0]
            called = key.name or f"observation/{name.replace('.', '/')}"
            sent[called] = np.moveaxis(array, -1, -3) if key.channels_first else array
        return sent

    def _reply(self, said: Fields) -> Fields:
        dialect = self._dialect
        assert dialect is not None, "a device knows what it speaks"
        timing = said.get("server_timing")
        spent = timing.get("infer_ms") if isinstance(timing, dict) else None
        infer_ms = float(spent) if isinstance(spent, int | float | np.number) and 0.0 <= spent < 1e9 else 0.0
        times = ServerTimes(0.0, infer_ms, infer_ms, 1)
        answer = dialect.exchanges["infer"].answer
        return reply_fields(Reply(self._reply_id, answer, {openpi.CHUNK: _actions(said.get("actions"))}, times))


def _actions(value: Any) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
        raise bad("a reply must contain actions, an array of numbers")
    # Numbers beyond float32 become infinite and are refused.
    with np.errstate(over="ignore"):
        return value.astype(np.float32)


def _ping_payload(identity: int) -> bytes:
    return struct.pack(">Q", identity)
