"""What the JSON messages look like, for OpenAPI: shapes are those of the bundle that is served."""

from __future__ import annotations

from typing import Any

from specact.policies.policy import PolicySpec
from specact.wire.protocol import PROTOCOL, ErrorCode
from specact.wire.request import REPORTED

Schema = dict[str, Any]


def described(kind: str, spec: PolicySpec) -> dict[str, Any]:
    """Arguments for a route: body and replies of one kind of message."""
    bodies = {"hello": _hello(), "infer": _infer(spec), "verify": _verify(spec)}
    replies = {"hello": _object({"type": _constant("welcome")}, extra=True), "infer": _distribution(spec)}
    errors = {400: "not a valid message", 401: "wrong token", 409: "device and server do not fit", 413: "too large",
              500: "the target failed", 503: "overloaded or shutting down", 504: "the deadline passed"}  # fmt: skip
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": _json(bodies[kind])}},
        "responses": {200: {"description": "the reply", "content": _json(replies.get(kind, _verdict(spec)))}}
        | {status: {"description": text, "content": _json(_error())} for status, text in errors.items()},
    }


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _hello() -> Schema:
    return _object(
        {
            "v": _constant(PROTOCOL),
            "type": _constant("hello"),
            "robot": {"type": "string", "maxLength": 64},
            "tokenizer": {"type": "string"},
            "spec": {"type": "object"},
        }
    )


def _request(kind: str, spec: PolicySpec) -> Schema:
    fields: Schema = {
        "v": _constant(PROTOCOL),
        "type": _constant(kind),
        "id": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        "deadline_ms": {"type": "number", "minimum": 0, "maximum": 60_000},
        "state": _array((spec.window, spec.state)),
    }
    if spec.goal:
        fields["goal"] = _array((spec.goal,))
    if spec.image:
        pixel = {"type": "integer", "minimum": 0, "maximum": 255}
        fields["image"] = _array((spec.window, *spec.image, 3), pixel)
    return fields


def _infer(spec: PolicySpec) -> Schema:
    return _object(_request("infer", spec), optional=_report())


def _verify(spec: PolicySpec) -> Schema:
    word = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
    fields = _request("verify", spec) | {
        "draft_probs": _array((spec.codebooks, spec.codes), {"type": "number", "minimum": 0, "maximum": 1}),
        "codes": _array((spec.codebooks,), {"type": "integer", "minimum": 0, "maximum": spec.codes - 1}),
        "address": _array((4,), word),
    }
    return _object(fields, optional=_report())


def _report() -> Schema:
    count = {"type": "integer", "minimum": 0}
    return {"report": {"type": "object", "properties": dict.fromkeys(REPORTED, count), "additionalProperties": False}}


def _distribution(spec: PolicySpec) -> Schema:
    shape = (spec.codebooks, spec.codes)
    return _object(
        {
            "type": _constant("distribution"),
            "id": {"type": "integer"},
            "probs": _array(shape),
            "offsets": _array((*shape, spec.chunk, spec.actions)),
        },
        extra=True,
    )


def _verdict(spec: PolicySpec) -> Schema:
    return _object(
        {
            "type": _constant("verdict"),
            "id": {"type": "integer"},
            "codes": _array((spec.codebooks,), {"type": "integer"}),
            "accepted": _array((spec.codebooks,), {"type": "boolean"}),
            "rejection": _array((spec.codebooks,)),
            "chunk": _array((spec.chunk, spec.actions)),
        },
        extra=True,
    )


def _error() -> Schema:
    return _object(
        {
            "type": _constant("error"),
            "code": {"type": "string", "enum": [str(code) for code in ErrorCode]},
            "message": {"type": "string"},
        },
        extra=True,
    )


def _object(fields: Schema, optional: Schema | None = None, extra: bool = False) -> Schema:
    properties = fields | (optional or {})
    return {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": extra}


def _constant(value: str | int) -> Schema:
    return {"const": value, "type": "string" if isinstance(value, str) else "integer"}


def _array(shape: tuple[int, ...], item: Schema | None = None) -> Schema:
    schema: Schema = item or {"type": "number"}
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema
