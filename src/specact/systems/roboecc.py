"""RoboECC (arXiv 2603.20711): the server runs the first stages of a target and the device the rest, cut by the link.

A target is a chain of N stages. Cut k means that stages 1 to k run on the server; it is chosen between inferences::

    T(k) = sum_{i<=k} server_i + [0 < k < N] (L0 + S_k / B) + sum_{i>k} device_i                     (as printed)
    k*   = argmin T(k) such that the server's load is within its budget; ties: lower load, then earlier cut
    B    = bytes / (round trip - server time), measured in each exchange; B^ is the forecast of the next one
    B^ - B > T_high: the cut of the pool with the largest S_k; < T_low: the smallest; otherwise the cut is kept

with S_k, the bytes of the activation behind stage k, the link's bandwidth B and its latency L0. The pool are the cuts
whose stages both sides hold, so that a change loads nothing.

We changed: T(k) also counts what an answer requires, the observation sent up for k >= 1 and the answer sent down for
k = N (``faithful``); :class:`SmallestTotal` takes argmin T(k) at B^, since the published rule (:class:`RoboeccRule`)
ignores T; thresholds, which are not published, are one standard deviation of the changes so far; times of stages are
measured, not a roofline; activations cross as float16, as 8 bits or exactly. Robots forecast by the last value; the
paper's LSTM is compared with it in experiments/split.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, get_args

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import Kind, Manifest, joint_fingerprint, read_manifest
from specact.bundle.network import CPU, Compute, Network, NetworkInputs
from specact.errors import BundleError, ConfigError, RemoteError, WireError, unknown_name
from specact.families.codes.pair import CodeParts
from specact.families.codes.policy import distributions
from specact.families.codes.sampling import CodeDistribution
from specact.observation import ObservationSpec, Window
from specact.pair import Answer, Pair, Pending
from specact.records import Record, Size, check_fields
from specact.remote.client import Client
from specact.remote.target import positive_deadline
from specact.rng import StepAddress
from specact.systems.flow import FlashParts
from specact.types import Floats, Miss, OffloadTimes
from specact.wire import exchange as wire
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.messages import bad

A = TypeVar("A")
Array = NDArray[Any]
Reader = Callable[[list[Array], Window, StepAddress], A]
Accounting = Literal["faithful", "printed"]
Precision = Literal["float16", "uint8", "float32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
KIND: Kind = "split"
# The networks that are split, by the kind of the bundle; several are split as one, in sequence.
SPLIT_NETWORKS: dict[str, tuple[str, ...]] = {
    "pair": ("target",), "regression": ("policy",), "flow": ("encoder", "prefix"),
}  # fmt: skip
MAX_STAGES = 64
_MAX_NUMBERS = 1 << 26
_MIN_S, _TIMEOUT_S = 1e-6, 10.0


@dataclass(frozen=True)
class StageCosts:
    """Costs of a chain of N stages.

    Attributes:
        server_s, device_s: time of each stage on either side [s], ``[N]``, >= 0.
        cut_bytes: bytes sent down at cuts 0 to N, ``[N + 1]``, >= 0: none at 0, the answer at N.
        observation_bytes: bytes sent up at cuts 1 to N, >= 0.
        load: share of the server's capacity that each stage needs, ``[N]``, >= 0; equal shares of 1 if None.

    Raises:
        ConfigError: for other lengths, or a number that is negative or not finite.
    """

    server_s: Floats
    device_s: Floats
    cut_bytes: Floats
    observation_bytes: float
    load: Floats | None = None

    def __post_init__(self) -> None:
        count = len(self.server_s)
        load = np.full(count, 1.0 / max(1, count)) if self.load is None else self.load
        arrays = {
            "server_s": (self.server_s, count), "device_s": (self.device_s, count),
            "cut_bytes": (self.cut_bytes, count + 1), "load": (load, count),
        }  # fmt: skip
        for name, (given, length) in arrays.items():
            array = np.array(given, np.float64)
            if array.shape != (length,) or not count or not (np.isfinite(array) & (array >= 0.0)).all():
                raise ConfigError(f"{name} of {count} stages must be {length} finite numbers >= 0, got {given}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if not 0.0 <= self.observation_bytes < math.inf:
            raise ConfigError(f"observation_bytes must be a finite number >= 0, got {self.observation_bytes}")

    @property
    def stages(self) -> int:
        """N, the number of stages."""
        return len(self.server_s)

    @property
    def loads(self) -> Floats:
        """Load of the server at cuts 0 to N, ``[N + 1]``."""
        assert self.load is not None, "set in __post_init__"
        return np.concatenate([[0.0], np.cumsum(self.load)])

    def crossing(self, accounting: Accounting = "faithful") -> Floats:
        """Bytes on the link at cuts 0 to N, sum of both directions, ``[N + 1]``."""
        crossing = np.array(self.cut_bytes)
        if accounting == "printed":
            crossing[[0, -1]] = 0.0
        else:
            crossing[1:] += self.observation_bytes
        return crossing


def total_s(costs: StageCosts, bytes_s: float, latency_s: float = 0.0, accounting: Accounting = "faithful") -> Floats:
    """``T(k)`` for k = 0 to N [s], float64 ``[N + 1]``.

    Args:
        costs: of the stages.
        bytes_s: B, bandwidth of the link [bytes/s], > 0, infinity allowed.
        latency_s: L0, latency of a round trip [s], >= 0.
        accounting: ``printed`` is the published equation: cuts 0 and N do not use the link, and only the activation is
            sent; ``faithful`` adds what an answer requires.

    Raises:
        ConfigError: for a bandwidth or latency out of range.
    """
    if not bytes_s > 0.0 or not 0.0 <= latency_s < math.inf:
        raise ConfigError(f"a link has a bandwidth above 0 and a finite latency >= 0, got {bytes_s} and {latency_s}")
    server = np.concatenate([[0.0], np.cumsum(costs.server_s)])
    device = np.concatenate([np.cumsum(costs.device_s[::-1])[::-1], [0.0]])
    used = np.arange(costs.stages + 1) > 0
    if accounting == "printed":
        used[-1] = False
    total: Floats = server + used * (latency_s + costs.crossing(accounting) / bytes_s) + device
    return total


def best_cut(total: Floats, loads: Floats, allowed: Sequence[int], budget: float = math.inf) -> int:
    """``k*``: the cut of :func:`within` with the smallest total of ``[N + 1]`` [s]; ties: lower load, earlier cut."""
    return min(within(allowed, loads, budget), key=lambda cut: (total[cut], loads[cut], cut))


def within(allowed: Sequence[int], loads: Floats, budget: float) -> list[int]:
    """The allowed cuts whose load, of ``[N + 1]``, is within the budget, ascending.

    Raises:
        ConfigError: if there is none, or a cut does not exist.
    """
    if not allowed or not 0 <= min(allowed) <= max(allowed) < len(loads):
        raise ConfigError(f"cuts lie between 0 and {len(loads) - 1}, got {list(allowed)}")
    fitting = sorted(cut for cut in set(allowed) if loads[cut] <= budget)
    if not fitting:
        raise ConfigError(
            f"no cut of {sorted(set(allowed))} is within the server's load of {budget:g}; the least is "
            f"{min(loads[cut] for cut in allowed):g}"
        )
    return fitting


def adjusted_cut(current: int, change: float, low: float, high: float, pool: Sequence[int], cut_bytes: Floats) -> int:
    """The published adjustment of the current cut; of equal activations the nearest cut, then the smaller.

    Args:
        change, low, high: predicted minus measured bandwidth, and its thresholds [bytes/s].
        pool: cuts to choose from.
        cut_bytes: S_k at cuts 0 to N, ``[N + 1]``.

    Raises:
        ConfigError: for an empty pool.
    """
    if not pool:
        raise ConfigError("RoboECC's rule needs a pool of at least one cut")
    if low <= change <= high:
        return current
    sign = -1.0 if change > high else 1.0
    return min(pool, key=lambda cut: (sign * cut_bytes[cut], abs(cut - current), cut))


def measured(crossed_bytes: float, network_s: float) -> float:
    """``B`` of an exchange [bytes/s] of so many bytes in both directions; its latency lowers it, as published."""
    return crossed_bytes / max(network_s, _MIN_S)


class Bandwidths:
    """The bandwidths of the last 64 exchanges over one link."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, float]] = deque(maxlen=64)

    def __len__(self) -> int:
        return len(self._past)

    def add(self, crossed_bytes: float, network_s: float) -> None:
        """Adds an exchange: bytes of both directions, and its round trip without the server's time [s]."""
        self._past.append((crossed_bytes, network_s))

    @property
    def past(self) -> list[float]:
        """The measured bandwidths [bytes/s], the newest last."""
        return [measured(*exchange) for exchange in self._past]

    @property
    def deviation(self) -> float:
        """Standard deviation of the change between successive bandwidths [bytes/s]; 0 with fewer than three."""
        return float(np.std(np.diff(self.past))) if len(self._past) > 2 else 0.0

    def split_latency(self, bytes_s: float) -> tuple[float, float]:
        """Splits a predicted bandwidth B^ into a bandwidth without latency [bytes/s], and the latency L0 [s].

        L0 is the shortest time on the link so far, and the predicted time of the last exchange is preserved:
        ``bytes / B^ = L0 + bytes / B'``. Needs at least one exchange.
        """
        crossed, taken_s = self._past[-1][0], self._past[-1][0] / bytes_s
        latency_s = min(taken_s, min(network_s for _, network_s in self._past))
        return crossed / max(taken_s - latency_s, _MIN_S), latency_s


class Forecast(Protocol):
    """Predicts the bandwidth of the next exchange from those of the past."""

    def forecast(self, past: Sequence[float]) -> float:
        """The next bandwidth [bytes/s], > 0; ``past`` is not empty, the newest last."""
        ...


class LastValue:
    """Repeats the last measurement."""

    def forecast(self, past: Sequence[float]) -> float:
        return past[-1]


class Chooser(Protocol):
    """Chooses where a target is cut, between two inferences."""

    def choose(self, current: int, seen: Bandwidths) -> int:
        """The cut of the next inference, given the current one and the measured bandwidths."""
        ...


@dataclass
class StaticCut:
    """A constant cut: 0 for everything on the device, N for everything on the server."""

    cut: int

    def choose(self, current: int, seen: Bandwidths) -> int:
        return self.cut


class RoboeccRule:
    """The published adjustment, within a budget of the server's load; the first cut minimises the printed equation.

    Raises:
        ConfigError: if no cut of the pool is within the budget.
    """

    def __init__(self, costs: StageCosts, pool: Sequence[int], forecast: Forecast, budget: float = math.inf) -> None:
        self._costs, self._forecast = costs, forecast
        self._pool = within(pool, costs.loads, budget)
        self._planned = False

    def choose(self, current: int, seen: Bandwidths) -> int:
        if not len(seen):
            return current if current in self._pool else self._pool[0]
        bytes_s = seen.past[-1]
        if not self._planned:
            self._planned = True
            return best_cut(total_s(self._costs, bytes_s, accounting="printed"), self._costs.loads, self._pool)
        if len(seen) < 3:  # no deviation yet
            return current
        change, spread = self._forecast.forecast(seen.past) - bytes_s, seen.deviation
        return adjusted_cut(current, change, -spread, spread, self._pool, self._costs.cut_bytes)


class SmallestTotal:
    """The cut with the smallest total time at the predicted bandwidth.

    At cut 0 no request is sent and no bandwidth is measured. So after ``look_every`` inferences at cut 0 the best other
    cut is used once, even if it is slower; 0 for never.

    Args:
        costs, allowed, forecast, budget: as for :class:`RoboeccRule`.
        accounting: see :func:`total_s`.
        latency_apart: whether latency and bandwidth are separated, see :meth:`Bandwidths.split_latency`.
        look_every: see above.

    Raises:
        ConfigError: if no allowed cut is within the budget, or for a negative ``look_every``.
    """

    def __init__(
        self, costs: StageCosts, allowed: Sequence[int], forecast: Forecast, budget: float = math.inf,
        accounting: Accounting = "faithful", latency_apart: bool = False, look_every: int = 10,
    ) -> None:  # fmt: skip
        if look_every < 0:
            raise ConfigError(f"look_every must be at least 0, got {look_every}")
        self._costs, self._forecast, self._accounting = costs, forecast, accounting
        self._allowed = within(allowed, costs.loads, budget)
        self._latency_apart, self._look_every, self._unmeasured = latency_apart, look_every, 0

    def choose(self, current: int, seen: Bandwidths) -> int:
        remote = [cut for cut in self._allowed if cut]
        if not remote:
            return 0
        if not len(seen):
            return remote[-1]  # a first measurement
        bytes_s, latency_s = self._forecast.forecast(seen.past), 0.0
        if self._latency_apart:
            bytes_s, latency_s = seen.split_latency(bytes_s)
        total = total_s(self._costs, bytes_s, latency_s, self._accounting)
        cut = best_cut(total, self._costs.loads, self._allowed)
        self._unmeasured = 0 if cut else self._unmeasured + 1
        if self._look_every and self._unmeasured > self._look_every:
            self._unmeasured = 0
            return best_cut(total, self._costs.loads, remote)
        return cut


Row = Annotated[tuple[Size, ...], Meta(max_length=8)]


class SplitSpec(Record, frozen=True):
    """The spec shared by the stages of a network.

    Attributes:
        made_of, network: kind of the bundle that the network is part of, and its :func:`split_fingerprint`.
        observation: its observation spec.
        activations: shape of one row of the float32 tensor at each cut, 1 to N - 1.
        outputs: shape of one row of each output of the last stage, by name, in the network's order.

    Raises:
        ConfigError: for values outside their range.
    """

    made_of: Literal["pair", "regression", "flow"]
    network: str
    observation: ObservationSpec
    activations: Annotated[tuple[Row, ...], Meta(min_length=1, max_length=MAX_STAGES - 1)]
    outputs: dict[str, Row]

    def __post_init__(self) -> None:
        check_fields(self)
        if max(map(math.prod, (*self.activations, *self.outputs.values()))) > _MAX_NUMBERS:
            raise ConfigError(f"an activation or output has at most {_MAX_NUMBERS} numbers, see {self.outputs}")

    @property
    def stages(self) -> int:
        """N, the number of stages."""
        return len(self.activations) + 1

    def reply_bytes(self, cut: int, precision: Precision) -> int:
        """Bytes of the arrays of a reply at a cut; none at cut 0."""
        return 0 if cut == 0 else self.reply(cut, precision).nbytes

    def reply(self, cut: int, precision: Precision) -> Layout:
        """The reply to a request at a cut 1 to N; everything is flat."""
        if cut == self.stages:
            return Layout({name: ArraySpec((math.prod(shape),), np.float32) for name, shape in self.outputs.items()})
        dtype = np.dtype(precision).type
        activation = {"activation": ArraySpec((math.prod(self.activations[cut - 1]),), dtype)}
        return Layout(activation | ({"range": ArraySpec((2,), np.float32)} if precision == "uint8" else {}))

    def read_outputs(self, arrays: Arrays) -> list[Array]:
        """The outputs of the whole network, ``[1, ...]`` each, from the reply at cut N."""
        return [arrays[name].reshape(1, *shape) for name, shape in self.outputs.items()]


def split_fingerprint(manifest: Manifest) -> str:
    """Fingerprint of the networks of a bundle that are split."""
    prints = [manifest.fingerprints[network] for network in SPLIT_NETWORKS[manifest.kind]]
    return prints[0] if len(prints) == 1 else joint_fingerprint(*prints)


class StagedNetwork:
    """The stages on ONNX Runtime, of the files in order.

    Cut k lies behind stage k: :meth:`begin` runs stages 1 to k, :meth:`finish` the rest. Only the tensor at the cut is
    passed on, so that in float32 both together compute the same at every cut, bit for bit, at equal batch sizes.

    Raises:
        BundleError: if a file is no ONNX model, or does not fit the spec.
    """

    def __init__(
        self, files: Sequence[Path], spec: SplitSpec, inputs: NetworkInputs, *, compute: Compute = CPU
    ) -> None:
        self.spec, self.inputs = spec, inputs
        self._stages = [Network(file, compute=compute) for file in files]
        # The first stage may need only some of the observations.
        self._taken = self._stages[0].inputs.keys()
        seen = {name: list(shape[1:]) for name, shape in inputs.shapes.items() if name in self._taken}
        crossing = [[list(shape)] for shape in spec.activations]  # the names of these tensors are free
        outputs = {name: list(shape) for name, shape in spec.outputs.items()}
        for number, (file, stage) in enumerate(zip(files, self._stages, strict=True)):
            takes, gives = ({name: shape[1:] for name, shape in side.items()} for side in (stage.inputs, stage.outputs))
            last = number + 1 == spec.stages
            fits = takes == seen if number == 0 else list(takes.values()) == crossing[number - 1]
            if not fits or not (gives == outputs if last else list(gives.values()) == crossing[number]):
                raise BundleError(
                    f"{file} takes {takes} and gives {gives}, which is no stage {number + 1} of {spec.stages} that the "
                    "manifest describes; split the bundle again"
                )

    def begin(self, windows: Sequence[Window], cut: int) -> Array:
        """The tensor at a cut 1 to N-1 for B windows, float32 ``[B, ...]``."""
        return self._run(self._first(windows), 0, cut)[0]

    def finish(self, activation: Array, cut: int) -> list[Array]:
        """The network's outputs ``[B, ...]`` from the tensor at a cut 1 to N-1."""
        (name,) = self._stages[cut].inputs
        return self._run({name: activation}, cut, self.spec.stages)

    def run(self, windows: Sequence[Window]) -> list[Array]:
        """The network's outputs for B windows, ``[B, ...]``, by all stages."""
        return self._run(self._first(windows), 0, self.spec.stages)

    def _first(self, windows: Sequence[Window]) -> dict[str, Array]:
        return {name: array for name, array in self.inputs.stack(windows).items() if name in self._taken}

    def _run(self, given: Mapping[str, Array], first: int, end: int) -> list[Array]:
        outputs: list[Array] = []
        for stage in self._stages[first:end]:
            outputs = stage.run(given if not outputs else dict(zip(stage.inputs, outputs, strict=True)))
        names = list(self._stages[-1].outputs)
        return [outputs[names.index(name)] for name in self.spec.outputs] if end == self.spec.stages else outputs


@dataclass(frozen=True)
class StagedFolder(Bundle[SplitSpec]):
    """A loaded folder of stages."""

    network: StagedNetwork


def stage_parts(stages: int) -> dict[str, str]:
    """The files of N stages, by the names of the parts."""
    return {f"stage-{index:02d}": f"stage-{index:02d}.onnx" for index in range(stages)}


def load_staged(path: Path, *, compute: Compute = CPU) -> StagedFolder:
    """Loads a folder that ``specact split`` wrote, and refuses stages that do not fit together.

    Raises:
        BundleError: if a stage is missing or damaged, or if it is no such folder.
    """
    bundle = open_bundle(path, KIND, SplitSpec)
    parts, spec = stage_parts(bundle.spec.stages), bundle.spec
    if bundle.files.keys() != parts.keys():
        raise BundleError(f"{path} must hold the stages {', '.join(parts)}; split the bundle again")
    inputs = NetworkInputs(spec.observation, bundle.manifest.words)
    network = StagedNetwork([bundle.files[part] for part in parts], spec, inputs, compute=compute)
    return StagedFolder(path, bundle.manifest, spec, bundle.files, network)


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


def _cuts(spec: SplitSpec) -> dict[str, tuple[int, Precision]]:
    return {
        kind_at(spec, cut, precision): (cut, precision)
        for cut in (spec.stages, *range(1, spec.stages))
        for precision in PRECISIONS
    }


def split_contract(spec: SplitSpec, fingerprint: str) -> wire.Contract:
    """What device and server of a target in stages agree on, given the fingerprint of the stages' files."""
    kinds = {kind: wire.Kind(Layout({}), spec.reply(*at)) for kind, at in _cuts(spec).items()}
    agreed = {"stages": spec.stages, "network": spec.network, "files": fingerprint}
    return wire.Contract("split", agreed, spec.observation, kinds)


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
        raise bad("the target has no finite activation for this observation")
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
    numbers = arrays["activation"]
    if "range" in arrays:
        low, high = arrays["range"].astype(np.float64)
        if not low <= high:
            raise bad("the range of an activation must not go down")
        numbers = low + numbers.astype(np.float64) * ((high - low) / 255.0)
    return numbers.astype(np.float32).reshape(1, *shape)


class SplitExchange:
    """See :class:`~specact.wire.exchange.Exchange`; a server runs the stages before each request's cut."""

    # The inference time depends on the request's cut.
    steady = False

    def __init__(self, folder: StagedFolder) -> None:
        self.name, self.fingerprint = folder.name, folder.fingerprint
        self.contract = split_contract(folder.spec, folder.fingerprint)
        self._network, self._spec = folder.network, folder.spec
        self.read = folder.spec.read_outputs

    def answer(self, kind: str, requests: Sequence[wire.Request]) -> list[Arrays | WireError]:
        cut, precision = _cuts(self._spec)[kind]
        windows = [request.window for request in requests]
        if cut < self._spec.stages:
            return [_packed(activation, precision) for activation in self._network.begin(windows, cut)]
        outputs = zip(*self._network.run(windows), strict=True)
        return [
            {name: array.reshape(-1) for name, array in zip(self._spec.outputs, row, strict=True)} for row in outputs
        ]


def _packed(activation: NDArray[np.float32], precision: Precision) -> Arrays | WireError:
    # Extreme observations can overflow; only that request of the batch fails.
    try:
        return pack(activation, precision)
    except WireError as error:
        return error


class SplitTarget(Generic[A]):
    """See :class:`~specact.pair.Target`: the answer does not depend on where the stages ran.

    Args:
        folder: of the stages, the same as the server's.
        read: the family's answer from the network's outputs for one window, ``[1, ...]`` each, see :func:`reader_of`.
        client: of a server with these stages, see :func:`split_contract`; None if the cut is always 0.
        chooser: chooses the cuts.
        deadline_ms: of a reply [ms].
        precision: of activations on the wire.
        first: the initial cut.

    Attributes:
        cut, seen: the current cut, and the measured bandwidths.
        device_s: time of the device's stages in the last inference [s], 0 if it was missed; None before the first.
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
        self.cut, self.seen = first, Bandwidths()
        self.device_s: float | None = None
        self.counts: Counter[str] = Counter()

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        cut = self.chooser.choose(self.cut, self.seen)
        if not 0 <= cut <= self._spec.stages:
            raise ConfigError(f"a cut lies between 0 and {self._spec.stages}, but the chooser returned {cut}")
        self.counts["switches"] += self.device_s is not None and cut != self.cut
        self.cut = cut
        reply: Pending[tuple[Arrays, OffloadTimes]] = Pending(lambda: ({}, OffloadTimes()))
        if cut:
            if self._client is None:
                raise ConfigError(f"cut {cut} needs a server, and this target has none; give a client")
            kind = kind_at(self._spec, cut, self._precision)
            reply = self._client.request(kind, wire.Request(window, address), self._deadline_ms)
        return Pending(lambda: self._finish(reply, window, address, cut), reply.done, reply.sent)

    def _finish(
        self, reply: Pending[tuple[Arrays, OffloadTimes]], window: Window, address: StepAddress, cut: int
    ) -> Answer[A] | Miss:
        """Waits for the server's stages and runs the device's, which count as the target's inference."""
        self.counts[f"cut {cut}"] += 1
        self.device_s, result = 0.0, reply.result()
        if isinstance(result, Miss):
            if result.sent and result.cause == "deadline":
                # An upper bound of the bandwidth.
                self._record_bandwidth(cut, self._deadline_ms / 1e3)
            return result
        arrays, times = result
        started = time.monotonic()
        if cut:
            self._record_bandwidth(cut, times.network)
        try:
            answer = self._read(self._outputs(window, cut, arrays), window, address)
        except WireError:
            return Miss("invalid", times)
        self.device_s = time.monotonic() - started
        return Answer(answer, OffloadTimes(times.encode, times.network, times.queue, times.target + self.device_s))

    def _outputs(self, window: Window, cut: int, arrays: Arrays) -> list[Array]:
        if cut == 0:
            return self._network.run([window])
        if cut == self._spec.stages:
            return self._spec.read_outputs(arrays)
        return self._network.finish(unpack(arrays, self._spec.activations[cut - 1]), cut)

    def _record_bandwidth(self, cut: int, network_s: float) -> None:
        self.seen.add(self._spec.observation.nbytes + self._spec.reply_bytes(cut, self._precision), network_s)


def code_reader(pair: Pair[Any], folder: StagedFolder) -> Callable[[list[Array]], CodeDistribution]:
    """A function that converts the outputs of a split target of action codes to its answer.

    Raises:
        BundleError: if the stages are not those of the pair's target.
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
    read, chooser = reader_of(pair, folder), StaticCut(cut or 0)
    target = SplitTarget[Any](folder, read, client, chooser, deadline_ms, precision=precision)
    if cut is not None:
        if not 0 <= cut <= folder.spec.stages:
            raise ConfigError(f"{folder.path} can be cut from 0 to {folder.spec.stages}, not at {cut}")
        return target
    costs, target.seen = measure_costs(folder, client, 10 * [folder.spec.observation.zeros()], precision)
    target.chooser = SmallestTotal(costs, range(folder.spec.stages + 1), LastValue())
    return target


def measure_costs(
    folder: StagedFolder, client: Client, windows: Sequence[Window], precision: Precision = "float16"
) -> tuple[StageCosts, Bandwidths]:
    """Measures the stages' times on both sides by inferences at every cut in turn, and the bandwidth of the link.

    The server's are the median of its reported times; the device's the minimum of the time after the reply, to exclude
    other load. The server's load is in proportion to time.

    Args:
        folder, client, precision: as for :class:`SplitTarget`.
        windows: one per round, at least one.

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
            answer, device_s = target.submit(window, StepAddress(0, 0, 0, 0)).result(), target.device_s or 0.0
            if isinstance(answer, Miss):
                raise RemoteError(f"the server did not answer at cut {cut}; look at the link")
            device[row, cut], server[row, cut] = device_s, answer.times.target - device_s
    # More stages cannot take less time: noise must not give a stage a negative time.
    on_device = np.maximum.accumulate(device.min(axis=0)[::-1])[::-1]
    on_server = np.diff(np.maximum.accumulate(np.median(server, axis=0)))
    crossing = np.array([spec.reply_bytes(cut, precision) for cut in range(spec.stages + 1)], np.float64)
    load = on_server / max(float(on_server.sum()), 1e-9)
    return StageCosts(on_server, -np.diff(on_device), crossing, float(spec.observation.nbytes), load), target.seen
