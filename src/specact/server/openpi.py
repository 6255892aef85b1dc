"""The WebSocket at ``/`` for openpi's clients, with the same target, batches and limits as specact's own stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from starlette.responses import PlainTextResponse
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.frames import CloseCode

from specact.errors import ObservationError, WireError
from specact.observation import Field, ObservationHistory, ObservationSpec, Window, lerobot_name
from specact.server.access import unauthorized
from specact.server.batcher import Job
from specact.server.connections import Connection, connection_of
from specact.server.http import STATUS, caller_of, peer
from specact.server.messages import Messages, messages_of
from specact.server.service import Fields, Sender, Service
from specact.server.stream import check_room
from specact.wire import openpi
from specact.wire.checks import PROTOCOL, ErrorCode, bad
from specact.wire.messages import MAX_DEADLINE_MS

# Limits of an observation's keys.
_MAX_DEPTH, _MAX_NAME_CHARS = 4, 128
# Bytes (RFC 6455, 5.5.1).
_MAX_REASON_BYTES = 123
_RESET_DONE = "reset successful"


async def serve_openpi(socket: WebSocket, service: Service) -> None:
    """Authenticates a client, sends the metadata, and answers its observations one after the other."""
    try:
        caller = caller_of(socket, service)
        check_room(service)
    except WireError as error:
        service.record_error("openpi", error, peer(socket.scope))
        await socket.send_denial_response(PlainTextResponse(f"{error}\n", STATUS[ErrorCode(error.code)]))
        return
    await socket.accept()
    if openpi.chunk_of(service.dialect) is None:
        # In the close frame's reason, which is all that openpi's client shows at this point.
        family, name = service.dialect.family, service.name
        why = f"{family} are no actions; serve the target alone: specact serve --policy {name}#target"
        service.record_error("openpi", bad(why), peer(socket.scope))
        await socket.close(CloseCode.INTERNAL_ERROR, why.encode()[:_MAX_REASON_BYTES].decode(errors="ignore"))
        return
    websocket, connection = messages_of(socket, service.limit), connection_of(socket.scope)

    async def disconnect() -> None:
        websocket.refuse(str(unauthorized()), CloseCode.POLICY_VIOLATION)

    if caller.credentials and connection is not None:
        service.connections.admit(connection)
    with service.robot(caller, "openpi", peer(socket.scope), disconnect) as sender:
        websocket.write(openpi.encode(openpi.metadata(service.welcome, service.dialect)))
        requests = Requests(service, sender, websocket, connection)
        try:
            await websocket.serve(socket, requests)
        except (WebSocketDisconnect, RuntimeError):
            return
        finally:
            requests.end()


class Requests:
    """The observations of one client, answered one at a time because the protocol has no ids.

    Args:
        service: answers them.
        sender: the client.
        websocket: of the client.
        connection: pending until the first valid observation, or the right token.
    """

    def __init__(self, service: Service, sender: Sender, websocket: Messages, connection: Connection | None) -> None:
        self._service, self._sender, self._websocket, self._connection = service, sender, websocket, connection
        self._history = ObservationHistory(service.dialect.observation)
        self._episode = self._step = 0
        self._job: Job | None = None

    @property
    def full(self) -> bool:
        """Whether a request is in flight, so that the next has to wait."""
        return self._job is not None

    def take(self, payload: bytes | None) -> None:
        """Handles a message; None for a text message."""
        arrived = time.monotonic()
        try:
            if payload is None:
                raise bad("messages are binary frames of msgpack, this one is text")
            message = openpi.decode(payload)
            endpoint = message.get("endpoint", "infer")
            if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
                raise bad(f"endpoint must be infer or reset, got {ascii(endpoint)[:32]}")
            if endpoint == "reset":
                self._reset()
                return
            fields = self._request(message)
        # Process boundary: any failure becomes an error reply.
        except Exception as error:  # noqa: BLE001
            refusal = bad(str(error)) if isinstance(error, ObservationError) else error
            self._reply(self._service.error_reply("openpi", refusal, {}, self._sender))
            return
        if self._connection is not None:
            self._service.connections.admit(self._connection)
        self._job = self._service.answer(fields, arrived, self._sender, self._reply)

    def end(self) -> None:
        """Cancels the request in flight, after the client has disconnected."""
        if self._job is not None:
            self._service.cancel(self._job)
            self._job = None

    def _reset(self) -> None:
        self._history.reset()
        self._episode, self._step = self._episode + 1, 0
        self._websocket.write(_RESET_DONE)

    def _request(self, message: Mapping[str, Any]) -> Fields:
        """The message converted to a request of specact's stream."""
        spec, number = self._service.dialect.observation, self._step
        window = read_window(message, spec, self._history)
        self._step += 1
        fields = {
            "v": PROTOCOL,
            "type": "infer",
            "id": number,
            # The protocol has no deadline.
            "deadline_ms": MAX_DEADLINE_MS,
            "observation": window.arrays,
            "address": message.get("address", [0, 0, self._episode, number]),
        }
        return fields if window.instruction is None else fields | {"instruction": window.instruction}

    def _reply(self, fields: Fields) -> None:
        self._job = None
        if fields["type"] == "error":
            self._websocket.refuse(fields["message"], CloseCode.INTERNAL_ERROR)
            return
        timing = {"infer_ms": fields["times"]["target_ms"]}
        self._websocket.write(openpi.encode({"actions": fields[openpi.CHUNK], "server_timing": timing}))
        self._websocket.deliver()


def read_window(message: Mapping[str, Any], spec: ObservationSpec, history: ObservationHistory) -> Window:
    """The target's window from an openpi observation.

    Accepted keys of an array are its own name, ``observation/NAME`` or ``observation.NAME``, nested maps, and LeRobot's
    name. The instruction is ``prompt``. Camera frames may have their channels first. Arrays of the shape ``[T, ...]``
    are the window itself; otherwise they are one observation, and the history supplies the earlier ones.

    Raises:
        WireError, ObservationError: if it cannot be used.
    """
    wanted = {lerobot_name(name): name for name in spec.fields}
    seen = dict[str, Any]()
    for key, value in _flatten(message, "", _MAX_DEPTH):
        name = wanted.get(key)
        if name in seen:
            raise bad(f"{name} is given twice, under two names that mean the same")
        if name is not None:
            seen[name] = _channels_last(value, spec[name])
    instruction = message.get("prompt", message.get("instruction"))
    if all(_shape(seen.get(name)) == field.window_shape for name, field in spec.fields.items()):
        arrays = {name: _as_float32(seen[name], field) for name, field in spec.fields.items()}
        if spec.instruction and not isinstance(instruction, str):
            raise bad("the observation has no prompt; this policy needs one, as text")
        return Window(arrays, instruction if spec.instruction else None)
    return history.push(seen if instruction is None else {**seen, "instruction": instruction})


def _shape(value: Any) -> tuple[int, ...] | None:
    return value.shape if isinstance(value, np.ndarray) else None


def _as_float32(value: Any, field: Field) -> Any:
    if field.is_image or not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        return value
    # Numbers beyond float32 become infinite and are refused.
    with np.errstate(over="ignore"):
        return value.astype(np.float32)


def _channels_last(value: Any, field: Field) -> Any:
    if not field.is_image or not isinstance(value, np.ndarray) or value.ndim < 3:
        return value
    height, width, channels = field.shape
    first = value.shape[-3:] == (channels, height, width) != field.shape
    return np.moveaxis(value, -3, -1) if first else value


def _flatten(given: Mapping[str, Any], above: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Every value of nested maps by its canonical name."""
    for key, value in given.items():
        name = f"{above}{key}"
        if not isinstance(value, dict):
            yield _canonical_name(name[:_MAX_NAME_CHARS]), value
        elif depth > 1:
            yield from _flatten(value, f"{name}.", depth - 1)


@lru_cache(1024)
def _canonical_name(name: str) -> str:
    return lerobot_name(name.replace("/", "."))
