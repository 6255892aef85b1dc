"""openpi's clients at the server, with the same target, batches and limits as robots of specact's own protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from specact.errors import ObservationError, WireError
from specact.observation import ObservationHistory, ObservationSpec, Window, lerobot_name
from specact.server.service import Service
from specact.server.session import Session
from specact.wire import openpi
from specact.wire.messages import MAX_DEADLINE_MS, MAX_INSTRUCTION_CHARS, Ask, Failure, Reply, bad

# Limits of an observation's keys.
_MAX_DEPTH, _MAX_NAME_CHARS = 4, 128
_RESET_DONE = "reset successful"
# Messages that were read at once and wait, and resets in a row.
_MAX_WAITING = 64


class OpenpiSession(Session):
    """A connection in openpi's protocol, whose replies have no ids and come in the order of the observations.

    A client may take its time before the first observation, as one that builds its simulator; until then it is pending
    all the same, unless it has the right token.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service, max_jobs=1, max_waiting=_MAX_WAITING)
        self._history = ObservationHistory(service.contract.observation)
        self._episode = self._step = self._resets = 0

    def begin(self) -> None:
        service, welcome = self.service, self.service.welcome
        if not openpi.serves_chunks(service.contract):
            raise bad(f"{welcome.family} are no actions; serve the target alone: specact serve {welcome.bundle}#target")
        self.settle()
        self.pending = not self.caller.digest
        service.register(self, "openpi")
        said = {"bundle": welcome.bundle, "fingerprint": welcome.target, "specact": welcome.version,
                "max_message_bytes": welcome.max_message_bytes}  # fmt: skip
        self.send(openpi.encode(said | openpi.metadata(service.contract)))

    def handle(self, message: bytes, arrived: float) -> None:
        fields = openpi.decode(message)
        endpoint = fields.get("endpoint", "infer")
        if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
            raise bad(f"endpoint must be infer or reset, got {ascii(endpoint)[:32]}")
        if endpoint == "infer":
            try:
                ask = self._ask(fields)
            except (ObservationError, ValueError) as error:
                raise bad(str(error)) from None
            self.settle()
            self._resets, self._step = 0, self._step + 1
            self.submit(ask, arrived)
        elif self.jobs or self._resets == _MAX_WAITING:
            raise bad("a reset comes after the reply to an observation; wait for it first")
        else:
            self._history.reset()
            self._episode, self._step, self._resets = self._episode + 1, 0, self._resets + 1
            self.send(_RESET_DONE)

    def reply(self, answer: Reply | Failure) -> None:
        if isinstance(answer, Failure):
            self.send(answer.message)
            self.close(WireError(answer.code, answer.message))
            return
        chunk = self.service.contract.kinds["infer"].reply.views(answer.arrays)[openpi.CHUNK]
        self.send(openpi.encode({"actions": chunk, "server_timing": {"infer_ms": answer.target_ms}}))

    def explain(self, error: WireError) -> None:
        failure = self.failure("openpi", error)
        # Before the metadata its client shows the close frame alone.
        if self.robot is not None:
            self.send(failure.message)

    def _ask(self, message: Mapping[str, Any]) -> Ask:
        address = message.get("address", [0, 0, self._episode, self._step])
        whole = isinstance(address, list) and all(type(value) is int and 0 <= value < 2**64 for value in address)
        if not whole or len(address) != 4:
            raise bad("address must be [seed, robot, episode, step], integers from 0 to 2^64 - 1")
        window = read_window(message, self.service.contract.observation, self._history)
        if len(window.instruction or "") > MAX_INSTRUCTION_CHARS:
            raise bad(f"a prompt has at most {MAX_INSTRUCTION_CHARS} characters")
        arrays = self.service.contract.window.pack(window.arrays)
        # The protocol has no deadline.
        return Ask("infer", 0, MAX_DEADLINE_MS, tuple(address), arrays, instruction=window.instruction)


@np.errstate(over="ignore")  # numbers beyond float32 become infinite and are refused
def read_window(message: Mapping[str, Any], spec: ObservationSpec, history: ObservationHistory) -> Window:
    """The target's window from an openpi observation.

    Accepted keys of an array are its own name, ``observation/NAME`` or ``observation.NAME``, nested maps, and LeRobot's
    name; openpi's clients call ``image.NAME`` ``NAME_image``, and ``image`` the only camera besides the wrist's. The
    instruction is ``prompt``. Camera frames may have their channels first. Arrays of the shape ``[T, ...]``
    are the window itself; otherwise they are one observation, and the history supplies the earlier ones.

    Raises:
        WireError, ObservationError: if it cannot be used.
    """
    wanted = {f"{name[6:]}_image": name for name in spec.fields if name.startswith("image.")}
    others = [name for key, name in wanted.items() if key != "wrist_image"]
    wanted |= {"image": others[0]} if len(others) == 1 else {}
    wanted |= {lerobot_name(name): name for name in spec.fields}
    seen = dict[str, Any]()
    for key, value in _flatten(message, "", _MAX_DEPTH):
        if (name := wanted.get(key)) in seen:
            raise bad(f"{name} is given twice, under two names that mean the same")
        if name is not None:
            seen[name] = _channels_last(value, spec[name].shape) if spec[name].is_image else value
    instruction = message.get("prompt", message.get("instruction"))
    if all(getattr(seen.get(name), "shape", None) == field.window_shape for name, field in spec.fields.items()):
        if spec.instruction and not isinstance(instruction, str):
            raise bad("the observation has no prompt; this policy needs one, as text")
        arrays = {name: seen[name] if field.is_image else seen[name].astype(np.float32)
                  for name, field in spec.fields.items()}  # fmt: skip
        return Window(arrays, instruction if spec.instruction else None)
    return history.push(seen if instruction is None else {**seen, "instruction": instruction})


def _channels_last(frames: Any, shape: tuple[int, ...]) -> Any:
    first = getattr(frames, "shape", ())[-3:] == (shape[2], *shape[:2]) != shape
    return np.moveaxis(frames, -3, -1) if first else frames


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
