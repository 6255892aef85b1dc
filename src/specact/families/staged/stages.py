"""A network as a chain of stages, of which a server runs the first and a device the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from specact.errors import BundleError
from specact.families.codes.network import open_session
from specact.families.words import NetworkInputs, read_words
from specact.observation import ObservationSpec, Window, read_spec
from specact.runtime.limits import check_integer
from specact.runtime.manifest import BundleFolder, Kind, joint_fingerprint, read_manifest

KIND: Kind = "split"
MAX_STAGES = 64
_MAX_AXES = 8

# The networks that are split, by the kind of the bundle; several are split as one, in sequence.
SPLIT_NETWORKS: dict[str, tuple[str, ...]] = {
    "pair": ("target",), "regression": ("policy",), "flow": ("encoder", "prefix"),
}  # fmt: skip

Array = NDArray[Any]
_Shapes = dict[str, list[int]] | list[int]  # by name, or of one tensor


def split_fingerprint(manifest: Mapping[str, Any], kind: str) -> str:
    """Fingerprint of the networks that are split of a bundle of this kind."""
    prints = [str(manifest["fingerprints"][network]) for network in SPLIT_NETWORKS[kind]]
    return prints[0] if len(prints) == 1 else joint_fingerprint(*prints)


@dataclass(frozen=True)
class SplitSpec:
    """The spec shared by the stages of a network.

    Attributes:
        made_of: kind of the bundle that the network is part of, one of :data:`SPLIT_NETWORKS`.
        network: its fingerprint, see :func:`split_fingerprint`.
        observation: its observation spec.
        activations: shape of one row of the float32 tensor at each cut, 1 to N - 1.
        outputs: shape of one row of each output of the last stage, by name, in the network's order.

    Raises:
        BundleError: for values outside their range.
    """

    made_of: str
    network: str
    observation: ObservationSpec
    activations: tuple[tuple[int, ...], ...]
    outputs: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        check_integer("number of stages", self.stages, least=2, most=MAX_STAGES)
        for shape in (*self.activations, *self.outputs.values()):
            check_integer("number of axes", len(shape), least=0, most=_MAX_AXES)
            for size in shape:
                check_integer("activation's size", size, least=1)
            check_integer("activation's size", math.prod(shape), least=1, most=1 << 26)
        if self.made_of not in SPLIT_NETWORKS:
            known = ", ".join(SPLIT_NETWORKS)
            raise BundleError(f"stages are of a bundle of kind {known}, but the manifest says {self.made_of!r:.60}")

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
        spec: their inputs and outputs are checked against it.
        inputs: network inputs of the first stage.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if a file is no ONNX model that a bundle may hold, or does not fit the spec.
        ConfigError: as for :class:`~specact.families.codes.network.OnnxPolicy`.
    """

    def __init__(
        self, files: Sequence[Path], spec: SplitSpec, inputs: NetworkInputs,
        *, provider: str = "CPUExecutionProvider", threads: int = 1,
    ) -> None:  # fmt: skip
        self.spec, self.inputs = spec, inputs
        self._sessions = [open_session(file, provider, threads) for file in files]
        self._outputs = list(spec.outputs)
        crossing: list[_Shapes] = [list(shape) for shape in spec.activations]
        shapes = [inputs.shapes, *crossing, {name: list(shape) for name, shape in spec.outputs.items()}]
        for file, session, takes, gives in zip(files, self._sessions, shapes, shapes[1:], strict=False):
            if not (_fits(session.get_inputs(), takes, exact=False) and _fits(session.get_outputs(), gives)):
                raise BundleError(
                    f"{file} does not take {takes} and give {gives}, as the manifest says; split the bundle again"
                )

    def begin(self, windows: Sequence[Window], cut: int) -> Array:
        """The tensor at a cut 1 to N-1 for B windows, float32 ``[B, ...]``."""
        return self._run(self._first(windows), 0, cut)[0]

    def finish(self, activation: Array, cut: int) -> list[Array]:
        """The network's outputs ``[B, ...]`` from the tensor at a cut 1 to N-1."""
        return self._run({self._sessions[cut].get_inputs()[0].name: activation}, cut, self.spec.stages)

    def run(self, windows: Sequence[Window]) -> list[Array]:
        """The network's outputs for B windows, ``[B, ...]``, by all stages."""
        return self._run(self._first(windows), 0, self.spec.stages)

    def _first(self, windows: Sequence[Window]) -> dict[str, Array]:
        taken = {entry.name for entry in self._sessions[0].get_inputs()}
        return {name: array for name, array in self.inputs.stack(windows).items() if name in taken}

    def _run(self, given: dict[str, Array], first: int, end: int) -> list[Array]:
        """Stages ``first`` to ``end``, exclusive, from 0."""
        found: list[Array] = []
        for index in range(first, end):
            session, last = self._sessions[index], index + 1 == self.spec.stages
            found = session.run(self._outputs if last else None, given)
            if not last:
                given = {self._sessions[index + 1].get_inputs()[0].name: found[0]}
        return found


def _fits(found: Sequence[Any], wanted: _Shapes, exact: bool = True) -> bool:
    """Whether a session has these inputs or outputs, or only some of them; the name of a cut's tensor is free."""
    shapes = {entry.name: list(entry.shape[1:]) for entry in found}
    if isinstance(wanted, list):
        return list(shapes.values()) == [wanted]
    return shapes == wanted if exact else shapes.items() <= wanted.items()


@dataclass(frozen=True)
class StagedFolder(BundleFolder):
    """A loaded folder of stages.

    Attributes:
        spec: of the stages.
        network: the stages.
    """

    spec: SplitSpec
    network: StagedNetwork


def stage_parts(stages: int) -> dict[str, str]:
    """The files of N stages, by the names of the parts."""
    return {f"stage-{index:02d}": f"stage-{index:02d}.onnx" for index in range(stages)}


def load_staged(path: Path, *, provider: str = "CPUExecutionProvider", threads: int = 1) -> StagedFolder:
    """Loads a folder that ``specact split`` wrote, and refuses stages that do not fit together.

    Args:
        path: the folder.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if a stage is missing, damaged, or does not match its fingerprint in the manifest, or if it is no
            such folder.
        ConfigError: if there is no such execution provider.
    """
    manifest = read_manifest(path, KIND, {})
    spec = _read_spec(path, manifest)
    parts = stage_parts(spec.stages)
    read_manifest(path, KIND, parts)
    inputs = NetworkInputs(spec.observation, read_words(manifest))
    files = [path / file for file in parts.values()]
    return StagedFolder(path, manifest, spec, StagedNetwork(files, spec, inputs, provider=provider, threads=threads))


def _read_spec(path: Path, manifest: Mapping[str, Any]) -> SplitSpec:
    try:
        raw = dict(manifest["spec"])
        activations = tuple(tuple(shape) for shape in raw.pop("activations"))
        outputs = {str(name): tuple(shape) for name, shape in raw.pop("outputs").items()}
        return SplitSpec(observation=read_spec(raw.pop("observation")), activations=activations, outputs=outputs, **raw)
    except (AttributeError, TypeError, KeyError, BundleError) as error:
        raise BundleError(f"the manifest of {path} has no usable spec ({error}); split the bundle again") from None
