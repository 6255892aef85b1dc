"""Requests: ask the target for its distribution, or, as in the paper, for final codes and the action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.families.codes.spec import PolicySpec
from specact.types import Codes, Window
from specact.wire.checks import LARGEST_ID, array, bad, check_head, conditional_law, is_integer, law, number, request_id
from specact.wire.images import read_image, to_jpeg
from specact.wire.protocol import PROTOCOL

LONGEST_DEADLINE_MS = 60_000.0
# What a device may say of itself: inferences, those transmitted, those missed; codes verified, those accepted.
REPORTED = ("steps", "transmitted", "missed", "verified", "accepted")


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Asks for the target's distribution; the device samples.

    Attributes:
        id: chosen by the device, never used twice; the reply carries it.
        deadline_ms: how long after its arrival an answer is still of use [ms].
        window: the observations.
        report: the device's counters so far, for the server's status page; of these :data:`REPORTED` cross.
    """

    id: int
    deadline_ms: float
    window: Window
    report: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Asks for final codes and action; the server samples, as in the paper.

    Attributes:
        id, deadline_ms, window, report: as for :class:`InferRequest`.
        draft_probs, draft_conditional: q, ``[G, K]`` and, with a sequential secondary head, ``[K, K]``.
        codes: the drafted ones, ``[G]``.
        address: seed, robot, episode and step of the random stream, so that the server draws what the device would.
    """

    id: int
    deadline_ms: float
    window: Window
    draft_probs: NDArray[np.float64]
    draft_conditional: NDArray[np.float64] | None
    codes: Codes
    address: tuple[int, int, int, int]
    report: Mapping[str, int] = field(default_factory=dict)


Request = InferRequest | VerifyRequest


def request_fields(request: Request, jpeg_quality: int | None = None) -> dict[str, Any]:
    """As a map; arrays stay arrays, but for camera frames where a JPEG quality (1 to 95) is given."""
    fields: dict[str, Any] = {
        "v": PROTOCOL,
        "type": "infer" if isinstance(request, InferRequest) else "verify",
        "id": request.id,
        "deadline_ms": request.deadline_ms,
        "state": request.window.state,
    }
    if request.report:
        fields["report"] = {name: request.report[name] for name in REPORTED if name in request.report}
    if request.window.goal is not None:
        fields["goal"] = request.window.goal
    if request.window.image is not None:
        image = request.window.image
        fields["image"] = image if jpeg_quality is None else to_jpeg(image, jpeg_quality)
    if isinstance(request, VerifyRequest):
        fields |= {"draft_probs": request.draft_probs, "codes": request.codes, "address": list(request.address)}
        if request.draft_conditional is not None:
            fields["draft_conditional"] = request.draft_conditional
    return fields


def read_request(fields: dict[str, Any], spec: PolicySpec) -> Request:
    """A request, with shapes as the spec says and every number finite.

    Raises:
        WireError: ``bad_message``, or ``unsupported_protocol``.
    """
    kind = check_head(fields, "infer", "verify")
    deadline_ms = number(fields, "deadline_ms", 0.0, LONGEST_DEADLINE_MS)
    window = _read_window(fields, spec)
    identity = request_id(fields)
    if identity is None:
        raise bad(f"id must be an integer from 0 to {LARGEST_ID}")
    report = _read_report(fields)
    if kind == "infer":
        return InferRequest(identity, deadline_ms, window, report)
    draft_probs = law(fields, "draft_probs", (spec.codebooks, spec.codes))
    conditional = conditional_law(fields, "draft_conditional", spec)
    codes = array(fields, "codes", (spec.codebooks,), np.int64)
    if not ((codes >= 0) & (codes < spec.codes)).all():
        raise bad(f"codes must lie in [0, {spec.codes})")
    address = fields.get("address")
    if not isinstance(address, list) or len(address) != 4 or not all(is_integer(value, 2**64) for value in address):
        raise bad("address must be [seed, robot, episode, step], integers from 0 to 2^64 - 1")
    seed, robot, episode, step = address
    return VerifyRequest(
        identity, deadline_ms, window, draft_probs, conditional, codes, (seed, robot, episode, step), report
    )


def _read_report(fields: dict[str, Any]) -> Mapping[str, int]:
    report = fields.get("report", {})
    if not isinstance(report, dict) or not all(
        name in REPORTED and is_integer(value, 2**63) for name, value in report.items()
    ):
        raise bad(f"report must be a map of {', '.join(REPORTED)} to counts")
    return report


def _read_window(fields: dict[str, Any], spec: PolicySpec) -> Window:
    state = array(fields, "state", (spec.window, spec.state), np.float32)
    goal = array(fields, "goal", (spec.goal,), np.float32) if spec.goal else None
    image = read_image(fields.get("image"), (spec.window, *spec.image, 3)) if spec.image else None
    return Window(state, goal, image)
