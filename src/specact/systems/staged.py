"""A target in stages, which a server and a device can share: the networks, and what crosses the wire at each cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import MANIFEST, Kind, Manifest, joint_fingerprint, read_manifest
from specact.bundle.network import CPU, Compute, Network, NetworkInputs
from specact.errors import BundleError, ConfigError
from specact.families.codes.pair import CodeParts
from specact.families.codes.policy import distributions
from specact.families.tokens.pair import GREEDY, TokenParts
from specact.families.tokens.policy import BINS, DecodingRequest, Reading, TokenBundle, load_tokens
from specact.families.tokens.speculative import NOTHING, TARGET, UNTESTED, Decoded, Speculation, decode
from specact.observation import ObservationSpec, Window
from specact.pair import Pair
from specact.records import Record, Size, check_fields
from specact.rng import StepAddress
from specact.systems.flow import FlowParts
from specact.types import value
from specact.wire import exchange as wire
from specact.wire.arrays import Arrays, ArraySpec, Layout

A = TypeVar("A")
Array = NDArray[Any]
# A family's answer from the outputs of its network for one window, [1, ...] each.
Reader = Callable[[list[Array], Window, StepAddress], A]
Precision = Literal["float16", "uint8", "float32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
KIND: Kind = "split"
POLICY = "policy"
# The networks that are split, by the kind of the bundle; several are split as one, in sequence.
SPLIT_NETWORKS: dict[str, tuple[str, ...]] = {
    "pair": ("target",), "regression": ("policy",), "flow": ("encoder", "prefix"),
}  # fmt: skip
MAX_STAGES, _MAX_NUMBERS = 64, 1 << 26
Row = Annotated[tuple[Size, ...], Meta(max_length=8)]


class SplitSpec(Record, frozen=True):
    """The spec shared by the N stages of a network.

    Attributes:
        made_of, network: kind of the bundle that the network is part of, and its :func:`split_fingerprint`.
        observation: its observation spec.
        activations: shape of one row of the float32 tensor at each cut, 1 to N - 1.
        outputs: shape of one row of each output of the last stage, by name, in the network's order.
    """

    made_of: Literal["pair", "regression", "flow", "tokens"]
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
            most = (0.0, BINS - 1.0) if self.made_of == "tokens" else (-math.inf, math.inf)
            return Layout({key: ArraySpec((math.prod(dims),), np.float32, *most) for key, dims in self.outputs.items()})
        activation = {"activation": ArraySpec((math.prod(self.activations[cut - 1]),), np.dtype(precision).type)}
        levels = {"low": ArraySpec((1,), np.float32), "span": ArraySpec((1,), np.float32, 0.0)}
        return Layout(activation | (levels if precision == "uint8" else {}))

    def read_outputs(self, arrays: Arrays) -> list[Array]:
        """The outputs of the whole network, ``[1, ...]`` each, from the reply at cut N."""
        return [arrays[name].reshape(1, *shape) for name, shape in self.outputs.items()]


def split_fingerprint(manifest: Manifest) -> str:
    """Fingerprint of the networks of a bundle that are split."""
    prints = [manifest.fingerprints[network] for network in SPLIT_NETWORKS[manifest.kind]]
    return prints[0] if len(prints) == 1 else joint_fingerprint(*prints)


@dataclass(frozen=True)
class StagedFolder(Bundle[SplitSpec]):
    """A target in stages. Cut k lies behind stage k: :meth:`begin` runs stages 1 to k, :meth:`finish` the rest.

    Only the tensor at the cut is passed on, so that in float32 both together compute the same at every cut, bit for
    bit, at equal batch sizes.

    Attributes:
        networks: of the stages, in order.
        inputs: of the whole network; the first stage may need only some of them.
    """

    networks: Sequence[Network]
    inputs: NetworkInputs

    def begin(self, windows: Sequence[Window], cut: int) -> Array:
        """The tensor at a cut 1 to N-1 for B windows, float32 ``[B, ...]``."""
        return self._run(self._first(windows), 0, cut)[0]

    def finish(self, activation: Array, cut: int) -> list[Array]:
        """The network's outputs ``[B, ...]`` from the tensor at a cut 1 to N-1."""
        (name,) = self.networks[cut].inputs
        return self._run({name: activation}, cut, self.spec.stages)

    def run(self, windows: Sequence[Window]) -> list[Array]:
        """The network's outputs for B windows, ``[B, ...]``, by all stages."""
        return self._run(self._first(windows), 0, self.spec.stages)

    def through(self, window: Window, cut: int, precision: Precision) -> list[Array]:
        """The network's outputs for one window, ``[1, ...]``, with the activation at a cut as it is after the wire."""
        if cut in (0, self.spec.stages):
            return self.run([window])
        sent = pack(self.begin([window], cut)[0], precision)
        return self.finish(unpack(sent, self.spec.activations[cut - 1]), cut)

    def _first(self, windows: Sequence[Window]) -> dict[str, Array]:
        names = self.networks[0].inputs
        return {name: array for name, array in self.inputs.stack(windows).items() if name in names}

    def _run(self, inputs: Mapping[str, Array], first: int, end: int) -> list[Array]:
        outputs: list[Array] = []
        for stage in self.networks[first:end]:
            outputs = stage.run(dict(zip(stage.inputs, outputs, strict=True)) if outputs else inputs)
        names = list(self.networks[-1].outputs)
        return [outputs[names.index(name)] for name in self.spec.outputs] if end == self.spec.stages else outputs


class TokenStages:
    """The three stages of a token policy: encoder, prefill, greedy decoding; as :class:`StagedFolder`, of its bundle.

    At cut 1 the encoder's tokens cross, ``[P, W]``. At cut 2 the KV cache of the prefix does, once for all tokens that
    are decoded behind it, with logits and feature of the first one, ``[L 2 W P + 256 + W]`` numbers. The output are the
    T tokens of the chunk, NaN if a logit was not finite.
    """

    def __init__(self, bundle: TokenBundle) -> None:
        bundle.networks.check_decodes()
        networks, observation = bundle.networks, bundle.spec.observation
        self._networks, self.path = networks, bundle.path
        self.name, self.fingerprint = bundle.name, bundle.fingerprint
        self._entries = networks.cache(1).entries[..., : networks.prefix, :].shape[1:]
        numbers = math.prod(self._entries) + BINS + networks.width
        activations = ((networks.prefix, networks.width), (numbers,))
        self.spec = SplitSpec("tokens", bundle.fingerprint, observation, activations, {"tokens": (networks.length,)})

    def begin(self, windows: Sequence[Window], cut: int) -> Array:
        """The numbers at cut 1 or 2 for B windows, float32 ``[B, ...]``."""
        seen = self._networks.tokens([self.spec.observation.select(window) for window in windows])
        return seen if cut == 1 else self.prefilled(seen)

    def finish(self, activation: Array, cut: int) -> list[Array]:
        """The chunks' tokens ``[B, T]``, as float32, from the numbers at cut 1 or 2."""
        numbers = self.prefilled(activation) if cut == 1 else activation
        batch, size = len(numbers), math.prod(self._entries)
        entries = numbers[:, :size].reshape(batch, *self._entries)
        logits, features = np.split(numbers[:, None, size:], [BINS], axis=-1)
        cache = self._networks.cache(batch)
        cache.keep(entries, [np.arange(self._networks.prefix)] * batch)
        greedy = [Speculation([NOTHING], UNTESTED)] * batch
        with np.errstate(over="ignore", invalid="ignore"):
            chunks = decode(self._networks, cache, Reading(logits, features, entries), greedy)
        return [np.array([chunk.tokens if chunk.finite else chunk.tokens * np.nan for chunk in chunks], np.float32)]

    def run(self, windows: Sequence[Window]) -> list[Array]:
        """The chunks' tokens for B windows, ``[B, T]``."""
        return self.finish(self.begin(windows, 2), 2)

    def prefilled(self, seen: Array) -> Array:
        """The numbers at cut 2 from those at cut 1."""
        with np.errstate(over="ignore", invalid="ignore"):
            cache, reading = self._networks.prefill(seen)
        entries = cache.entries[..., : self._networks.prefix, :].reshape(len(seen), -1)
        return np.concatenate([entries, reading.logits[:, -1], reading.features[:, -1]], axis=1)


@value
class Written:
    """In place of a :class:`~specact.families.tokens.policy.Prefilled`: a chunk that its stages decoded greedily."""

    decoded: Decoded

    def decode(self, requests: Sequence[DecodingRequest]) -> list[Decoded]:
        return [self.decoded] * len(requests)

    @classmethod
    def of(cls, tokens: Array) -> Written:
        """From the tokens ``[T]``, NaN if a logit was not finite."""
        count, known = len(tokens), np.nan_to_num(tokens).astype(np.int64)
        sources, passes = np.full(count, TARGET, np.uint8), count - 1
        finite, features = bool(np.isfinite(tokens).all()), np.zeros((1, 1), np.float32)
        return cls(Decoded(known, sources, 0 * known, [0] * passes, [1] * passes, count, features, finite))


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
    networks = [Network(bundle.files[part], compute=compute) for part in parts]
    for number, network in enumerate(networks):
        # The names of the tensors in between are free.
        before, behind = spec.activations[max(0, number - 1) : number], spec.activations[number : number + 1]
        first = {name: shape[1:] for name, shape in inputs.shapes.items() if name in network.inputs}
        wanted_inputs = dict(zip(network.inputs, before, strict=False)) if number else first
        wanted_outputs = dict(zip(network.outputs, behind, strict=False)) or spec.outputs
        for shapes, wanted in ((network.inputs, wanted_inputs), (network.outputs, wanted_outputs)):
            if {name: tuple(shape[1:]) for name, shape in shapes.items()} != {n: tuple(w) for n, w in wanted.items()}:
                raise BundleError(
                    f"{bundle.files[f'stage-{number:02d}']} has {shapes}, which is no stage {number + 1} of "
                    f"{spec.stages} that the manifest describes; split the bundle again"
                )
    return StagedFolder(path, bundle.manifest, spec, bundle.files, networks, inputs)


def load_stages(path: Path, *, compute: Compute = CPU) -> StagedFolder | TokenStages:
    """As :func:`load_staged`, also of a token policy, whose bundle is in the folder :data:`POLICY`."""
    if (path / POLICY / MANIFEST).is_file():
        return TokenStages(load_tokens(path / POLICY, compute=compute))
    return load_staged(path, compute=compute)


def _cuts(spec: SplitSpec) -> dict[str, tuple[int, Precision]]:
    """Cut and precision of each kind of request; the last cut's is the target's answer, ``infer``."""
    cuts = {f"cut-{cut}-{precision}": (cut, precision) for cut in range(1, spec.stages) for precision in PRECISIONS}
    return {"infer": (spec.stages, "float32"), **cuts}


def kind_at(spec: SplitSpec, cut: int, precision: Precision) -> str:
    """Kind of the request whose reply is the activation at a cut.

    Raises:
        ConfigError: for a cut that does not exist, cut 0, at which there is no request, or an unknown precision.
    """
    kind = "infer" if cut == spec.stages else f"cut-{cut}-{precision}"
    if kind not in _cuts(spec):
        raise ConfigError(
            f"a server runs 1 to {spec.stages} stages of this target, with activations in {', '.join(PRECISIONS)}; got "
            f"{cut} and {precision!r}"
        )
    return kind


def split_contract(spec: SplitSpec, fingerprint: str) -> wire.Contract:
    """What device and server of a target in stages agree on, given the fingerprint of the stages' files."""
    kinds = {kind: wire.Kind(Layout({}), spec.reply(*at)) for kind, at in _cuts(spec).items()}
    agreed = {"stages": spec.stages, "network": spec.network, "files": fingerprint}
    return wire.Contract("split", agreed, spec.observation, kinds, fingerprint=fingerprint)


@np.errstate(over="ignore", invalid="ignore")
def pack(activation: NDArray[np.float32], precision: Precision) -> Arrays:
    """One row of an activation as the arrays of a reply.

    ``float16`` rounds each number to 11 bits: its relative error is at most ``2**-11`` (below 6e-5 its absolute error
    is at most 3e-8). ``uint8`` has 256 levels from the smallest number of the tensor, ``low``, over its ``span``: its
    error is at most 1/510 of that. ``float32`` is exact. The server refuses what is not finite then.
    """
    flat = activation.reshape(-1)
    if precision != "uint8":
        return {"activation": flat.astype(precision, copy=False)}
    low, span = flat.min(keepdims=True), np.ptp(flat, keepdims=True)
    level = np.rint((flat.astype(np.float64) - low) * 255.0 / span) if span > 0.0 else np.zeros(flat.shape)
    return {"activation": level.astype(np.uint8), "low": low, "span": span}


def unpack(arrays: Arrays, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The activation of a reply, ``[1, *shape]``."""
    numbers = arrays["activation"]
    if "span" in arrays:
        numbers = arrays["low"] + numbers.astype(np.float64) * arrays["span"] / 255.0
    return numbers.astype(np.float32).reshape(1, *shape)


class SplitExchange:
    """See :class:`~specact.wire.exchange.Exchange`; a server runs the stages before each request's cut."""

    # The inference time depends on the request's cut.
    steady = False

    def __init__(self, folder: StagedFolder | TokenStages) -> None:
        self.name, self._folder = folder.name, folder
        self.contract = split_contract(folder.spec, folder.fingerprint)
        self.read = folder.spec.read_outputs

    def answer(self, kind: str, requests: Sequence[wire.Request]) -> list[Arrays]:
        spec, windows = self._folder.spec, [request.window for request in requests]
        cut, precision = _cuts(spec)[kind]
        if cut < spec.stages:
            return [pack(activation, precision) for activation in self._folder.begin(windows, cut)]
        rows = zip(*self._folder.run(windows), strict=True)
        return [{name: array.reshape(-1) for name, array in zip(spec.outputs, row, strict=True)} for row in rows]


def reader_of(pair: Pair[Any], folder: StagedFolder | TokenStages) -> Reader[Any]:
    """A function that converts a split target's outputs to its answer: codes, a flow's prefix cache, or tokens.

    Raises:
        BundleError: if the stages are not those of the pair's target.
        ConfigError: for a pair of another family, or a decoding that is not greedy.
    """
    parts = pair.parts
    if not isinstance(parts, FlowParts | CodeParts | TokenParts):
        raise ConfigError(
            f"{pair.name} is of a family whose target is not split; choose a pair of action codes, a flow policy or a "
            "token policy"
        )
    if isinstance(parts, TokenParts) and parts.decoding != GREEDY:
        raise ConfigError("the stages of a token policy decode greedily; leave out --decoding, or --split")
    assert pair.path is not None, "these families load folders"
    wanted = parts.target_fingerprint if isinstance(parts, TokenParts) else split_fingerprint(read_manifest(pair.path))
    if folder.spec.network != wanted:
        raise BundleError(
            f"{folder.path} has the stages of a network {folder.spec.network}, but the target of {pair.path} is "
            f"{wanted}; split that one: specact split {pair.path} --out FOLDER"
        )
    if isinstance(parts, TokenParts):
        return lambda outputs, window, address: Written.of(outputs[0][0])
    if isinstance(parts, CodeParts):
        return lambda outputs, window, address: distributions(outputs, parts.spec.temperature)[0]
    target = parts.target()
    return lambda outputs, window, address: replace(target.answer(window, address), cache=outputs[0])
