"""The WebSocket at ``/``: clients of openpi's meet the same target, batches and limits as those of our own stream."""

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

# Of an observation's names; ours are shorter.
_DEEPEST, _LONGEST_NAME = 4, 128
# Bytes (RFC 6455, 5.5.1).
_LONGEST_REASON = 123
_RESET_DONE = "reset successful"


async def serve_openpi(socket: WebSocket, service: Service) -> None:
    """Lets a client in, tells it what is served, and answers its observations one after the other."""
    try:
        caller = caller_of(socket, service)
        check_room(service)
    except WireError as error:
        service.refuse("openpi", error, peer(socket.scope))
        await socket.send_denial_response(PlainTextResponse(f"{error}\n", STATUS[ErrorCode(error.code)]))
        return
    await socket.accept()
    if openpi.chunk_of(service.dialect) is None:
        # As the reason of the close frame: the one place whose text a client of openpi's shows at this point.
        family, name = service.dialect.family, service.name
        why = f"{family} are no actions; serve the target alone: specact serve --policy {name}#target"
        service.refuse("openpi", bad(why), peer(socket.scope))
        await socket.close(CloseCode.INTERNAL_ERROR, why.encode()[:_LONGEST_REASON].decode(errors="ignore"))
        return
    websocket, connection = messages_of(socket, service.limit), connection_of(socket.scope)

    async def dismiss() -> None:
        websocket.refuse(str(unauthorized()), CloseCode.POLICY_VIOLATION)

    if caller.shown and connection is not None:
        service.connections.prove(connection)
    with service.robot(caller, "openpi", peer(socket.scope), dismiss) as sender:
        websocket.write(openpi.encode(openpi.metadata(service.welcome, service.dialect)))
        requests = Requests(service, sender, websocket, connection)
        try:
            await websocket.serve(socket, requests)
        except (WebSocketDisconnect, RuntimeError):
            return
        finally:
            requests.end()


class Requests:
    """The observations of one client, each answered before the next is taken: the protocol has no ids.

    Args:
        service: answers them.
        sender: the client.
        websocket: of the client.
        connection: pending until the first observation that can be used, or the right token.
    """

    def __init__(self, service: Service, sender: Sender, websocket: Messages, connection: Connection | None) -> None:
        self._service, self._sender, self._websocket, self._connection = service, sender, websocket, connection
        self._history = ObservationHistory(service.dialect.observation)
        self._episode = self._step = 0
        self._job: Job | None = None

    @property
    def full(self) -> bool:
        """Whether the next has to wait."""
        return self._job is not None

    def take(self, payload: bytes | None) -> None:
        """Takes on what came in one message; None for one of text."""
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
        # The border of the process: no message may cost its sender more than this.
        except Exception as error:  # noqa: BLE001
            refusal = bad(str(error)) if isinstance(error, ObservationError) else error
            self._reply(self._service.refused("openpi", refusal, {}, self._sender))
            return
        if self._connection is not None:
            self._service.connections.prove(self._connection)
        self._job = self._service.answer(fields, arrived, self._sender, self._reply)

    def end(self) -> None:
        """Forgets what is under way: the client is gone."""
        if self._job is not None:
            self._service.forget(self._job)
            self._job = None

    def _reset(self) -> None:
        self._history.reset()
        self._episode, self._step = self._episode + 1, 0
        self._websocket.write(_RESET_DONE)

    def _request(self, message: Mapping[str, Any]) -> Fields:
        """The message as one of our stream: everything after this is the same for both."""
        spec, number = self._service.dialect.observation, self._step
        window = read_window(message, spec, self._history)
        self._step += 1
        fields = {
            "v": PROTOCOL,
            "type": "infer",
            "id": number,
            # The client says none, and waits as long as it takes.
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
        self._websocket.hand_over()


def read_window(message: Mapping[str, Any], spec: ObservationSpec, history: ObservationHistory) -> Window:
    """What the target needs to see, from an observation of openpi's.

    An array is found under its own name, under ``observation/NAME`` or ``observation.NAME``, in maps within maps, and
    under LeRobot's name. The instruction is ``prompt``. Camera frames may have their channels first. An array of the
    shape ``[T, ...]`` is the window itself; otherwise it is one observation, and the history supplies those before it.

    Raises:
        WireError, ObservationError: if it cannot be used.
    """
    wanted = {lerobot_name(name): name for name in spec.fields}
    seen = dict[str, Any]()
    for key, value in _flat(message, "", _DEEPEST):
        name = wanted.get(key)
        if name in seen:
            raise bad(f"{name} is given twice, under two names that mean the same")
        if name is not None:
            seen[name] = _channels_last(value, spec[name])
    told = message.get("prompt", message.get("instruction"))
    if all(_shape(seen.get(name)) == field.window_shape for name, field in spec.fields.items()):
        arrays = {name: _numbers(seen[name], field) for name, field in spec.fields.items()}
        if spec.instruction and not isinstance(told, str):
            raise bad("the observation has no prompt; this policy needs one, as text")
        return Window(arrays, told if spec.instruction else None)
    return history.push(seen if told is None else {**seen, "instruction": told})


def _shape(value: Any) -> tuple[int, ...] | None:
    return value.shape if isinstance(value, np.ndarray) else None


def _numbers(value: Any, field: Field) -> Any:
    if field.is_image or not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        return value
    # What is too large for float32 becomes infinite and is refused.
    with np.errstate(over="ignore"):
        return value.astype(np.float32)


def _channels_last(value: Any, field: Field) -> Any:
    if not field.is_image or not isinstance(value, np.ndarray) or value.ndim < 3:
        return value
    height, width, channels = field.shape
    first = value.shape[-3:] == (channels, height, width) != field.shape
    return np.moveaxis(value, -3, -1) if first else value


def _flat(given: Mapping[str, Any], above: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Every value under its full name, as our specs write it."""
    for key, value in given.items():
        name = f"{above}{key}"
        if not isinstance(value, dict):
            yield _ours(name[:_LONGEST_NAME]), value
        elif depth > 1:
            yield from _flat(value, f"{name}.", depth - 1)


@lru_cache(1024)
def _ours(name: str) -> str:
    return lerobot_name(name.replace("/", "."))
