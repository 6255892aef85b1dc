"""What a device with the ball bundle sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specact import Bundle
from specact.families.codes.sampling import sample_codes
from specact.families.codes.values import Drafted
from specact.observation import Window, vectors
from specact.rng import Role, StepAddress, stream
from specact.types import Proposal
from specact.wire.messages import Request, request_fields

LONG_MS = 30_000.0
# What the ball's target needs to see; to anything else the server would say so.
SEEN = vectors(1, goal=2, state=8)


def infer_request(window: Window, identity: int = 1, deadline_ms: float = LONG_MS) -> Request:
    """Asks for the target's distribution."""
    return Request("infer", identity, deadline_ms, window, StepAddress(7, 3, 2, identity))


def infer(window: Window, identity: int = 1, deadline_ms: float = LONG_MS) -> dict[str, Any]:
    """The same as a message."""
    return as_fields(infer_request(window, identity, deadline_ms))


def drafted(bundle: Bundle, window: Window, step: int, report: Mapping[str, int] | None = None) -> Request:
    """Asks for a verdict, as a device at this step would."""
    draft = bundle.draft.infer(window)
    codes = sample_codes(draft, stream(7, Role.DRAFT, robot=3, episode=2, step=step))
    proposal = Proposal(window, np.zeros((1, 2), np.float32), Drafted(draft, codes))
    asked = bundle.codec.request_arrays(proposal)
    return Request("verify", step, LONG_MS, window, StepAddress(7, 3, 2, step), asked, report or {})


def as_fields(request: Request) -> dict[str, Any]:
    """A request as a message."""
    return request_fields(request, SEEN)


def seeing(fields: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """A message whose observation is another in these arrays; None leaves one out."""
    seen = {name: value for name, value in (fields["observation"] | changed).items() if value is not None}
    return {**fields, "observation": seen}
