"""What crosses the wire for chunks of actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from specact.errors import BundleError, ObservationError, WireError
from specact.families.chunks.policy import Chunk, ChunkPolicy, ChunkSpec, Inpainting, check_chunks
from specact.records import read_record
from specact.rng import Role, streams
from specact.types import ActionUnits
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Contract, Kind, Request
from specact.wire.messages import bad, printable

FAMILY = "chunks"
# Limits of a spec that a device takes over from a server: the longest history, the bytes of as many observations and of
# a chunk, and the control rate [Hz]. Policies need far less.
MAX_HISTORY, MAX_BYTES, MIN_RATE_HZ, MAX_RATE_HZ = 1024, 1 << 28, 0.1, 1000
_Float32 = Annotated[float, Meta(ge=-1e30, le=1e30)]


def chunk_contract(spec: ChunkSpec, units: ActionUnits | None = None, verify: Kind | None = None) -> Contract:
    """What device and server of a chunk policy agree on; a server states the range of the ``units``, if known.

    Where a family's server verifies, ``verify`` is its request of each step.
    """
    chunk = ArraySpec((spec.chunk, spec.actions), np.float32)
    old = {"actions": chunk, "weights": ArraySpec((spec.chunk,), np.float32, 0.0, 1.0)}
    kinds = {
        "infer": Kind(Layout({}), Layout({"chunk": chunk})),
        "inpaint": Kind(Layout(old), Layout({"chunk": chunk})),
    }
    limits = {} if units is None else {"low": units.centre - units.scale, "high": units.centre + units.scale}
    stated = {name: limit.tolist() for name, limit in limits.items()}
    contract = Contract(FAMILY, spec.describe(), spec.observation, kinds, stated=stated)
    return contract if verify is None else replace(contract, kinds=kinds | {"verify": verify}, step_kind="verify")


class ChunkExchange:
    """See :class:`~specact.wire.exchange.Exchange`; chunks are in the environment's units.

    Each request has its own random stream. Families that verify on the server extend it by :meth:`verify`; clients that
    do not know them can use it all the same.

    Args:
        spec, units, verifies: see :func:`chunk_contract`.
        name, fingerprint: of the target.
        target: makes the target; called on a server only.
    """

    def __init__(
        self, spec: ChunkSpec, name: str, fingerprint: str, target: Callable[[], ChunkPolicy],
        units: ActionUnits | None = None, verifies: Kind | None = None,
    ) -> None:  # fmt: skip
        self.name, self.fingerprint, self._target = name, fingerprint, target
        self.contract = chunk_contract(spec, units, verifies)

    @cached_property
    def policy(self) -> ChunkPolicy:
        """The target; raises BundleError where it is only on a server."""
        return self._target()

    @property
    def steady(self) -> bool:
        """Whether the inference time does not depend on the request."""
        return bool(getattr(self.policy, "steady", False))

    def read(self, arrays: Arrays) -> Chunk:
        return arrays["chunk"]

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
        if kind == "verify":
            return self.verify(requests)
        rngs = streams(Role.VERIFY, (request.address for request in requests))
        if kind == "inpaint":
            return [self._inpainted(request, rng) for request, rng in zip(requests, rngs, strict=True)]
        chunks = self.policy.infer_batch([request.window for request in requests], rngs)
        check_chunks(self.name, self.policy.spec, chunks, len(requests))
        return [{"chunk": chunk} for chunk in chunks]

    def verify(self, requests: Sequence[Request]) -> list[Arrays | WireError]:
        """The replies to requests of a family's own kind."""
        raise NotImplementedError

    def _inpainted(self, request: Request, rng: np.random.Generator) -> Arrays | WireError:
        if not self.policy.inpaints:
            return bad("this policy cannot inpaint; choose another execution")
        inpainting = Inpainting(request.arrays["actions"], request.arrays["weights"])
        try:
            return {"chunk": self.policy.infer(request.window, rng, inpainting)}
        except ObservationError as error:
            return bad(str(error))


def spec_of(welcomed: Mapping[str, Any]) -> tuple[ChunkSpec, ActionUnits | None]:
    """The target's spec from a server's welcome, see :func:`check_served`, and the units of its actions, if stated."""
    agreed = dict(welcomed)
    limits = [agreed.pop(name, None) for name in ("low", "high")]
    try:
        spec = check_served(read_record(agreed, ChunkSpec, "spec", BundleError))
        if limits == [None, None]:
            return spec, None
        low, high = (np.array(read_record(limit, list[_Float32], "range", BundleError), np.float32) for limit in limits)
    except BundleError as error:
        raise BundleError(f"the server's spec is not one of a chunk policy ({printable(str(error))})") from None
    if not (low.shape == high.shape == (spec.actions,) and (low <= high).all()):
        raise BundleError(f"low and high of a server's policy must be finite ranges of its {spec.actions} actions")
    return spec, ActionUnits.of_range(low, high)


def check_served(spec: ChunkSpec) -> ChunkSpec:
    """A spec from a server, checked: a mistaken or hostile one could exhaust the device's memory, or stop its robot.

    Raises:
        BundleError: for a history, bytes of observations and actions, or a control rate beyond the limits above.
    """
    fields, history = spec.observation.fields.values(), spec.observation.history
    # Python integers, which cannot overflow. The control loop keeps every array as long as the longest history.
    observation = sum(math.prod(field.shape) * np.dtype(field.dtype).itemsize for field in fields)
    size = history * observation + 4 * spec.chunk * spec.actions
    for what, low, number, high in (
        ("longest history", 1, history, MAX_HISTORY),
        ("bytes of observations and actions", 1, size, MAX_BYTES),
        ("control rate [Hz]", MIN_RATE_HZ, spec.rate_hz, MAX_RATE_HZ),
    ):
        if not low <= number <= high:
            raise BundleError(
                f"the {what} of a server's policy must be {low} to {high} for this device, got {number}; serve a "
                "policy within these limits"
            )
    return spec
