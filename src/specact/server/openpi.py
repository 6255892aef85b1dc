"""openpi's clients at the server, with the same target, batches and limits as robots of specact's own protocol."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from specact.errors import ObservationError, WireError
from specact.observation import Field, ObservationHistory, ObservationSpec, Window, lerobot_name
from specact.rng import StepAddress
from specact.server.batcher import Job
from specact.server.session import Session
from specact.wire import openpi
from specact.wire.exchange import Request
from specact.wire.messages import MAX_DEADLINE_MS, MAX_INSTRUCTION_CHARS, Failure, Reply, bad

# Limits of an observation's keys.
_MAX_DEPTH, _MAX_NAME_CHARS = 4, 128
_RESET_DONE = "reset successful"


class OpenpiDialogue:
    """See :class:`~specact.server.session.Dialogue`; one observation at a time, because the protocol has no ids.

    A client is pending until the first valid observation, or the right token.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._service = session, session.service
        self._history = ObservationHistory(session.service.contract.observation)
        self._episode = self._step = 0
        self._job: Job | None = None

    @property
    def full(self) -> bool:
        return self._job is not None

    def begin(self) -> None:
        session, service = self._session, self._service
        if not openpi.serves_chunks(service.contract):
            family, name = service.contract.family, service.welcome.bundle
            raise bad(f"{family} are no actions; serve the target alone: specact serve --policy {name}#target")
        if session.caller.credentials:
            session.settle()
        self._lane = service.register(session, "openpi")
        hello = service.welcome
        said = {"bundle": hello.bundle, "fingerprint": hello.target, "specact": hello.version,
                "max_message_bytes": hello.max_message_bytes}  # fmt: skip
        session.send(openpi.encode(said | openpi.metadata(service.contract)))

    def take(self, message: bytes) -> None:
        arrived, number = time.monotonic(), self._step
        try:
            fields = openpi.decode(message)
            endpoint = fields.get("endpoint", "infer")
            if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
                raise bad(f"endpoint must be infer or reset, got {ascii(endpoint)[:32]}")
            if endpoint == "reset":
                self._history.reset()
                self._episode, self._step = self._episode + 1, 0
                self._session.send(_RESET_DONE)
                return
            request = self._request(fields)
        except ObservationError as error:
            raise bad(str(error)) from None
        self._session.settle()
        # The protocol has no deadline.
        self._job = self._service.answer(
            self._session, self._lane, "infer", request, number, MAX_DEADLINE_MS, arrived, self._reply
        )

    def say(self, error: WireError) -> None:
        failure = self._service.failure(self._session, "openpi", error)
        # Before the metadata its client shows the close frame alone.
        if self._session.robot is not None:
            self._session.send(failure.message)

    def end(self) -> None:
        if self._job is not None:
            self._service.batcher.cancel(self._job)
            self._job = None

    def _request(self, message: Mapping[str, Any]) -> Request:
        address = message.get("address", [0, 0, self._episode, self._step])
        whole = isinstance(address, list) and all(type(value) is int and 0 <= value < 2**64 for value in address)
        if not whole or len(address) != 4:
            raise bad("address must be [seed, robot, episode, step], integers from 0 to 2^64 - 1")
        window = read_window(message, self._service.contract.observation, self._history)
        if len(window.instruction or "") > MAX_INSTRUCTION_CHARS:
            raise bad(f"a prompt has at most {MAX_INSTRUCTION_CHARS} characters")
        layout = self._service.contract.window
        try:
            checked = layout.unpack(layout.pack(window.arrays))
        except ValueError as error:
            raise bad(str(error)) from None
        self._step += 1
        return Request(Window(checked, window.instruction), StepAddress(*address))

    def _reply(self, answer: Reply | Failure) -> None:
        self._job = None
        if isinstance(answer, Failure):
            self._session.send(answer.message)
            self._session.close(WireError(answer.code, answer.message))
            return
        chunk = self._service.contract.kinds["infer"].reply.unpack(answer.arrays)[openpi.CHUNK]
        timing = {"infer_ms": answer.target_ms}
        self._session.send(openpi.encode({"actions": chunk, "server_timing": timing}))
        self._session.resume()


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
    if all(getattr(seen.get(name), "shape", None) == field.window_shape for name, field in spec.fields.items()):
        arrays = {name: _as_float32(seen[name], field) for name, field in spec.fields.items()}
        if spec.instruction and not isinstance(instruction, str):
            raise bad("the observation has no prompt; this policy needs one, as text")
        return Window(arrays, instruction if spec.instruction else None)
    return history.push(seen if instruction is None else {**seen, "instruction": instruction})


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
