"""Wire format of chunks of actions: a chunk as one array, and the server's responder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specact.errors import BundleError, ObservationError, WireError
from specact.families.chunks.policy import Chunk, ChunkPolicy, ChunkSpec, Inpainting
from specact.records import read_record
from specact.rng import Role, streams
from specact.wire.checks import bad, printable
from specact.wire.dialect import Arrays, ArraySpec, Dialect, Exchange
from specact.wire.messages import Request

FAMILY = "chunks"
_NOT_FINITE = "the target has no finite answer to this observation"
# Limits of a spec that a device takes over from a server: the longest history, the bytes of as many observations and of
# a chunk, and the control rate [Hz]. Policies need far less.
MAX_HISTORY, MAX_BYTES, MIN_RATE_HZ, MAX_RATE_HZ = 1024, 1 << 28, 0.1, 1000


class ChunkCodec:
    """See :class:`~specact.wire.dialect.Codec`.

    Args:
        spec: of the target.
    """

    def __init__(self, spec: ChunkSpec) -> None:
        chunk = ArraySpec((spec.chunk, spec.actions), np.float32)
        old = {"actions": chunk, "weights": ArraySpec((spec.chunk,), np.float32, 0.0, 1.0)}
        exchanges = {
            "infer": Exchange({}, "chunk", {"chunk": chunk}),
            "inpaint": Exchange(old, "chunk", {"chunk": chunk}),
        }
        self.dialect = Dialect(FAMILY, spec.describe(), spec.observation, exchanges)

    def read(self, arrays: Arrays) -> Chunk:
        """See :class:`~specact.wire.dialect.Codec`; in the environment's units."""
        return arrays["chunk"]


class ChunkResponder:
    """See :class:`~specact.wire.messages.Responder`.

    Args:
        policy: the target.
        name, fingerprint: of the policy.
    """

    def __init__(self, policy: ChunkPolicy, name: str, fingerprint: str) -> None:
        self._policy, self.name, self.fingerprint = policy, name, fingerprint
        # Whether the inference time does not depend on the request.
        self.steady = bool(getattr(policy, "steady", False))
        self.dialect = ChunkCodec(policy.spec).dialect

    def respond(self, requests: Sequence[Request]) -> list[Arrays | WireError]:
        """See :class:`~specact.wire.messages.Responder`; each request has its own random stream."""
        rngs = streams(Role.VERIFY, (request.address for request in requests))
        rows = [row for row, request in enumerate(requests) if request.kind == "infer"]
        answers: dict[int, Arrays | WireError] = {}
        if rows:
            chunks = self._policy.infer_batch([requests[row].window for row in rows], [rngs[row] for row in rows])
            wanted = self._policy.spec.chunk, self._policy.spec.actions
            shapes = [np.shape(chunk) for chunk in chunks]
            if shapes != [wanted] * len(rows):
                raise BundleError(
                    f"the policy {self.name} must answer {len(rows)} requests with chunks of shape {wanted}, it gave "
                    f"{len(shapes)} of {sorted(set(shapes))}"
                )
            answers.update(zip(rows, map(_answer, chunks), strict=True))
        for row, request in enumerate(requests):
            if request.kind == "inpaint":
                answers[row] = self._inpainted(request, rngs[row])
        return [answers[row] for row in range(len(requests))]

    def _inpainted(self, request: Request, rng: np.random.Generator) -> Arrays | WireError:
        if not self._policy.inpaints:
            return bad("this policy cannot inpaint; choose another execution")
        inpainting = Inpainting(request.arrays["actions"], request.arrays["weights"])
        try:
            return _answer(self._policy.infer(request.window, rng, inpainting))
        except ObservationError:
            return bad(_NOT_FINITE)


def _answer(chunk: Chunk) -> Arrays | WireError:
    return {"chunk": chunk} if np.isfinite(chunk).all() else bad(_NOT_FINITE)


def spec_of(agreed: Mapping[str, Any]) -> ChunkSpec:
    """The target's spec from a server's welcome.

    Raises:
        BundleError: if it is none, or beyond the limits of :func:`check_served`.
    """
    try:
        spec = read_record(dict(agreed), ChunkSpec, "spec", BundleError)
    except BundleError as error:
        raise BundleError(f"the server's spec is not one of a chunk policy ({printable(str(error))})") from None
    return check_served(spec)


def check_served(spec: ChunkSpec) -> ChunkSpec:
    """A spec from a server, checked: a mistaken or hostile one could exhaust the device's memory, or stop its robot.

    Raises:
        BundleError: for a history above 1024, more than 256 MiB of observations and actions, or a control rate
            outside .1 to 1000 Hz.
    """
    fields, history = spec.observation.fields.values(), spec.observation.history
    # Python integers, which cannot overflow. The control loop keeps every array as long as the longest history.
    observation = sum(math.prod(field.shape) * np.dtype(field.dtype).itemsize for field in fields)
    size = history * observation + 4 * spec.chunk * spec.actions
    for what, low, asked, high in (
        ("longest history", 1, history, MAX_HISTORY),
        ("bytes of observations and actions", 1, size, MAX_BYTES),
        ("control rate [Hz]", MIN_RATE_HZ, spec.rate_hz, MAX_RATE_HZ),
    ):
        if not low <= asked <= high:
            raise BundleError(
                f"the {what} of a server's policy must be {low} to {high} for this device, got {asked}; serve a policy "
                "within these limits"
            )
    return spec
