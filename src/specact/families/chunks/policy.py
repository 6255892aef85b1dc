"""Policies that return chunks of actions: their spec and interface, and what crosses the wire for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from specact.errors import BundleError, ConfigError, SpecactError, WireError
from specact.observation import ObservationSpec, Window
from specact.records import RateHz, Record, Size, read_record
from specact.rng import Role, streams
from specact.types import ActionUnits
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Contract, Kind, Request
from specact.wire.messages import bad, printable

Chunk = NDArray[np.float32]
FAMILY = "chunks"
# Limits of a spec that a device takes over from a server: the longest history, the bytes of as many observations and of
# a chunk, and the control rate [Hz]. Policies need far less.
MAX_HISTORY, MAX_BYTES, MIN_RATE_HZ, MAX_RATE_HZ = 1024, 1 << 28, 0.1, 1000


class ChunkSpec(Record, frozen=True):
    """Observations and chunks of a chunk policy.

    Attributes:
        observation: its observation spec.
        chunk, actions: H, number of actions of a chunk, and A.
        rate_hz: control rate of the demonstrations [Hz].
    """

    observation: ObservationSpec
    chunk: Size
    actions: Size
    rate_hz: RateHz

    def describe(self) -> dict[str, Any]:
        """As plain values, for a manifest."""
        return structs.asdict(self) | {"observation": self.observation.describe()}


def resized(chunk: Chunk, length: int) -> Chunk:
    """A chunk ``[n, A]`` cut to ``[length, A]``, or extended by repeating its last action."""
    missing = max(0, length - len(chunk))
    return np.concatenate([chunk[:length], np.repeat(chunk[-1:], missing, axis=0)])


@dataclass(frozen=True)
class Inpainting:
    """Real-time chunking: the last chunk's actions as a constraint on the new chunk.

    Row i of the actions ``[H, A]``, in the environment's units, is for the new chunk's step i, and ignored at weight 0.
    The weights ``[H]`` are 1 for actions executed before the new chunk arrives, then fall to 0 (soft mask).
    """

    actions: NDArray[np.float32]
    weights: NDArray[np.float32]

    @property
    def committed(self) -> NDArray[np.float32]:
        """The first d actions, ``[d, A]``: those of weight 1."""
        return self.actions[: int(np.cumprod(self.weights >= 1.0).sum())]


class ChunkPolicy(Protocol):
    """A policy that samples a chunk of actions for an observation window.

    Attributes:
        spec: its observations and chunks.
        inpaints: whether :meth:`infer` supports inpainting.
    """

    @property
    def spec(self) -> ChunkSpec: ...
    @property
    def inpaints(self) -> bool: ...

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> Sequence[Chunk]:
        """The chunks of several windows in one batch, each with its own random generator; they may be NaN."""
        ...

    def infer(self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None) -> Chunk:
        """A chunk of actions, float32 ``[H, A]``, in the environment's units; it may be NaN.

        Raises:
            ConfigError: if ``inpainting`` is given but not supported, or has the wrong shape.
        """
        ...


class BatchPolicy:
    """Base of policies that do not inpaint and answer a window as a batch of one."""

    inpaints = False

    def infer(
        self: ChunkPolicy, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None
    ) -> Chunk:
        if inpainting is not None:
            raise ConfigError("this policy cannot inpaint; choose another execution for it, or a flow policy")
        return self.infer_batch([window], [rng])[0]


def units_of(low: object, high: object, actions: int) -> ActionUnits | None:
    """Units of a range of actions, or None without one; ConfigError if it is none of so many finite numbers."""
    if low is None and high is None:
        return None
    try:
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite and are refused
            ends = np.array([low, high], np.float32)
    except (TypeError, ValueError, OverflowError):
        ends = np.zeros(0, np.float32)
    # The middle of a range must be finite in float32.
    if ends.shape != (2, actions) or not (np.abs(ends) <= 1e30).all() or not (ends[0] <= ends[1]).all():
        raise ConfigError(
            f"low and high must each be {actions} finite numbers, low at most high; got {low!r:.60} and {high!r:.60}"
        )
    return ActionUnits.of_range(*ends)


def chunk_contract(
    spec: ChunkSpec, units: ActionUnits | None = None, verify: Kind | None = None, fingerprint: str = "", **stated: Any
) -> Contract:
    """What device and server of a chunk policy agree on; a server states the range of the ``units``, if known.

    Where a family's server verifies, ``verify`` is its request of each step. It may state more. The fingerprint is the
    target's.
    """
    chunk = ArraySpec((spec.chunk, spec.actions), np.float32)
    old = {"actions": chunk, "weights": ArraySpec((spec.chunk,), np.float32, 0.0, 1.0)}
    kinds = {
        "infer": Kind(Layout({}), Layout({"chunk": chunk})),
        "inpaint": Kind(Layout(old), Layout({"chunk": chunk})),
    }
    limits = {} if units is None else {"low": units.centre - units.scale, "high": units.centre + units.scale}
    stated |= {name: limit.tolist() for name, limit in limits.items()}
    contract = Contract(FAMILY, spec.describe(), spec.observation, kinds, stated=stated, fingerprint=fingerprint)
    return contract if verify is None else replace(contract, kinds=kinds | {"verify": verify}, step_kind="verify")


def filled(layout: Layout, **values: Any) -> dict[str, NDArray[Any]]:
    """Arrays from numbers and from arrays with fewer rows; the rest, and all of None, is the smallest number allowed.

    Where no number is the smallest it is 0.
    """
    arrays = {name: array.copy() for name, array in _smallest(layout).items()}
    for name, value in values.items():
        if value is not None:
            arrays[name][: 1 if isinstance(value, int | float) else len(value)] = value
    return arrays


@lru_cache(64)
def _smallest(layout: Layout) -> dict[str, NDArray[Any]]:
    lows = {name: 0 if math.isinf(spec.low) else spec.low for name, spec in layout.specs.items()}
    return {name: np.full(spec.shape, lows[name], spec.dtype) for name, spec in layout.specs.items()}


class ChunkExchange:
    """See :class:`~specact.wire.exchange.Exchange`; chunks are in the environment's units.

    Each request has its own random stream. Families that verify on the server extend it by :meth:`verify`; clients that
    do not know them can use it all the same.

    Args:
        spec, units, verifies, stated: see :func:`chunk_contract`.
        name, fingerprint: of the target.
        target: makes the target; called on a server only.
    """

    def __init__(
        self, spec: ChunkSpec, name: str, fingerprint: str, target: Callable[[], ChunkPolicy],
        units: ActionUnits | None = None, verifies: Kind | None = None, **stated: Any,
    ) -> None:  # fmt: skip
        self.name, self._target = name, target
        self.contract = chunk_contract(spec, units, verifies, fingerprint, **stated)

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
        return [{"chunk": chunk} for chunk in self.policy.infer_batch([request.window for request in requests], rngs)]

    def verify(self, requests: Sequence[Request]) -> list[Arrays | WireError]:
        """The replies to requests of a family's own kind."""
        raise NotImplementedError

    def _inpainted(self, request: Request, rng: np.random.Generator) -> Arrays | WireError:
        if not self.policy.inpaints:
            return bad("this policy cannot inpaint; choose another execution")
        return {"chunk": self.policy.infer(request.window, rng, Inpainting(**request.arrays))}


def spec_of(stated: Mapping[str, Any]) -> tuple[ChunkSpec, ActionUnits | None]:
    """A policy's spec as its server states it, and the units of its actions, if it states ``low`` and ``high``.

    Raises:
        BundleError: if it is none, or beyond the limits above: a mistaken or hostile one could exhaust the device's
            memory, or stop its robot.
    """
    values = {name: stated[name] for name in ChunkSpec.__struct_fields__ if name in stated}
    try:
        spec = read_record(values, ChunkSpec, "spec")
        units = units_of(stated.get("low"), stated.get("high"), spec.actions)
    except SpecactError as error:
        raise BundleError(f"the server's spec is not one of a chunk policy ({printable(str(error))})") from None
    fields, history = spec.observation.fields.values(), spec.observation.history
    # Python integers, which cannot overflow. The control loop keeps every array as long as the longest history.
    observation = sum(math.prod(field.shape) * np.dtype(field.dtype).itemsize for field in fields)
    size = history * observation + 4 * spec.chunk * spec.actions
    if history > MAX_HISTORY or size > MAX_BYTES or not MIN_RATE_HZ <= spec.rate_hz <= MAX_RATE_HZ:
        raise BundleError(
            f"a server's policy may have a history of {MAX_HISTORY}, {MAX_BYTES} bytes of observations and actions, "
            f"and a control rate of {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz for this device, got {history}, {size} and "
            f"{spec.rate_hz}; serve a policy within these limits"
        )
    return spec, units
