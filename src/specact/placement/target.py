"""A split target: the server runs the first stages and the device the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from specact.bundle.manifest import read_manifest
from specact.errors import BundleError, ConfigError, RemoteError, WireError
from specact.families.codes.pair import CodeParts
from specact.families.codes.policy import distributions
from specact.families.codes.sampling import CodeDistribution
from specact.families.flash.pair import FlashParts
from specact.families.staged.stages import Array, StagedFolder, split_fingerprint
from specact.families.staged.wire import Precision, kind_at, reply_bytes, unpack
from specact.observation import Window
from specact.pair import Pair
from specact.placement.bandwidth import Bandwidths, LastValue
from specact.placement.choosers import Chooser, SmallestTotal, StaticCut
from specact.placement.planner import StageCosts
from specact.remote.client import Client
from specact.remote.target import positive_deadline
from specact.rng import StepAddress
from specact.types import Miss, OffloadTimes, value
from specact.verification import Answer, Pending
from specact.wire.arrays import Arrays
from specact.wire.exchange import Request

A = TypeVar("A")
Reader = Callable[[list[Array], Window, StepAddress], A]
_TIMEOUT_S, _ROUNDS = 10.0, 10


@value
class Placed:
    """Placement and times of one inference.

    Attributes:
        cut: number of stages that the server ran.
        device_s: time of the device's stages [s].
        offload: times of the request.
        missed: whether there was no usable reply.
    """

    cut: int
    device_s: float
    offload: OffloadTimes
    missed: bool


class SplitTarget(Generic[A]):
    """See :class:`~specact.verification.Target`: the answer does not depend on where the stages ran.

    The cut changes between inferences only. At cut 0 no request is sent.

    Args:
        folder: of the stages, the same as the server's.
        read: the family's answer from the network's outputs for one window, ``[1, ...]`` each, the window and the
            step's address.
        client: of a server with these stages, see :func:`~specact.families.staged.wire.split_contract`; None if the cut
            is always 0.
        chooser: chooses the cuts.
        deadline_ms: of a reply [ms].
        precision: of activations on the wire.
        first: the initial cut.

    Attributes:
        chooser: as given.
        cut: the current cut.
        seen: the measured bandwidths.
        last: placement of the last inference; None before the first.
        counts: inferences by cut, ``cut 0`` to ``cut N``, and ``switches``.

    Raises:
        ConfigError: for a deadline that is not positive, or an unknown precision.
    """

    def __init__(
        self, folder: StagedFolder, read: Reader[A], client: Client | None, chooser: Chooser,
        deadline_ms: float, *, precision: Precision = "float16", first: int = 0,
    ) -> None:  # fmt: skip
        self._spec, self._network = folder.spec, folder.network
        self._client, self.chooser, self._read = client, chooser, read
        self._deadline_ms, self._precision = positive_deadline(deadline_ms), precision
        kind_at(self._spec, self._spec.stages, precision)  # raises for an unknown precision
        self.cut = first
        self.seen = Bandwidths()
        self.last: Placed | None = None
        self.counts: Counter[str] = Counter()

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        """See :class:`~specact.verification.Target`."""
        self._choose()
        cut = self.cut
        nothing: Pending[tuple[Arrays, OffloadTimes]] = Pending(lambda: ({}, OffloadTimes()))
        reply = self._send(window, address) if cut else nothing
        return Pending(lambda: self._finish(reply, window, address, cut), reply.done, reply.sent)

    def _choose(self) -> None:
        chosen = self.chooser.choose(self.cut, self.seen)
        if not 0 <= chosen <= self._spec.stages:
            raise ConfigError(f"a cut lies between 0 and {self._spec.stages}, but the chooser returned {chosen}")
        self.counts["switches"] += bool(self.last) and chosen != self.cut
        self.cut = chosen

    def _send(self, window: Window, address: StepAddress) -> Pending[tuple[Arrays, OffloadTimes]]:
        if self._client is None:
            raise ConfigError(f"cut {self.cut} needs a server, and this target has none; give a client")
        kind = kind_at(self._spec, self.cut, self._precision)
        return self._client.request(kind, Request(window, address), self._deadline_ms)

    def _finish(
        self, reply: Pending[tuple[Arrays, OffloadTimes]], window: Window, address: StepAddress, cut: int
    ) -> Answer[A] | Miss:
        """Waits for the server's stages and runs the device's."""
        self.counts[f"cut {cut}"] += 1
        result = reply.result()
        if isinstance(result, Miss):
            if result.sent and result.cause == "deadline":
                # An upper bound of the bandwidth.
                self._record_bandwidth(cut, self._deadline_ms / 1e3)
            self.last = Placed(cut, 0.0, result.times, missed=True)
            return result
        arrays, times = result
        started = time.monotonic()
        if cut:
            self._record_bandwidth(cut, times.network)
        try:
            answer = self._read(self._outputs(window, cut, arrays), window, address)
        except WireError:
            self.last = Placed(cut, 0.0, times, missed=True)
            return Miss("invalid", times)
        device_s = time.monotonic() - started
        self.last = Placed(cut, device_s, times, missed=False)
        # The device's stages count as the target's inference.
        return Answer(answer, OffloadTimes(times.encode, times.network, times.queue, times.target + device_s))

    def _outputs(self, window: Window, cut: int, arrays: Arrays) -> list[Array]:
        if cut == 0:
            return self._network.run([window])
        if cut == self._spec.stages:
            return [arrays[name].reshape(1, *shape) for name, shape in self._spec.outputs.items()]
        return self._network.finish(unpack(arrays, self._spec.activations[cut - 1]), cut)

    def _record_bandwidth(self, cut: int, network_s: float) -> None:
        crossed = self._spec.observation.nbytes + reply_bytes(self._spec, cut, self._precision)
        self.seen.add(crossed, network_s)


def code_reader(pair: Pair[Any], folder: StagedFolder) -> Callable[[list[Array]], CodeDistribution]:
    """A function that converts the outputs of a split target of action codes to its answer.

    Raises:
        BundleError: if the stages are not those of the bundle's target.
    """
    _check_stages(pair, folder)
    temperature = pair.parts.spec.temperature
    return lambda outputs: distributions(outputs, temperature)[0]


def reader_of(pair: Pair[Any], folder: StagedFolder) -> Reader[Any]:
    """A function that converts a split target's outputs to its answer: code distributions, or a flow's prefix cache.

    Raises:
        BundleError: if the stages are not those of the pair's target.
        ConfigError: for a pair of another family.
    """
    if isinstance(pair.parts, FlashParts):
        _check_stages(pair, folder)
        target = pair.parts.target()
        return lambda outputs, window, address: replace(target.answer(window, address), cache=outputs[0])
    if isinstance(pair.parts, CodeParts):
        read = code_reader(pair, folder)
        return lambda outputs, window, address: read(outputs)
    raise ConfigError(
        f"{pair.name} is of a family whose target is not split; choose a pair of action codes or a flow policy"
    )


def _check_stages(pair: Pair[Any], folder: StagedFolder) -> None:
    assert pair.path is not None, "these families load folders"
    wanted = split_fingerprint(read_manifest(pair.path))
    if folder.spec.network != wanted:
        raise BundleError(
            f"{folder.path} has the stages of a network {folder.spec.network}, but the target of {pair.path} is "
            f"{wanted}; split that one: specact split {pair.path} --out FOLDER"
        )


def placed_target(
    pair: Pair[Any], folder: StagedFolder, client: Client, deadline_ms: float, *,
    cut: int | None = None, precision: Precision = "float16",
) -> SplitTarget[Any]:  # fmt: skip
    """A pair's target on device and server, at a fixed cut or at the one with the smallest predicted total.

    Args:
        pair: of action codes, or a flow policy.
        folder, client, deadline_ms, precision: as for :class:`SplitTarget`.
        cut: 0 to N; None measures the stages' times and then adapts to the last measured bandwidth.

    Raises:
        BundleError: if the stages are not those of the pair's target.
        ConfigError: for a cut that does not exist, an unknown precision, or a family whose target is not split.
        RemoteError: if the server does not answer while the stages are measured.
    """
    chooser = StaticCut(cut or 0)
    target = SplitTarget[Any](folder, reader_of(pair, folder), client, chooser, deadline_ms, precision=precision)
    if cut is not None:
        if not 0 <= cut <= folder.spec.stages:
            raise ConfigError(f"{folder.path} can be cut from 0 to {folder.spec.stages}, not at {cut}")
        return target
    costs, target.seen = measure_costs(folder, client, _ROUNDS * [folder.spec.observation.zeros()], precision)
    target.chooser = SmallestTotal(costs, range(folder.spec.stages + 1), LastValue())
    return target


def measure_costs(
    folder: StagedFolder, client: Client, windows: Sequence[Window], precision: Precision = "float16"
) -> tuple[StageCosts, Bandwidths]:  # fmt: skip
    """Measures the stages' times on both sides by inferences at every cut in turn, and the bandwidth of the link.

    For the server's stages we take the median of its reported times; for the device's stages the minimum over all
    rounds of the time after the reply, to exclude other load.

    Args:
        folder, client, precision: as for :class:`SplitTarget`.
        windows: one per round, at least one.

    Returns:
        The costs, with the server's load in proportion to time, and the measured bandwidths.

    Raises:
        ConfigError: without windows.
        RemoteError: if the server does not answer.
    """
    if not windows:
        raise ConfigError("costs are measured on at least one window")
    spec, fixed = folder.spec, StaticCut(0)
    target = SplitTarget(folder, lambda outputs, *_: outputs, client, fixed, 1e3 * _TIMEOUT_S, precision=precision)
    device, server = (np.zeros((len(windows), spec.stages + 1)) for _ in range(2))
    for row, window in enumerate(windows):
        for cut in range(spec.stages + 1):
            fixed.cut = cut
            found, placed = target.submit(window, StepAddress(0, 0, 0, 0)).result(), target.last
            if isinstance(found, Miss) or placed is None:
                raise RemoteError(f"the server did not answer at cut {cut}; look at the link")
            device[row, cut], server[row, cut] = placed.device_s, placed.offload.target
    # More stages cannot take less time: noise must not give a stage a negative time.
    on_device = np.maximum.accumulate(device.min(axis=0)[::-1])[::-1]
    on_server = np.diff(np.maximum.accumulate(np.median(server, axis=0)))
    crossing = np.array([reply_bytes(spec, cut, precision) for cut in range(spec.stages + 1)], np.float64)
    load = on_server / max(float(on_server.sum()), 1e-9)
    return StageCosts(on_server, -np.diff(on_device), crossing, float(spec.observation.nbytes), load), target.seen
