"""A server of openpi's protocol as the target: its WebSocket, and its names of observations and actions."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

from specact.remote.endpoint import Counts, Endpoint, Stream, StreamClosedError
from specact.wire import openpi
from specact.wire.exchange import Contract, Request
from specact.wire.messages import PROTOCOL, ErrorCode, Failure, Reply, Welcome, bad, check_terms, printable

_MAX_MESSAGE_BYTES = 1 << 20  # replies and metadata may contain more than actions


class Key(NamedTuple):
    """Name and layout of an array of the observation at the server."""

    name: str = ""  # its key; observation/NAME if empty
    channels_first: bool = False  # whether a camera frame is sent as [3, H, W]


@dataclass(frozen=True)
class OpenpiEndpoint(Endpoint):
    """Address of a server of openpi's protocol, and its format of requests."""

    path: str = "/"
    keys: Mapping[str, Key] = field(default_factory=dict)  # of the observation's arrays
    names_endpoint: bool = False  # whether each request contains ``endpoint: infer``, which RoboArena's servers need


class OpenpiConversation(Stream):
    """A connection over openpi's protocol, whose requests are all of the kind ``infer``, and without ids.

    So nothing is sent before the last reply has arrived. Each request is preceded by a ping with its number: a message
    before that pong is a duplicate, and ends the connection; so does a reply that equals the last one byte for byte,
    its measured time included. ``metadata`` is the server's first message.
    """

    single, scheme, refusal = True, "Api-Key", "does not speak openpi's protocol, or serves another policy"

    def __init__(self, endpoint: OpenpiEndpoint, timeout: float, contract: Contract | None = None) -> None:
        self._format, self._contract = endpoint, cast(Contract, contract)  # without one there are no requests
        self._outstanding: int | None = None
        self._last_message = bytearray()
        limit = max(_MAX_MESSAGE_BYTES, contract.max_message_bytes if contract else 0)
        super().__init__(endpoint, endpoint.path, timeout, limit)
        # A pong alone, of ten bytes, wakes nobody: it is read with the reply. Not every system can do that.
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 11)

    def ask(self, kind: str, request: Request, number: int, deadline_ms: float, report: Counts, timeout: float) -> None:
        self._outstanding, self.alive_s = number, time.monotonic()
        self.send(openpi.encode(self._observation(request)), timeout, number.to_bytes(8))

    def reply(self, timeout: float) -> Reply | Failure | None:
        message, number = self.receive(timeout), self._outstanding
        if message is None:
            return None
        if number is None or self.pong != number.to_bytes(8):
            raise StreamClosedError("the server sent a message that answers no request, or leaves pings unanswered")
        self._outstanding, self.alive_s = None, time.monotonic()
        if isinstance(message, str):
            return Failure(number, ErrorCode.INTERNAL, message.strip().rpartition("\n")[2])
        # One with its inference time is unique.
        if message == self._last_message and b"infer_ms" in message:
            raise StreamClosedError("the server sent a reply twice")
        self._last_message = message
        return self._reply(openpi.decode(message), number)

    def _read_welcome(self, message: bytearray | str) -> Welcome:
        if isinstance(message, str):
            raise StreamClosedError(message.strip().rpartition("\n")[2])  # of a model that may be loaded later
        contract: Contract | None = self._contract
        self.metadata = said = openpi.decode(message)
        names = (said.get(name) for name in ("bundle", "fingerprint", "specact"))
        bundle, target, version = (printable(name, 64) if isinstance(name, str) else "" for name in names)
        family, spec = ("", {}) if contract is None else (contract.family, dict(contract.spec))
        if contract is not None and "specact" in said:
            check_terms(replace(contract, spec=openpi.metadata(contract), kinds={}), family, said, target)
        return Welcome(PROTOCOL, bundle or "openpi", target, version, _MAX_MESSAGE_BYTES, family, spec, {})

    def _observation(self, request: Request) -> dict[str, Any]:
        spec, window, ours = self._contract.observation, request.window, "specact" in self.metadata
        sent: dict[str, Any] = {"prompt": window.instruction} if spec.instruction else {}
        sent |= {"endpoint": "infer"} if self._format.names_endpoint else {}
        sent |= {"address": list(request.address)} if ours else {}  # it samples as on its own stream
        for name, entry in spec.fields.items():
            key = self._format.keys.get(name, Key())
            array = window.arrays[name][-1 if entry.history == 1 and not ours else slice(-entry.history, None)]
            array = np.moveaxis(array, -1, -3) if key.channels_first else array
            sent[key.name or f"observation/{name.replace('.', '/')}"] = array
        return sent

    def _reply(self, said: dict[str, Any], number: int) -> Reply:
        timing, actions = said.get("server_timing"), said.get("actions")
        spent = timing.get("infer_ms") if isinstance(timing, dict) else None
        infer_ms = float(spent) if isinstance(spent, int | float | np.number) and 0.0 <= spent < 1e9 else 0.0
        if not isinstance(actions, np.ndarray) or actions.dtype.kind not in "fiu":
            raise bad("a reply must contain actions, an array of numbers")
        # Numbers beyond float32 become infinite and are refused.
        with np.errstate(over="ignore"):
            chunk = actions.astype(np.float32)
        try:
            arrays = self._contract.kinds["infer"].reply.pack({openpi.CHUNK: chunk})
        except ValueError as error:
            raise bad(str(error)) from None
        return Reply(number, 0.0, infer_ms, infer_ms, 1, arrays)
