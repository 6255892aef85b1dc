"""What both ends of the wire have in common: version and error codes; docs/protocol.md is the norm."""

from __future__ import annotations

from enum import StrEnum

PROTOCOL = 2


class ErrorCode(StrEnum):
    """Why a request was not answered with a result."""

    BAD_MESSAGE = "bad_message"
    UNSUPPORTED_PROTOCOL = "unsupported_protocol"
    MISMATCH = "mismatch"
    UNAUTHORIZED = "unauthorized"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    EXPIRED = "expired"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"
