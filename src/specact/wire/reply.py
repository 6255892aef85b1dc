"""Replies: the target's distribution, a verdict with its action, or an error that says why there is neither."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.families.codes.spec import PolicySpec
from specact.families.codes.values import CodeDistribution, Verdict
from specact.wire.checks import array, bad, check_head, conditional_law, is_integer, law, number, request_id
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
class DistributionReply:
    """Answer to :class:`InferRequest`."""

    id: int
    target: CodeDistribution
    times: ServerTimes


@dataclass(frozen=True, slots=True)
class VerdictReply:
    """Answer to :class:`VerifyRequest`; ``chunk`` float32 ``[n, A]``, normalised, decoded with the target's offsets."""

    id: int
    verdict: Verdict
    chunk: NDArray[np.float32]
    times: ServerTimes


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A refusal; ``id`` is None where the request could not be read that far."""

    id: int | None
    code: ErrorCode
    message: str


Reply = DistributionReply | VerdictReply | ErrorReply


def reply_fields(reply: Reply) -> dict[str, Any]:
    """As a map; arrays stay arrays."""
    if isinstance(reply, ErrorReply):
        return {"v": PROTOCOL, "type": "error", "id": reply.id, "code": str(reply.code), "message": reply.message}
    if isinstance(reply, DistributionReply):
        fields: dict[str, Any] = {"type": "distribution", "probs": reply.target.probs, "offsets": reply.target.offsets}
        if reply.target.conditional is not None:
            fields["conditional"] = reply.target.conditional
    else:
        verdict = reply.verdict
        fields = {
            "type": "verdict",
            "codes": verdict.codes,
            "accepted": verdict.accepted,
            "rejection": verdict.rejection,
            "chunk": reply.chunk,
        }
    return {"v": PROTOCOL, "id": reply.id, "times": dataclasses.asdict(reply.times), **fields}


def read_reply(fields: dict[str, Any], spec: PolicySpec) -> Reply:
    """A reply, with shapes as the spec says and every number finite: nothing else may move a robot.

    Raises:
        WireError: ``bad_message``.
    """
    kind = check_head(fields, "distribution", "verdict", "error")
    if kind == "error":
        return read_error(fields)
    identity = request_id(fields)
    if identity is None:
        raise bad("a reply must contain the id of its request")
    times, chunk_shape = _read_times(fields), (spec.chunk, spec.actions)
    if kind == "distribution":
        probs = law(fields, "probs", (spec.codebooks, spec.codes))
        offsets = array(fields, "offsets", (spec.codebooks, spec.codes, *chunk_shape), np.float32)
        conditional = conditional_law(fields, "conditional", spec)
        return DistributionReply(identity, CodeDistribution(probs, offsets, conditional), times)
    codes = array(fields, "codes", (spec.codebooks,), np.int64)
    accepted = array(fields, "accepted", (spec.codebooks,), np.bool_)
    rejection = array(fields, "rejection", (spec.codebooks,), np.float64)
    chunk = array(fields, "chunk", chunk_shape, np.float32)
    if not ((codes >= 0) & (codes < spec.codes)).all() or not ((rejection >= 0.0) & (rejection <= 1.0)).all():
        raise bad(f"codes must lie in [0, {spec.codes}) and rejection in [0, 1]")
    return VerdictReply(identity, Verdict(codes, accepted, rejection), chunk, times)


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
