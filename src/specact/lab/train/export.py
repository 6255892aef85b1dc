"""Export of trained networks to ONNX with a parity check, and the folder of a bundle."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import StringStringEntryProto, TensorProto, helper, numpy_helper
from safetensors.numpy import load, save
from safetensors.torch import load_file
from torch import Tensor, nn

from specact.bundle.bundle import HEAD
from specact.bundle.manifest import INSTRUCTION, Words, fingerprint_of, write_manifest
from specact.bundle.network import open_session
from specact.errors import BundleError, ConfigError
from specact.files import write_whole
from specact.lab.train.attention import Observing, statistics_of

# Tolerance of the parity check between PyTorch and ONNX Runtime (logits, offsets).
PARITY = 2e-4
# Numbers from which on a tensor is stored as float16, or apart from its network.
_FEW = 64
Module = TypeVar("Module", bound=nn.Module)
# Makes values of a shape, with a keyword ``generator``, as torch.randn and torch.rand do.
Values = Callable[..., Tensor]


def around(mean: Tensor, std: Tensor) -> Values:
    """Makes normal numbers with this mean and standard deviation."""
    return lambda shape, generator: mean + std * torch.randn(shape, generator=generator)


def below(most: int, kind: torch.dtype = torch.int64) -> Values:
    """Makes whole numbers from 0 on."""
    return partial(torch.randint, most, dtype=kind)


def mostly(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Makes a mask that hides some."""
    return torch.rand(shape, generator=generator) < 0.8


@dataclass(frozen=True)
class Input:
    """An input of an exported network, and what makes random ``values`` of it.

    An axis of the ``shape`` is an integer or one of :data:`AXES`, which are free; of ``windows`` one serves any batch.
    """

    shape: tuple[int | str, ...]
    values: Values = torch.randn


# Sizes of the free axes in the example of a batch; they all differ.
AXES: Mapping[str, Callable[[int], int]] = {
    "batch": lambda batch: batch, "windows": lambda batch: batch, "tokens": lambda batch: 2 * batch + 1,
    "cached": lambda batch: batch + 2,
}  # fmt: skip


@dataclass(frozen=True)
class Graph:
    """A network in evaluation mode as it is exported.

    The ``inputs`` are in the order of its arguments; those in a table are inputs of the graph by their own names.
    """

    module: nn.Module
    inputs: Mapping[str, Input | Mapping[str, Input]]
    outputs: Sequence[str]

    def example(self, batch: int) -> dict[str, Any]:
        """Random inputs, a function of the size of the batch."""
        rng = torch.Generator().manual_seed(batch)
        return self._each(
            lambda spec: spec.values([AXES[n](batch) if isinstance(n, str) else n for n in spec.shape], generator=rng)
        )

    def to_onnx(self) -> onnx.ModelProto:
        """The network in ONNX."""
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of missing optional packages
        for name in ("onnx_ir", "onnxscript"):
            logging.getLogger(name).setLevel(logging.WARNING)  # they log every weight and every rule
        sizes = {axis: torch.export.Dim(axis, min=1, max=4096) for axis in AXES}
        sizes["windows"] = sizes["batch"]
        free = self._each(lambda given: {n: sizes[axis] for n, axis in enumerate(given.shape) if isinstance(axis, str)})
        inputs = _flat(self.inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter warns of its own internals
            program = torch.onnx.export(
                self.module, (*self.example(3).values(), {}), input_names=list(inputs), output_names=self.outputs,
                dynamo=True, verbose=False, dynamic_shapes=tuple(free.values()),
            )  # fmt: skip
        assert program is not None  # None is only for exports without dynamo
        proto: onnx.ModelProto = program.model_proto
        for entry in proto.graph.input:
            if inputs[entry.name].shape[0] == "windows":
                entry.type.tensor_type.shape.dim[0].dim_param = "windows"
        forget_sources(proto)
        return proto

    def _each(self, function: Callable[[Input], Any]) -> dict[str, Any]:
        return {
            name: function(given) if isinstance(given, Input) else {key: function(part) for key, part in given.items()}
            for name, given in self.inputs.items()
        }


def observed(network: Observing, words: Words | None) -> dict[str, Input]:
    """The inputs of a network: observations, numbers with the statistics in its buffers, and an instruction's words."""
    inputs = {
        name: Input(
            ("batch", *field.window_shape),
            below(256, torch.uint8) if field.is_image else around(*statistics_of(network, name)),
        )
        for name, field in network.fields.items()
    }
    if words is not None:
        inputs[INSTRUCTION] = Input(("batch", words.length), below(words.size))
    return inputs


class WeightsFile:
    """Weights of a policy in a safetensors file, where the graphs of its networks and later trainings find them.

    Attributes:
        digest: its SHA-256.
    """

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        self._name, self.digest = path.name, hashlib.sha256(content).hexdigest()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        # Place and stored array by the full array; the exporter transposes the weights of linear layers.
        self._known: dict[tuple[tuple[int, ...], bytes], tuple[int, NDArray[Any], bool]] = {}
        for name, stored in load(content).items():
            place, full = start + header[name]["data_offsets"][0], stored.astype(np.float32)
            self._known.setdefault((full.shape, full.tobytes()), (place, stored, False))
            if full.ndim == 2:
                self._known.setdefault((full.T.shape, full.T.tobytes()), (place, stored, True))

    def share(self, proto: onnx.ModelProto) -> None:
        """Lets a network read in the file what it holds there."""
        nodes = []
        for tensor in proto.graph.initializer:
            values, used = numpy_helper.to_array(tensor), tensor.name
            known = self._known.get((values.shape, values.tobytes()))
            if known is None or values.dtype != np.float32 or values.size < _FEW:
                continue
            offset, stored, transposed = known
            place = {"location": self._name, "offset": offset, "length": stored.nbytes}
            tensor.CopyFrom(
                TensorProto(
                    name=f"{used}.stored", data_type=helper.np_dtype_to_tensor_dtype(stored.dtype), dims=stored.shape,
                    data_location=TensorProto.EXTERNAL,
                    external_data=[StringStringEntryProto(key=key, value=str(value)) for key, value in place.items()],
                )
            )  # fmt: skip
            full = f"{used}.transposed" if transposed else used
            nodes.append(helper.make_node("Cast", [tensor.name], [full], to=TensorProto.FLOAT))
            if transposed:
                nodes.append(helper.make_node("Transpose", [full], [used], perm=[1, 0]))
        _put_first(proto.graph, nodes)


def stored_weights(part: Path) -> dict[str, Tensor]:
    """The weights of a part of a bundle, in float32 by their names in the module; refused if the bundle has none."""
    file = part.with_suffix(".safetensors")
    if not file.exists():
        raise ConfigError(
            f"{file.parent} has no {file.name}, as bundles of earlier versions have none; run specact train again with "
            "the folder of its run"
        )
    return {name: value.float() if value.dtype == torch.float16 else value for name, value in load_file(file).items()}


def write_weights(path: Path, module: nn.Module) -> WeightsFile:
    """Stores the weights of a policy, as float16 what is exact in it, see :func:`deployed`."""
    # Contiguous, because safetensors stores the bytes of other arrays in the order of their memory.
    arrays = {name: tensor.contiguous().numpy() for name, tensor in module.state_dict().items()}
    write_whole(path, save({name: _halved(array) for name, array in arrays.items()}))
    return WeightsFile(path)


def export_checked(
    graph: Graph, path: Path, *, weights: WeightsFile | None = None, metadata: Mapping[str, str] = MappingProxyType({})
) -> float:
    """Exports a network, and returns the largest difference found between PyTorch and ONNX Runtime.

    Weights are stored as float16 where they are exact in it, and computed with in float32. Those in the file
    ``weights``, beside ``path`` or in the folder above, are read there; its digest becomes a part of the network's
    file and so of its fingerprint, like the texts of ``metadata``.

    Raises:
        BundleError: if the outputs differ by more than :data:`PARITY`.
    """
    proto = graph.to_onnx()
    if weights is not None:
        weights.share(proto)
        metadata = {**metadata, "weights": weights.digest}
    store_as_half(proto)
    helper.set_model_props(proto, dict(metadata))
    write_whole(path, proto.SerializeToString())
    session = open_session(path)
    difference = 0.0
    for batch in (1, 7):
        inputs = graph.example(batch)
        with torch.no_grad():
            expected = graph.module(*inputs.values())
        outputs = session.run(None, {name: value.numpy() for name, value in _flat(inputs).items()})
        for tensor, output in zip((expected,) if isinstance(expected, Tensor) else expected, outputs, strict=True):
            difference = max(difference, float(np.abs(tensor.numpy() - output).max()))
    if difference > PARITY:
        raise BundleError(f"{path} differs from the trained network by {difference:.1e}, more than {PARITY:.0e}")
    return difference


def _flat(inputs: Mapping[str, Any]) -> dict[str, Any]:
    tables = (value if isinstance(value, Mapping) else {name: value} for name, value in inputs.items())
    return {name: value for table in tables for name, value in table.items()}


def deployed(model: Module) -> Module:
    """A network in evaluation mode, with parameters that are rounded to float16 precision in place."""
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(parameter.half().float())
    return model


def forget_sources(proto: onnx.ModelProto) -> None:
    """Removes the exporter's source locations, because a fingerprint must not depend on them."""
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]


def store_as_half(proto: onnx.ModelProto) -> None:
    """Stores every weight that is exact in float16 as float16, with a cast that is folded at loading."""
    casts = []
    for tensor in proto.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or tensor.data_location == TensorProto.EXTERNAL:
            continue
        name, halved = tensor.name, _halved(numpy_helper.to_array(tensor))
        if halved.dtype == np.float16:
            tensor.CopyFrom(numpy_helper.from_array(halved, f"{name}.half"))
            casts.append(helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT))
    _put_first(proto.graph, casts)


def _halved(values: NDArray[Any]) -> NDArray[Any]:
    """The array as float16 if it is float32, exact in float16, and not small; else as it is."""
    if values.dtype != np.float32 or values.size < _FEW:
        return values
    halved = values.astype(np.float16)
    return halved if np.array_equal(halved.astype(np.float32), values) else values


def _put_first(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])


class BundleFolder:
    """A bundle's folder while it is written: first its parts, then the manifest, so that no half of one can be loaded.

    Args:
        path: the folder; its manifest, if any, is removed.
        parts: files by the name of the part.

    Attributes:
        files, parity, parameters: of the parts: paths, largest differences of exported networks, and sizes.
    """

    def __init__(self, path: Path, parts: Mapping[str, str]) -> None:
        self.path, self.files, self._parts = path, {part: path / name for part, name in parts.items()}, parts
        self.parity, self.parameters = dict[str, float](), dict[str, int]()
        path.mkdir(parents=True, exist_ok=True)
        manifest = path / "manifest.json"
        self._before: dict[str, Any] = json.loads(manifest.read_text()) if manifest.exists() else {}
        manifest.unlink(missing_ok=True)

    def take(self, part: str, file: Path) -> None:
        """Copies a part of another bundle, with the weights that it alone has."""
        for source in file.parent.glob(f"{part}.*"):
            shutil.copyfile(source, self.path / source.name)

    def arrays(self, part: str, values: Mapping[str, NDArray[Any]]) -> None:
        """Writes a part that is a table of arrays."""
        write_whole(self.files[part], save(dict(values)))

    def export(self, part: str, graph: Graph, weights: WeightsFile | None = None) -> None:
        """Writes a part that is a network, see :func:`export_checked`."""
        self.parity[part] = export_checked(graph, self.files[part], weights=weights)
        self.parameters[part] = parameters_of(graph.module)

    def finish(self, manifest: Mapping[str, Any], spec: object) -> Path:
        """Writes the manifest, of which only what the files determine is new; a head for other parts is removed."""
        values = {key: value for key, value in manifest.items() if key not in ("head", "shared", "files")}
        for key, numbers in (("parity", self.parity), ("parameters", self.parameters)):
            values[key] = {**values.get(key, {}), **numbers}
        if self._before.get("fingerprints") != {part: fingerprint_of(file) for part, file in self.files.items()}:
            (self.path / HEAD).unlink(missing_ok=True)
        elif "head" in self._before:
            values["head"] = self._before["head"]
        write_manifest(self.path, values, spec, self._parts)
        return self.path


def parameters_of(module: nn.Module) -> int:
    """How many parameters a network has."""
    return sum(p.numel() for p in module.parameters())
