"""The messages of a step: a request and its reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from specact.errors import WireError
from specact.observation import ObservationSpec, Window
from specact.rng import StepAddress
from specact.wire.checks import MAX_ID, PROTOCOL, ErrorCode, array, bad, check_head, is_integer, number, request_id
from specact.wire.dialect import Arrays, Dialect, Exchange, read_address, read_arrays
from specact.wire.images import read_image, to_jpeg

MAX_DEADLINE_MS = 60_000.0
MAX_INSTRUCTION_CHARS = 1000
# Counters that a device may report: inferences, those transmitted, those missed; units verified, those accepted.
REPORT_COUNTERS = ("steps", "transmitted", "missed", "verified", "accepted")


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the target for one window.

    Attributes:
        kind: ``infer`` for the target's answer, ``verify`` for verification on the server, as in ADAHI's paper.
        id: chosen by the device, unique on its connection; the reply contains it.
        deadline_ms: deadline of the reply, from the request's arrival [ms].
        window: the target's input.
        address: seed, robot, episode and step of the random stream, so that the server samples as the device would.
        arrays: the family's additional arrays.
        report: the device's counters, for the server's status page; only :data:`REPORT_COUNTERS` are sent.
    """

    kind: str
    id: int
    deadline_ms: float
    window: Window
    address: StepAddress
    arrays: Arrays = field(default_factory=dict)
    report: Mapping[str, int] = field(default_factory=dict)


class Responder(Protocol):
    """Computes replies to requests; a pure function without state per robot."""

    @property
    def name(self) -> str:
        """Name of the served pair or policy."""
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the target."""
        ...

    @property
    def dialect(self) -> Dialect:
        """The wire schema."""
        ...

    def respond(self, requests: Sequence[Request]) -> Sequence[Arrays | WireError]:
        """The arrays of each reply, in one batch; an error for a request that cannot be answered."""
        ...


def request_fields(request: Request, spec: ObservationSpec, jpeg_quality: int | None = None) -> dict[str, Any]:
    """As a map; arrays stay arrays.

    Args:
        request: the request.
        spec: the part of its window that is sent.
        jpeg_quality: camera frames are sent as JPEG files of this quality; None sends them raw.

    Raises:
        MissingExtraError: if a quality is given and Pillow is not installed.
    """
    window = spec.select(request.window)
    observation: dict[str, Any] = dict(window.arrays)
    if jpeg_quality is not None:
        for name in spec.images:
            observation[name] = to_jpeg(observation[name].reshape(-1, *spec[name].shape), jpeg_quality)
    fields: dict[str, Any] = {
        "v": PROTOCOL,
        "type": request.kind,
        "id": request.id,
        "deadline_ms": request.deadline_ms,
        "observation": observation,
        "address": list(request.address),
        **request.arrays,
    }
    if window.instruction is not None:
        fields["instruction"] = window.instruction
    if request.report:
        fields["report"] = {name: request.report[name] for name in REPORT_COUNTERS if name in request.report}
    return fields


def read_request(fields: dict[str, Any], dialect: Dialect) -> Request:
    """A request, with the dialect's shapes and finite numbers.

    Raises:
        WireError: ``bad_message``, or ``unsupported_protocol``.
    """
    kind = check_head(fields, *dialect.exchanges)
    deadline_ms = number(fields, "deadline_ms", 0.0, MAX_DEADLINE_MS)
    window = _read_window(fields, dialect.observation)
    identity = request_id(fields)
    if identity is None:
        raise bad(f"id must be an integer from 0 to {MAX_ID}")
    arrays = read_arrays(fields, dialect.exchanges[kind].request)
    return Request(kind, identity, deadline_ms, window, read_address(fields), arrays, _read_report(fields))


def _read_report(fields: dict[str, Any]) -> Mapping[str, int]:
    report = fields.get("report", {})
    if not isinstance(report, dict) or not all(
        name in REPORT_COUNTERS and is_integer(value, 2**63) for name, value in report.items()
    ):
        raise bad(f"report must be a map of {', '.join(REPORT_COUNTERS)} to counts")
    return report


def _read_window(fields: dict[str, Any], spec: ObservationSpec) -> Window:
    given = fields.get("observation")
    if not isinstance(given, dict):
        raise bad(f"observation must be a map with {', '.join(spec.fields)}")
    arrays = {
        name: read_image(given.get(name), name, wanted.window_shape)
        if wanted.is_image
        else array(given, name, wanted.window_shape, np.float32)
        for name, wanted in spec.fields.items()
    }
    if not spec.instruction:
        return Window(arrays)
    instruction = fields.get("instruction")
    if not isinstance(instruction, str) or len(instruction) > MAX_INSTRUCTION_CHARS:
        raise bad(f"instruction must be text of at most {MAX_INSTRUCTION_CHARS} characters")
    return Window(arrays, instruction)


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """A request's time at the server by stage [ms]; only durations, so that no two clocks are compared.

    Attributes:
        queue_ms: until the target was free.
        target_ms: the target's inference (of the whole batch), including sampling where the server samples.
        total_ms: from the arrival of the request to the sending of its reply.
        batch: number of requests in the same inference.
    """

    queue_ms: float
    target_ms: float
    total_ms: float
    batch: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A successful reply; ``arrays`` match its family's :class:`~specact.wire.dialect.Exchange`."""

    id: int
    kind: str
    arrays: Arrays
    times: ServerTimes


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error reply; ``id`` is None if the request's id could not be read."""

    id: int | None
    code: ErrorCode
    message: str


def reply_fields(reply: Reply | ErrorReply) -> dict[str, Any]:
    """As a map; arrays stay arrays."""
    if isinstance(reply, ErrorReply):
        return {"v": PROTOCOL, "type": "error", "id": reply.id, "code": str(reply.code), "message": reply.message}
    times = reply.times
    spent = {
        "queue_ms": times.queue_ms, "target_ms": times.target_ms, "total_ms": times.total_ms, "batch": times.batch,
    }  # fmt: skip
    return {"v": PROTOCOL, "type": reply.kind, "id": reply.id, "times": spent, **reply.arrays}


def read_reply(fields: dict[str, Any], exchange: Exchange) -> Reply | ErrorReply:
    """A reply, with the exchange's shapes and finite numbers; anything else must not move a robot.

    Raises:
        WireError: ``bad_message``.
    """
    kind = check_head(fields, exchange.answer, "error")
    if kind == "error":
        return read_error(fields)
    identity = request_id(fields)
    if identity is None:
        raise bad("a reply must contain the id of its request")
    return Reply(identity, kind, read_arrays(fields, exchange.reply), _read_times(fields))


def _read_times(fields: dict[str, Any]) -> ServerTimes:
    times = fields.get("times")
    if not isinstance(times, dict):
        raise bad("a reply must contain its times")
    queue, target, total = (number(times, name, 0.0, 1e9) for name in ("queue_ms", "target_ms", "total_ms"))
    batch = times.get("batch")
    if not is_integer(batch, 2**31) or batch < 1:
        raise bad("batch must be an integer of at least 1")
    return ServerTimes(queue, target, total, batch)


def read_error(fields: dict[str, Any]) -> ErrorReply:
    """An error reply to a request or to a hello."""
    code, message = fields.get("code"), fields.get("message")
    if not isinstance(code, str) or code not in list(ErrorCode) or not isinstance(message, str):
        raise bad("an error must have one of the known codes and a message")
    return ErrorReply(request_id(fields), ErrorCode(code), message[:500])
