"""Sizes of messages, and messages of that size."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from specact.observation import Field
from specact.rng import StepAddress
from specact.wire import msgpack
from specact.wire.dialect import ArraySpec, Dialect
from specact.wire.messages import MAX_INSTRUCTION_CHARS, Reply, Request, ServerTimes, reply_fields, request_fields

# Maximum size of a hello and a welcome.
HANDSHAKE_BYTES = 65536


def max_message_bytes(dialect: Dialect) -> int:
    """Upper bound on the size of a valid message as JSON, with 8 kB for everything but arrays.

    A number takes up to 23 characters, a comma, and brackets if an axis has length 1. A pixel takes up to 18 characters
    for its three numbers, and a JPEG, which can be as large as its pixels, has a header. A character of a name or an
    instruction takes up to 12.
    """
    seen = sum(16 + 12 * len(name) + _field_bytes(field) for name, field in dialect.observation.fields.items()) + (
        12 * MAX_INSTRUCTION_CHARS if dialect.observation.instruction else 0
    )
    requests = max(seen + 30 * _numbers(exchange.request) for exchange in dialect.exchanges.values())
    replies = max(30 * _numbers(exchange.reply) for exchange in dialect.exchanges.values())
    return max(HANDSHAKE_BYTES, 8192 + max(requests, replies))


def exchange_bytes(dialect: Dialect) -> int:
    """Bytes of a step's request and of its reply over the stream, with uncompressed camera frames."""
    request, reply = example_exchange(dialect)
    sizes = (request_fields(request, dialect.observation), reply_fields(reply))
    return sum(len(msgpack.encode(fields)) for fields in sizes)


def example_exchange(dialect: Dialect) -> tuple[Request, Reply]:
    """A step's request and its reply, with valid arrays."""
    exchange = dialect.exchanges[dialect.asks]
    window, arrays = dialect.observation.zeros(), _examples(exchange.request)
    request = Request(dialect.asks, 2**32, 1.0, window, StepAddress(0, 0, 0, 0), arrays)
    return request, Reply(2**32, exchange.answer, _examples(exchange.reply), ServerTimes(1.0, 1.0, 1.0, 1))


def array_bytes(dialect: Dialect) -> tuple[int, int]:
    """Bytes of the arrays of a step's request and of its reply, as float32 and without message overhead."""
    exchange = dialect.exchanges[dialect.asks]
    return dialect.observation.nbytes + 4 * _numbers(exchange.request), 4 * _numbers(exchange.reply)


def _field_bytes(field: Field) -> int:
    numbers = math.prod(field.window_shape)
    return max(1, field.history) * 1024 + 6 * numbers if field.is_image else 30 * numbers


def _numbers(specs: Mapping[str, ArraySpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs.values())


def _examples(specs: Mapping[str, ArraySpec]) -> dict[str, np.ndarray]:
    """Valid arrays: uniform distributions, elsewhere zeros."""
    return {
        name: np.full(spec.shape, 1.0 / spec.shape[-1] if spec.distribution else 0, spec.dtype)
        for name, spec in specs.items()
    }
