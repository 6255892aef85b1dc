"""Messages as JSON, as in ADAHI's test bed, with arrays as nested lists; several times the size and time of msgpack."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from specact.errors import WireError
from specact.wire.checks import NestedList


def encode(fields: dict[str, Any]) -> bytes:
    """A message as JSON text; float32 and float64 numbers round-trip exactly."""
    return json.dumps(fields, default=_plain, allow_nan=False, separators=(",", ":")).encode()


def decode(payload: bytes) -> dict[str, Any]:
    """The message in a text of limited size.

    Raises:
        WireError: ``bad_message`` for anything that is not one object.
    """
    try:
        # Decoded as UTF-8 here: given bytes, json would also accept UTF-16, UTF-32 and lone surrogates.
        fields = json.loads(payload.decode(), parse_constant=_refuse)
    # UnicodeDecodeError and JSONDecodeError are ValueErrors; deep nesting raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise WireError("bad_message", f"the body is not JSON ({type(error).__name__}: {error})"[:200]) from None
    if not isinstance(fields, dict):
        raise WireError("bad_message", "a message must be one JSON object")
    observation = fields.get("observation")
    if isinstance(observation, dict):
        fields["observation"] = _mark_lists(observation)
    return _mark_lists(fields)


def _mark_lists(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: NestedList(value) if isinstance(value, list) else value for name, value in fields.items()}


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number of JSON")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"cannot send {type(value).__name__}")
