"""Wire format of activations at each cut and precision, and how a server makes the replies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specact.errors import BundleError, WireError, unknown_name
from specact.families.staged.stages import SplitSpec, StagedFolder
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Contract, Kind, Request
from specact.wire.messages import bad

FAMILY = "split"
Precision = Literal["float16", "uint8", "float32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_BYTES: dict[Precision, int] = {"float16": 2, "uint8": 1, "float32": 4}
_TYPES: dict[Precision, type[np.generic]] = {"float16": np.float16, "uint8": np.uint8, "float32": np.float32}
_NOT_FINITE = "the target has no finite activation for this observation"


def kind_at(spec: SplitSpec, cut: int, precision: Precision) -> str:
    """Type of the request whose reply is the activation at a cut; the last cut's is the target's answer.

    Raises:
        BundleError: for a cut that does not exist, or cut 0, at which there is no request.
        ConfigError: for an unknown precision.
    """
    if precision not in PRECISIONS:
        raise unknown_name("precision of activations", precision, PRECISIONS)
    if not 1 <= cut <= spec.stages:
        raise BundleError(f"a server runs 1 to {spec.stages} stages of this target, not {cut}")
    return "infer" if cut == spec.stages else f"cut-{cut}-{precision}"


def split_contract(spec: SplitSpec, fingerprint: str) -> Contract:
    """What device and server of a target in stages agree on.

    Args:
        spec: of its stages.
        fingerprint: of their files.
    """
    kinds = {
        kind_at(spec, cut, precision): Kind(Layout({}), _at_cut(size, precision))
        for cut, size in enumerate(spec.sizes, 1)
        for precision in PRECISIONS
    }
    # Flat, like activations.
    outputs = {name: ArraySpec((math.prod(shape),), np.float32) for name, shape in spec.outputs.items()}
    agreed = {"stages": spec.stages, "network": spec.network, "files": fingerprint}
    return Contract(FAMILY, agreed, spec.observation, {"infer": Kind(Layout({}), Layout(outputs)), **kinds})


def _at_cut(size: int, precision: Precision) -> Layout:
    activation = {"activation": ArraySpec((size,), _TYPES[precision])}
    return Layout(activation | ({"range": ArraySpec((2,), np.float32)} if precision == "uint8" else {}))


def pack(activation: NDArray[np.float32], precision: Precision) -> Arrays:
    """One row of an activation as the arrays of a reply.

    ``float16`` rounds each number to 11 bits: its relative error is at most ``2**-11`` (below 6e-5 its absolute error
    is at most 3e-8). ``uint8`` has 256 levels from the smallest to the largest number of the tensor, its ``range``: its
    error is at most 1/510 of that range. ``float32`` is exact.

    Raises:
        WireError: ``bad_message`` for numbers that are not finite, or beyond float16.
    """
    flat = activation.reshape(-1)
    if np.count_nonzero(np.isfinite(flat)) < flat.size:
        raise bad(_NOT_FINITE)
    if precision == "float32":
        return {"activation": flat}
    if precision == "float16":
        with np.errstate(over="ignore"):
            halved = flat.astype(np.float16)
        if np.count_nonzero(np.isfinite(halved)) < flat.size:
            raise bad("this activation is beyond float16; ask for float32")
        return {"activation": halved}
    low, high = float(flat.min()), float(flat.max())
    level = np.rint((flat.astype(np.float64) - low) * (255.0 / (high - low))) if high > low else np.zeros(flat.shape)
    return {"activation": level.astype(np.uint8), "range": np.array([low, high], np.float32)}


def unpack(arrays: Arrays, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The activation of a reply, ``[1, *shape]``.

    Raises:
        WireError: ``bad_message`` for a range whose low end is above its high end.
    """
    found = arrays["activation"]
    if "range" in arrays:
        low, high = arrays["range"].astype(np.float64)
        if not low <= high:
            raise bad("the range of an activation must not go down")
        found = low + found.astype(np.float64) * ((high - low) / 255.0)
    return found.astype(np.float32).reshape(1, *shape)


def reply_bytes(spec: SplitSpec, cut: int, precision: Precision) -> int:
    """Bytes of the arrays of a reply at a cut; none at cut 0."""
    if cut == 0:
        return 0
    if cut == spec.stages:
        return 4 * sum(int(np.prod(shape, dtype=np.int64)) for shape in spec.outputs.values())
    return _BYTES[precision] * spec.sizes[cut - 1] + (8 if precision == "uint8" else 0)


class SplitExchange:
    """See :class:`~specact.wire.exchange.Exchange`; a server runs the stages before each request's cut.

    Args:
        folder: of the stages.
    """

    # The inference time depends on the request's cut.
    steady = False

    def __init__(self, folder: StagedFolder) -> None:
        self.name, self.fingerprint = folder.name, folder.fingerprint
        self.contract = split_contract(folder.spec, folder.fingerprint)
        self._network, self._spec = folder.network, folder.spec
        self._cuts: dict[str, tuple[int, Precision]] = {
            kind_at(folder.spec, cut, precision): (cut, precision)
            for cut in range(1, folder.spec.stages + 1)
            for precision in PRECISIONS
        }

    def read(self, arrays: Arrays) -> list[NDArray[np.float32]]:
        """The outputs of the whole network, ``[1, ...]`` each."""
        return [arrays[name].reshape(1, *shape) for name, shape in self._spec.outputs.items()]

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
        cut, precision = self._cuts[kind]
        windows = [request.window for request in requests]
        if cut < self._spec.stages:
            return [_packed(activation, precision) for activation in self._network.begin(windows, cut)]
        outputs = zip(*self._network.run(windows), strict=True)
        return [
            {name: array.reshape(-1) for name, array in zip(self._spec.outputs, found, strict=True)}
            for found in outputs
        ]


def _packed(activation: NDArray[np.float32], precision: Precision) -> Arrays | WireError:
    # Extreme observations can overflow; only that request of the batch fails.
    try:
        return pack(activation, precision)
    except WireError as error:
        return error
