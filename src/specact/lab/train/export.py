"""Export of trained weights to a bundle: ONNX with a parity check, the tokenizer's table, the manifest."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save
from torch import Tensor, nn

from specact.bundle.bundle import HEAD
from specact.bundle.manifest import fingerprint_of, write_manifest
from specact.bundle.words import INSTRUCTION, Words
from specact.errors import BundleError
from specact.families.codes.bundle import PARTS
from specact.families.codes.spec import PolicySpec
from specact.files import write_whole
from specact.lab.train.vqbet import VQBeT, statistics_of
from specact.observation import ObservationSpec

# Tolerance of the parity check between PyTorch and ONNX Runtime (logits, offsets).
PARITY = 2e-4


class LastPosition(nn.Module):
    """The deployed policy: codes and offsets of the newest position only."""

    def __init__(self, model: VQBeT) -> None:
        super().__init__()
        self.model = model

    def forward(self, observation: dict[str, Tensor]) -> tuple[Tensor, ...]:
        features = self.model.features(observation)[:, -1:]
        prediction = self.model.heads(features)
        outputs = (prediction.logits[:, 0], prediction.offsets[:, 0])
        if self.model.secondary_head is None:
            return outputs
        return (*outputs, self.model.secondary_head.conditional(features[:, 0]))


def write_bundle(
    path: Path,
    *,
    manifest: dict[str, Any],
    spec: PolicySpec,
    table: Tensor,
    centre: Tensor,
    scale: Tensor,
    policies: dict[str, VQBeT],
    half: bool,
) -> None:
    """Writes a bundle folder; the manifest last, so that an incomplete export cannot be loaded.

    A learned gate's head in the folder stays if it was trained for exactly these policies; otherwise it is removed.

    Args:
        path: folder to write; its manifest, if any, is removed first.
        manifest: name, env, recipe, training metrics.
        spec: common to the parts.
        table, centre, scale: see :class:`~specact.families.codes.tokenizer.ActionTokenizer`.
        policies: ``draft`` and ``target``.
        half: store weights as float16 (computed in float32 after loading).

    Raises:
        BundleError: if an exported policy's outputs differ from the trained one's.
    """
    path.mkdir(parents=True, exist_ok=True)
    before = take_manifest(path)
    tokenizer = {"table": table.numpy(), "centre": centre.numpy(), "scale": scale.numpy()}
    write_whole(path / PARTS["tokenizer"], save(tokenizer))
    parity = {role: export_policy(model, path / PARTS[role], half) for role, model in policies.items()}
    parameters = {role: sum(p.numel() for p in model.parameters()) for role, model in policies.items()}
    kept = kept_head(path, before, PARTS)
    write_manifest(path, {**manifest, **kept, "parity": parity, "parameters": parameters}, spec, PARTS)


def take_manifest(path: Path) -> dict[str, Any]:
    """Removes a bundle's manifest before its parts are written again, and returns it; empty if there is none."""
    file = path / "manifest.json"
    before: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    return before


def kept_head(path: Path, before: Mapping[str, Any], parts: Mapping[str, str]) -> dict[str, Any]:
    """What a new manifest says of a learned gate's head, which is removed if the parts are not those it was made for.

    Args:
        path: the bundle's folder, with its parts.
        before: the old manifest.
        parts: files by the name of the part.
    """
    if before.get("fingerprints") == {part: fingerprint_of(path / name) for part, name in parts.items()}:
        return {key: before[key] for key in ("head",) if key in before}
    (path / HEAD).unlink(missing_ok=True)
    return {}


def export_policy(model: VQBeT, path: Path, half: bool) -> float:
    """Exports one policy and returns the largest difference found between PyTorch and ONNX Runtime."""
    model = model.eval()
    if half:
        round_to_half(model)
    deployed = LastPosition(model).eval()
    outputs = ["logits", "offsets"] + ["conditional"] * (model.secondary_head is not None)
    proto = to_onnx(deployed, {"observation": example_inputs(model, 3)}, outputs)
    if half:
        store_as_half(proto)
    onnx.checker.check_model(proto)
    write_whole(path, proto.SerializeToString())
    difference = _difference(deployed, path, model)
    if difference > PARITY:
        raise BundleError(f"{path} differs from the trained network by {difference:.1e}, more than {PARITY:.0e}")
    return difference


def round_to_half(model: nn.Module) -> None:
    """Rounds every parameter to float16 precision, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())


def to_onnx(
    module: nn.Module,
    inputs: dict[str, Tensor | dict[str, Tensor]],
    outputs: list[str],
    *,
    free_batch: bool = True,
    free: Mapping[str, Mapping[int, str]] = MappingProxyType({}),
) -> onnx.ModelProto:
    """Exports a module to ONNX.

    Args:
        module: takes the tensors, and dicts of tensors, of ``inputs`` by name.
        inputs: example inputs, batch first. The names of tensors, not those of dicts, become the graph's inputs.
        outputs: names in the graph.
        free_batch: whether the batch size is dynamic.
        free: other dynamic axes of inputs, by name: axis to the name of its size. Axes of one name have one size.
    """
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of missing optional packages
    for name in ("onnx_ir", "onnxscript"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they log every weight and every rule
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own internals
        batch = {0: torch.export.Dim("batch", min=1, max=4096)} if free_batch else {}
        tables = {name: value if isinstance(value, dict) else {name: value} for name, value in inputs.items()}
        sizes = {size: torch.export.Dim(size, min=1, max=4096) for axes in free.values() for size in axes.values()}
        shapes = {
            name: dict.fromkeys(value, batch)
            if isinstance(value, dict)
            else batch | {axis: sizes[size] for axis, size in free.get(name, {}).items()}
            for name, value in inputs.items()
        }
        program = torch.onnx.export(
            module,
            (),
            kwargs=inputs,
            input_names=[name for table in tables.values() for name in table],
            output_names=outputs,
            dynamo=True,
            verbose=False,
            dynamic_shapes=shapes if free_batch or free else None,
        )
    assert program is not None  # None is only for exports without dynamo
    proto: onnx.ModelProto = program.model_proto
    forget_sources(proto)
    return proto


def example_inputs(model: VQBeT, batch: int) -> dict[str, Tensor]:
    """Random observations with the shapes and statistics of the training data."""
    shapes, generator = model.shapes, torch.Generator().manual_seed(batch)
    return some_observations(model, shapes.observation, generator, batch, shapes.words)


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
    if words is not None:
        inputs[INSTRUCTION] = torch.randint(words.size, (batch, words.length), generator=generator)
    return inputs


def _difference(deployed: LastPosition, path: Path, model: VQBeT) -> float:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest = 0.0
    for batch in (1, 7):
        values = example_inputs(model, batch)
        with torch.no_grad():
            expected = deployed(values)
        outputs = session.run(None, {name: value.numpy() for name, value in values.items()})
        for want, got in zip(expected, outputs, strict=True):
            largest = max(largest, float(np.abs(want.numpy() - got).max()))
    return largest


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
