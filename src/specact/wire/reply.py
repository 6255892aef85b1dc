"""Replies: the family's arrays, or an error that says why there are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specact.wire.checks import bad, check_head, is_integer, number, request_id
from specact.wire.dialect import Arrays, Exchange, read_arrays
from specact.wire.protocol import PROTOCOL, ErrorCode


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Where a request's time went at the server [ms]; only durations, so that no two clocks are compared.

    Attributes:
        queue_ms: until the target was free.
        target_ms: the target's inference (of the whole batch), and sampling where the server does it.
        total_ms: from the frame's arrival to the reply's leaving.
        batch: requests answered by the same inference.
    """

    queue_ms: float
    target_ms: float
    total_ms: float
    batch: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers a request: ``arrays`` as its family's :class:`~specact.wire.dialect.Exchange` says."""

    id: int
    kind: str
    arrays: Arrays
    times: ServerTimes


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A refusal; ``id`` is None where the request could not be read that far."""

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
    """A reply, with shapes as the exchange says and every number finite: nothing else may move a robot.

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
    """An error, whether an answer to a request or to a hello."""
    code, message = fields.get("code"), fields.get("message")
    if not isinstance(code, str) or code not in list(ErrorCode) or not isinstance(message, str):
        raise bad("an error must have one of the known codes and a message")
    return ErrorReply(request_id(fields), ErrorCode(code), message[:500])
