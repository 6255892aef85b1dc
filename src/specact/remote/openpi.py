"""A server of openpi's protocol as the target: its WebSocket, and what observations and actions are called there."""

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

# A reply that says how long it took is like no other.
_TIMED = b"infer_ms"
# Replies and metadata may hold more than actions.
_LARGEST = 1 << 20


class Key(NamedTuple):
    """What an array of the observation is called at the server.

    Attributes:
        name: its key; ``observation/NAME`` if empty.
        channels_first: whether a camera frame goes as ``[3, H, W]``.
    """

    name: str = ""
    channels_first: bool = False


@dataclass(frozen=True)
class OpenpiEndpoint(Endpoint):
    """Where a server of openpi's protocol listens, and what it wants to be told.

    Attributes:
        path: of its URL.
        dialect: of the policy there; its plain request is the one that the protocol has.
        keys: of the observation's arrays.
        names_endpoint: whether each request says ``endpoint: infer``, which RoboArena's servers need.
    """

    path: str = "/"
    dialect: Dialect | None = None
    keys: Mapping[str, Key] = field(default_factory=dict)
    names_endpoint: bool = False


class OpenpiTransport:
    """One WebSocket of openpi's protocol, to which our messages are translated.

    The protocol has no ids: a reply answers the one request that is outstanding, and until it has come nothing more is
    sent (``busy``). So a late reply is told from the next one without a new connection, which a server whose inference
    blocks its event loop could not accept any sooner. A reply that never comes costs the connection, after the client's
    silence. Before each request goes a ping with its id. What arrives before the pong was sent before the server read
    the request, such as a reply sent twice; like all that was not asked for it ends the connection. So does a reply
    that is the last one byte for byte, its measured time included: what is repeated later is told by nothing else.

    Args:
        endpoint: where to.
        timeout: for connecting, the opening handshake and the metadata together [s].
        max_message_bytes: a larger reply closes the transport before it is read; at least 1 MiB.

    Attributes:
        metadata: what the server said first.

    Raises:
        RemoteError: if the server cannot be reached in time, does not let us in, or does not say its metadata.
    """

    pings = False

    def __init__(self, endpoint: OpenpiEndpoint, timeout: float, max_message_bytes: int) -> None:
        until = time.monotonic() + timeout
        self._endpoint, self._dialect = endpoint, endpoint.dialect
        limit = max(max_message_bytes, _LARGEST)
        self._socket = WebSocketTransport(endpoint, timeout, limit, endpoint.path, "Api-Key")
        self.busy = False
        self.heard = time.monotonic()
        # The ids of the request that was encoded last, and of the one whose reply was received last.
        self._encoded = self._answered = 0
        self._text, self._last = False, b""
        # What is answered here: the hello, and requests that the protocol does not have.
        self._own: Fields | None = None
        try:
            self.metadata = self._read_metadata(until)
        except (TransportClosedError, WireError) as error:
            self.close()
            raise RemoteError(f"{endpoint} does not speak openpi's protocol: {error}") from None

    def encode(self, fields: Fields) -> bytes:
        self._encoded = fields.get("id", 0)
        return openpi.encode(self._observation(fields)) if fields["type"] == "infer" else b""

    def decode(self, payload: bytes) -> Fields:
        if self._own is not None:
            own, self._own = self._own, None
            return own
        if self._text:
            text = printable(payload.decode(errors="replace"))
            return reply_fields(ErrorReply(self._answered, ErrorCode.INTERNAL, text))
        return self._reply(openpi.decode(payload))

    def send(self, kind: str, payload: bytes, timeout: float) -> None:
        if kind == "hello":
            self._own = self._welcome()
        elif kind != "infer":
            refusal = f"openpi's protocol has no requests of type {kind}"
            self._own = reply_fields(ErrorReply(self._encoded, ErrorCode.BAD_MESSAGE, refusal))
        else:
            self._socket.send(kind, payload, timeout, _mark(self._encoded))
            self.busy, self.heard = True, time.monotonic()

    def receive(self, timeout: float) -> bytes | None:
        if self._own is not None:
            return b""
        message = self._socket.next(timeout if self.busy else 0.0)
        if message is None:
            return None
        if not self.busy or message.after != _mark(self._encoded):
            raise TransportClosedError("the server sent a message that answers no request, or leaves pings unanswered")
        if message.payload == self._last and _TIMED in self._last:
            raise TransportClosedError("the server sent a reply twice")
        self._last = message.payload
        self.busy, self.heard = False, time.monotonic()
        self._answered, self._text = self._encoded, message.text
        return message.payload

    def ping(self) -> None:
        """Does nothing: a pong says nothing of a server whose inference blocks it, or whose reply is lost."""

    def close(self) -> None:
        self._socket.close()

    def _read_metadata(self, until: float) -> Fields:
        message = self._socket.next(max(0.0, until - time.monotonic()))
        if message is None:
            raise TransportClosedError("it did not say its metadata in time")
        if message.text:
            raise bad(printable(message.payload.decode(errors="replace")))
        return openpi.decode(message.payload)

    def _welcome(self) -> Fields:
        """The metadata as the answer to a hello.

        Raises:
            WireError: ``mismatch``.
        """
        dialect, said = self._dialect, self.metadata
        assert dialect is not None, "a device knows what it speaks"
        differs = openpi.differing(said, dialect)
        if differs:
            raise WireError(
                ErrorCode.MISMATCH, f"device and server differ in {', '.join(differs)}; serve the pair's own target"
            )
        names = (said.get(name) for name in ("bundle", "fingerprint", "specact"))
        bundle, target, version = (printable(name, 64) if isinstance(name, str) else "" for name in names)
        return welcome_fields(Welcome(bundle or "openpi", target, version, _LARGEST, dialect.family, dialect.agreed))

    def _observation(self, fields: Fields) -> Fields:
        endpoint, dialect, ours = self._endpoint, self._dialect, "specact" in self.metadata
        assert dialect is not None, "a device knows what it speaks"
        sent: Fields = {"prompt": fields["instruction"]} if "instruction" in fields else {}
        if endpoint.names_endpoint:
            sent["endpoint"] = "infer"
        if ours:
            # So that it draws what it would on our own stream.
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
        return reply_fields(Reply(self._answered, answer, {openpi.CHUNK: _actions(said.get("actions"))}, times))


def _actions(value: Any) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
        raise bad("a reply must contain actions, an array of numbers")
    # What is too large for float32 becomes infinite and is refused.
    with np.errstate(over="ignore"):
        return value.astype(np.float32)


def _mark(identity: int) -> bytes:
    return struct.pack(">Q", identity)
