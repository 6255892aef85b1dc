"""A network as a chain of stages, of which a server runs the first and a device the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta
from numpy.typing import NDArray

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import Kind, Manifest, joint_fingerprint
from specact.bundle.network import CPU, Compute, Network
from specact.bundle.words import NetworkInputs
from specact.errors import BundleError, ConfigError
from specact.observation import ObservationSpec, Window
from specact.records import Record, Size, check_fields

KIND: Kind = "split"
MAX_STAGES = 64
_MAX_NUMBERS = 1 << 26

# The networks that are split, by the kind of the bundle; several are split as one, in sequence.
SPLIT_NETWORKS: dict[str, tuple[str, ...]] = {
    "pair": ("target",), "regression": ("policy",), "flow": ("encoder", "prefix"),
}  # fmt: skip

Array = NDArray[Any]
Row = Annotated[tuple[Size, ...], Meta(max_length=8)]


def split_fingerprint(manifest: Manifest) -> str:
    """Fingerprint of the networks of a bundle that are split."""
    prints = [manifest.fingerprints[network] for network in SPLIT_NETWORKS[manifest.kind]]
    return prints[0] if len(prints) == 1 else joint_fingerprint(*prints)


class SplitSpec(Record, frozen=True):
    """The spec shared by the stages of a network.

    Attributes:
        made_of: kind of the bundle that the network is part of, one of :data:`SPLIT_NETWORKS`.
        network: its fingerprint, see :func:`split_fingerprint`.
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

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of one row of the tensor at each cut, 1 to N - 1."""
        return tuple(math.prod(shape) for shape in self.activations)

    def describe(self) -> dict[str, Any]:
        """As plain values, for a manifest."""
        return {
            "made_of": self.made_of,
            "network": self.network,
            "observation": self.observation.describe(),
            "activations": [list(shape) for shape in self.activations],
            "outputs": {name: list(shape) for name, shape in self.outputs.items()},
        }


class StagedNetwork:
    """The stages on ONNX Runtime.

    Cut k lies behind stage k: :meth:`begin` runs stages 1 to k, :meth:`finish` the rest. Only the tensor at the cut is
    passed on, so that in float32 both together compute the same at every cut, bit for bit, at equal batch sizes.

    Args:
        files: of the stages, in order.
        spec: of the stages.
        inputs: network inputs of the first stage.
        compute: where they run.

    Raises:
        BundleError: if a file is no ONNX model, or does not fit the spec.
    """

    def __init__(
        self, files: Sequence[Path], spec: SplitSpec, inputs: NetworkInputs, *, compute: Compute = CPU
    ) -> None:
        self.spec, self.inputs = spec, inputs
        self._stages = [Network(file, compute=compute) for file in files]
        # A stage may need only some of the observations; the name of a cut's tensor is free.
        self._taken = self._stages[0].inputs.keys()
        seen = {name: list(shape[1:]) for name, shape in inputs.shapes.items() if name in self._taken}
        crossing = [[list(shape)] for shape in spec.activations]
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
        """Stages ``first`` to ``end``, exclusive, from 0."""
        found: list[Array] = []
        for stage in self._stages[first:end]:
            found = stage.run(given if not found else dict(zip(stage.inputs, found, strict=True)))
        names = list(self._stages[-1].outputs)
        return [found[names.index(name)] for name in self.spec.outputs] if end == self.spec.stages else found


@dataclass(frozen=True)
class StagedFolder(Bundle[SplitSpec]):
    """A loaded folder of stages.

    Attributes:
        network: the stages.
    """

    network: StagedNetwork


def stage_parts(stages: int) -> dict[str, str]:
    """The files of N stages, by the names of the parts."""
    return {f"stage-{index:02d}": f"stage-{index:02d}.onnx" for index in range(stages)}


def load_staged(path: Path, *, compute: Compute = CPU) -> StagedFolder:
    """Loads a folder that ``specact split`` wrote, and refuses stages that do not fit together.

    Args:
        path: the folder.
        compute: where they run.

    Raises:
        BundleError: if a stage is missing, damaged, or does not match its fingerprint in the manifest, or if it is no
            such folder.
    """
    bundle = open_bundle(path, KIND, SplitSpec)
    parts, spec = stage_parts(bundle.spec.stages), bundle.spec
    if bundle.files.keys() != parts.keys():
        raise BundleError(f"{path} must hold the stages {', '.join(parts)}; split the bundle again")
    inputs = NetworkInputs(spec.observation, bundle.manifest.words)
    network = StagedNetwork([bundle.files[part] for part in parts], spec, inputs, compute=compute)
    return StagedFolder(path, bundle.manifest, spec, bundle.files, network)
