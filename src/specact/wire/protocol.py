"""What both ends of the wire have in common: version, error codes, sizes; docs/protocol.md is the norm."""

from __future__ import annotations

from enum import StrEnum

from specact.families.codes.spec import PolicySpec

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
    """What the largest valid message of this spec needs as JSON, rounded up, and 8 kB for all that is not an array."""
    rows = spec.codebooks * spec.codes + spec.sequential * spec.codes**2
    request = spec.window * spec.state + spec.goal + rows + spec.codebooks
    reply = rows + spec.codebooks * spec.codes * spec.chunk * spec.actions
    # A pixel takes up to 18 characters, and a JPEG, which need not be smaller than its pixels, has a head.
    image = spec.window * (1024 + 18 * spec.image[0] * spec.image[1]) if spec.image else 0
    # A number takes up to 23 characters, a comma, and brackets where an axis has length 1.
    return 8192 + max(30 * request + image, 30 * reply)
