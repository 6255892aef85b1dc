"""What both ends of the wire have in common: version, error codes, sizes; docs/protocol.md is the norm."""

from __future__ import annotations

from enum import StrEnum

from specact.policies.policy import PolicySpec

PROTOCOL = 1


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


def max_message_bytes(spec: PolicySpec) -> int:
    """More than any valid message of this spec needs, and no more than a few kilobytes above it."""
    window = 4 * (spec.window * spec.state + spec.goal)
    image = 3 * spec.window * spec.image[0] * spec.image[1] if spec.image else 0
    rows = 8 * (spec.codebooks * spec.codes + spec.codes**2)
    offsets = 4 * spec.codebooks * spec.codes * spec.chunk * spec.actions
    # JSON writes a float in up to 25 characters where msgpack takes 4 or 8 bytes.
    return 8192 + 7 * (window + rows + offsets) + 5 * image
