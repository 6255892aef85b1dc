"""What the JSON messages look like, for OpenAPI: shapes are those of the bundle that is served."""

from __future__ import annotations

from typing import Any

from specact.families.codes.spec import PolicySpec
from specact.wire.checks import LARGEST_ID
from specact.wire.protocol import PROTOCOL, ErrorCode
from specact.wire.request import LONGEST_DEADLINE_MS, REPORTED

Schema = dict[str, Any]

_NUMBER: Schema = {"type": "number"}
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": LARGEST_ID}
_SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_LARGEST_FLOAT32 = 3.4028234663852886e38
_FLOAT32: Schema = {"type": "number", "minimum": -_LARGEST_FLOAT32, "maximum": _LARGEST_FLOAT32}


def described(kind: str, spec: PolicySpec) -> dict[str, Any]:
    """Arguments for a route: body and replies of one kind of message."""
    bodies = {"hello": _hello, "infer": _infer, "verify": _verify}
    replies = {"hello": _welcome, "infer": _distribution, "verify": _verdict}
    errors = {400: "not a valid message", 401: "wrong token", 409: "device and server do not fit", 413: "too large",
              500: "the target failed", 503: "overloaded or shutting down", 504: "the deadline passed"}  # fmt: skip
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": _json(bodies[kind](spec))}},
        "responses": {200: {"description": "the reply", "content": _json(replies[kind](spec))}} | refusals(errors),
    }


def refusals(texts: dict[int, str]) -> dict[int | str, Any]:
    """Error replies, by HTTP status."""
    error = _message(
        "error",
        {
            "id": {"type": ["integer", "null"]},
            "code": {"type": "string", "enum": [str(code) for code in ErrorCode]},
            "message": _TEXT,
        },
    )
    return {status: {"description": text, "content": _json(error)} for status, text in texts.items()}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _hello(spec: PolicySpec) -> Schema:
    return _message(
        "hello", {"robot": {"type": "string", "maxLength": 64}, "tokenizer": _TEXT, "spec": {"type": "object"}}
    )


def _welcome(spec: PolicySpec) -> Schema:
    return _message("welcome", {"bundle": _TEXT, "target": _TEXT, "version": _TEXT, "max_message_bytes": _COUNT})


def _request(spec: PolicySpec) -> Schema:
    fields: Schema = {
        "id": _COUNT,
        "deadline_ms": {"type": "number", "minimum": 0, "maximum": LONGEST_DEADLINE_MS},
        "state": _array((spec.window, spec.state), _FLOAT32),
    }
    if spec.goal:
        fields["goal"] = _array((spec.goal,), _FLOAT32)
    if spec.image:
        pixel = {"type": "integer", "minimum": 0, "maximum": 255}
        fields["image"] = _array((spec.window, *spec.image, 3), pixel)
    return fields


def _report() -> Schema:
    return {"report": {"type": "object", "properties": dict.fromkeys(REPORTED, _COUNT), "additionalProperties": False}}


def _infer(spec: PolicySpec) -> Schema:
    return _message("infer", _request(spec), _report())


def _verify(spec: PolicySpec) -> Schema:
    word = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
    fields = _request(spec) | {
        "draft_probs": _array((spec.codebooks, spec.codes), _SHARE),
        "codes": _array((spec.codebooks,), {"type": "integer", "minimum": 0, "maximum": spec.codes - 1}),
        "address": _array((4,), word),
    }
    return _message("verify", fields | _conditional("draft_conditional", spec), _report())


def _reply(kind: str, fields: Schema) -> Schema:
    times = {"queue_ms": _NUMBER, "target_ms": _NUMBER, "total_ms": _NUMBER, "batch": {"type": "integer", "minimum": 1}}
    return _message(kind, {"id": _COUNT, "times": _object(times)} | fields)


def _distribution(spec: PolicySpec) -> Schema:
    shape = (spec.codebooks, spec.codes)
    fields = {"probs": _array(shape, _SHARE), "offsets": _array((*shape, spec.chunk, spec.actions), _FLOAT32)}
    return _reply("distribution", fields | _conditional("conditional", spec))


def _verdict(spec: PolicySpec) -> Schema:
    return _reply(
        "verdict",
        {
            "codes": _array((spec.codebooks,), {"type": "integer", "minimum": 0, "maximum": spec.codes - 1}),
            "accepted": _array((spec.codebooks,), {"type": "boolean"}),
            "rejection": _array((spec.codebooks,), _SHARE),
            "chunk": _array((spec.chunk, spec.actions), _FLOAT32),
        },
    )


def _conditional(name: str, spec: PolicySpec) -> Schema:
    return {name: _array((spec.codes, spec.codes), _SHARE)} if spec.sequential else {}


def _message(kind: str, fields: Schema, optional: Schema | None = None) -> Schema:
    return _object({"v": _constant(PROTOCOL), "type": _constant(kind)} | fields, optional)


def _object(fields: Schema, optional: Schema | None = None) -> Schema:
    return {"type": "object", "properties": fields | (optional or {}), "required": list(fields)}


def _constant(value: str | int) -> Schema:
    return {"const": value, "type": "string" if isinstance(value, str) else "integer"}


def _array(shape: tuple[int, ...], item: Schema) -> Schema:
    schema = item
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema
