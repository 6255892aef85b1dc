"""Export of trained networks to ONNX with a parity check, and the folder of a bundle."""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from specact.bundle.bundle import HEAD
from specact.bundle.manifest import Describable, fingerprint_of, write_manifest
from specact.bundle.words import INSTRUCTION, Words
from specact.errors import BundleError
from specact.files import write_whole
from specact.lab.train.embedding import statistics_of
from specact.observation import ObservationSpec

# Tolerance of the parity check between PyTorch and ONNX Runtime (logits, offsets).
PARITY = 2e-4
# Inputs of a module by name; those in a table are inputs of the graph by their own names.
Inputs = Mapping[str, Tensor | Mapping[str, Tensor]]


@dataclass(frozen=True)
class Graph:
    """A network as it is exported.

    Attributes:
        module: in evaluation mode.
        example: makes random inputs with a batch of this size.
        outputs: their names.
        batches: sizes that are compared; a single one is fixed in the graph.
        free: other dynamic axes of inputs, by name: axis to the name of its size. Axes of one name have one size.
        broadcast: inputs of which one row serves any batch.
    """

    module: nn.Module
    example: Callable[[int], Inputs]
    outputs: Sequence[str]
    batches: Sequence[int] = (1, 7)
    free: Mapping[str, Mapping[int, str]] = dataclasses.field(default_factory=dict)
    broadcast: Sequence[str] = ()

    def to_onnx(self) -> onnx.ModelProto:
        """The network in ONNX."""
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of missing optional packages
        for name in ("onnx_ir", "onnxscript"):
            logging.getLogger(name).setLevel(logging.WARNING)  # they log every weight and every rule
        fixed = len(self.batches) == 1
        inputs = self.example(self.batches[0] if fixed else 3)
        batch = {} if fixed else {0: torch.export.Dim("batch", min=1, max=4096)}
        names = {size for axes in self.free.values() for size in axes.values()}
        sizes = {size: torch.export.Dim(size, min=1, max=4096) for size in names}
        shapes = {
            name: batch | {axis: sizes[size] for axis, size in self.free.get(name, {}).items()}
            if isinstance(value, Tensor)
            else dict.fromkeys(value, batch)
            for name, value in inputs.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter warns of its own internals
            program = torch.onnx.export(
                self.module,
                (),
                kwargs=dict(inputs),
                input_names=list(_flat(inputs)),
                output_names=list(self.outputs),
                dynamo=True,
                verbose=False,
                dynamic_shapes=shapes if batch or sizes else None,
            )
        assert program is not None  # None is only for exports without dynamo
        proto: onnx.ModelProto = program.model_proto
        for entry in proto.graph.input:
            if entry.name in self.broadcast:
                entry.type.tensor_type.shape.dim[0].dim_param = "windows"
        forget_sources(proto)
        return proto


def export_checked(
    graph: Graph, path: Path, *, half: bool = False, metadata: Mapping[str, str] = MappingProxyType({})
) -> float:
    """Exports a network, and returns the largest difference found between PyTorch and ONNX Runtime.

    Args:
        graph: the network.
        path: file to write.
        half: store weights as float16 (computed in float32 after loading), see :func:`round_to_half`.
        metadata: texts that are stored in the file.

    Raises:
        BundleError: if the outputs differ by more than :data:`PARITY`.
    """
    proto = graph.to_onnx()
    if half:
        store_as_half(proto)
    helper.set_model_props(proto, dict(metadata))
    onnx.checker.check_model(proto)
    write_whole(path, proto.SerializeToString())
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    difference = 0.0
    for batch in graph.batches:
        inputs = graph.example(batch)
        with torch.no_grad():
            expected = graph.module(**inputs)
        found = session.run(None, {name: value.numpy() for name, value in _flat(inputs).items()})
        for want, got in zip((expected,) if isinstance(expected, Tensor) else expected, found, strict=True):
            difference = max(difference, float(np.abs(want.numpy() - got).max()))
    if difference > PARITY:
        raise BundleError(f"{path} differs from the trained network by {difference:.1e}, more than {PARITY:.0e}")
    return difference


def _flat(inputs: Inputs) -> dict[str, Tensor]:
    tables = ({name: value} if isinstance(value, Tensor) else value for name, value in inputs.items())
    return {name: tensor for table in tables for name, tensor in table.items()}


def some_observations(
    module: nn.Module, spec: ObservationSpec, generator: torch.Generator, batch: int, words: Words | None = None
) -> dict[str, Tensor]:
    """Random observations of a spec with the statistics in a module's buffers, and random words of an instruction."""
    inputs = {}
    for name, field in spec.fields.items():
        shape = (batch, *field.window_shape)
        if field.is_image:
            inputs[name] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        else:
            mean, std = statistics_of(module, name)
            inputs[name] = mean + std * torch.randn(shape, generator=generator)
    if words is not None and spec.instruction:
        inputs[INSTRUCTION] = torch.randint(words.size, (batch, words.length), generator=generator)
    return inputs


def round_to_half(model: nn.Module) -> None:
    """Rounds every parameter to float16 precision, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())


def forget_sources(proto: onnx.ModelProto) -> None:
    """Removes the exporter's source locations, because a fingerprint must not depend on them."""
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]


def store_as_half(proto: onnx.ModelProto) -> None:
    """Stores every weight that is exact in float16 as float16, with a cast that is folded at loading."""
    graph, casts = proto.graph, []
    for tensor in graph.initializer:
        if tensor.data_type != TensorProto.FLOAT:
            continue
        name, values = tensor.name, numpy_helper.to_array(tensor)
        halved = values.astype(np.float16)
        if values.size < 64 or not np.array_equal(halved.astype(np.float32), values):
            continue
        tensor.CopyFrom(numpy_helper.from_array(halved, f"{name}.half"))
        casts.append(helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT))
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend(casts + rest)


class BundleFolder:
    """A bundle's folder while it is written: first its parts, then the manifest, so that no half of one can be loaded.

    Args:
        path: the folder; its manifest, if any, is removed.
        parts: files by the name of the part.

    Attributes:
        files: paths of the parts.
    """

    def __init__(self, path: Path, parts: Mapping[str, str]) -> None:
        self.path, self.files, self._parts = path, {part: path / name for part, name in parts.items()}, parts
        path.mkdir(parents=True, exist_ok=True)
        manifest = path / "manifest.json"
        self._before: dict[str, Any] = json.loads(manifest.read_text()) if manifest.exists() else {}
        manifest.unlink(missing_ok=True)

    def finish(self, manifest: Mapping[str, Any], spec: Describable) -> None:
        """Writes the manifest; a learned gate's head that was made for other parts is removed."""
        head = {key: self._before[key] for key in ("head",) if key in self._before}
        if self._before.get("fingerprints") != {part: fingerprint_of(file) for part, file in self.files.items()}:
            (self.path / HEAD).unlink(missing_ok=True)
            head = {}
        write_manifest(self.path, {**manifest, **head}, spec, self._parts)


def parameters_of(module: nn.Module) -> int:
    """How many parameters a network has."""
    return sum(p.numel() for p in module.parameters())
