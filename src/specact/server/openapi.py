"""OpenAPI schemas of the JSON messages, with the shapes of the served bundle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specact.wire.checks import MAX_ID, PROTOCOL, ErrorCode
from specact.wire.dialect import ArraySpec, Dialect
from specact.wire.messages import MAX_DEADLINE_MS, MAX_INSTRUCTION_CHARS, REPORT_COUNTERS

Schema = dict[str, Any]

_NUMBER: Schema = {"type": "number"}
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_ID}
_PIXEL: Schema = {"type": "integer", "minimum": 0, "maximum": 255}
_TYPES: dict[type[np.generic], str] = dict.fromkeys((np.int16, np.int64, np.uint8), "integer")
_MAX_FLOAT32 = 3.4028234663852886e38
_FLOAT32: Schema = {"type": "number", "minimum": -_MAX_FLOAT32, "maximum": _MAX_FLOAT32}


def route_schema(kind: str, dialect: Dialect) -> dict[str, Any]:
    """OpenAPI arguments of a route: body and replies of one kind of message."""
    body, reply = (_hello(), _welcome()) if kind == "hello" else (_request(kind, dialect), _reply(kind, dialect))
    errors = {400: "not a valid message", 401: "wrong token", 409: "device and server do not fit", 413: "too large",
              500: "the target failed", 503: "overloaded or shutting down", 504: "the deadline passed"}  # fmt: skip
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": _json(body)}},
        "responses": {200: {"description": "the reply", "content": _json(reply)}} | refusals(errors),
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


def _hello() -> Schema:
    robot = {"type": "string", "maxLength": 64}
    return _message("hello", {"robot": robot, "family": {"type": ["string", "null"]}, "spec": {"type": "object"}})


def _welcome() -> Schema:
    texts = dict.fromkeys(("bundle", "target", "version", "family"), _TEXT)
    return _message("welcome", texts | {"max_message_bytes": _COUNT, "spec": {"type": "object"}})


def _request(kind: str, dialect: Dialect) -> Schema:
    word = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
    seen = {
        name: _array(field.window_shape, _PIXEL if field.is_image else _FLOAT32)
        for name, field in dialect.observation.fields.items()
    }
    fields: Schema = {
        "id": _COUNT,
        "deadline_ms": {"type": "number", "minimum": 0, "maximum": MAX_DEADLINE_MS},
        "observation": _object(seen),
        "address": _array((4,), word),
        **_arrays(dialect.exchanges[kind].request),
    }
    if dialect.observation.instruction:
        fields["instruction"] = {"type": "string", "maxLength": MAX_INSTRUCTION_CHARS}
    report = {"type": "object", "properties": dict.fromkeys(REPORT_COUNTERS, _COUNT), "additionalProperties": False}
    return _message(kind, fields, {"report": report})


def _reply(kind: str, dialect: Dialect) -> Schema:
    times = {"queue_ms": _NUMBER, "target_ms": _NUMBER, "total_ms": _NUMBER, "batch": {"type": "integer", "minimum": 1}}
    exchange = dialect.exchanges[kind]
    return _message(exchange.answer, {"id": _COUNT, "times": _object(times)} | _arrays(exchange.reply))


def _arrays(specs: Mapping[str, ArraySpec]) -> Schema:
    return {name: _array(spec.shape, _element(spec)) for name, spec in specs.items()}


def _element(spec: ArraySpec) -> Schema:
    if spec.distribution:
        return {"type": "number", "minimum": 0, "maximum": 1}
    if spec.dtype is np.bool_:
        return {"type": "boolean"}
    schema: Schema = dict(_FLOAT32) if spec.dtype is np.float32 else {"type": _TYPES.get(spec.dtype, "number")}
    limits = {"minimum": spec.low, "maximum": spec.high}
    return schema | {name: limit for name, limit in limits.items() if math.isfinite(limit)}


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
