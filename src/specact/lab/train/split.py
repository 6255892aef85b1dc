"""Cuts a network into stages, at tensors that separate its graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import onnx
from onnx import TensorProto, compose, helper, shape_inference
from onnx.utils import Extractor

from specact.bundle.bundle import copy_bundle, find_bundle, open_bundle
from specact.bundle.manifest import Manifest, read_manifest, write_manifest
from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import FLOW_PARTS
from specact.families.chunks.sources import REGRESSION_PARTS
from specact.families.codes.pair import PARTS
from specact.families.tokens.policy import load_tokens
from specact.files import write_whole
from specact.observation import read_spec
from specact.systems.staged import (
    KIND,
    POLICY,
    SPLIT_NETWORKS,
    SplitSpec,
    StagedFolder,
    TokenStages,
    load_staged,
    split_fingerprint,
    stage_parts,
)

_PARTS = {"pair": PARTS, "regression": REGRESSION_PARTS, "flow": FLOW_PARTS}
# Operators that a stage must contain: two cuts without one of these in between are equivalent.
_PRODUCTS = frozenset(("Attention", "Conv", "ConvTranspose", "Gemm", "LSTM", "GRU", "MatMul", "MatMulInteger"))


def split_bundle(name_or_path: str | Path, out: Path) -> StagedFolder:
    """Writes a bundle's target as stages to a new folder, which device and server both need.

    Of a pair of action codes the target is cut, or a policy by regression; of a flow policy encoder and prefix are: the
    device makes the chunk from the prefix's cache. The manifest is written last. See also :func:`split_tokens`.

    Raises:
        ConfigError: if there is something already.
        BundleError: for another kind of bundle, or a network that cannot be cut.
    """
    path = find_bundle(name_or_path)
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another --out")
    manifest, model, cuts = _read_network(path)
    observation = read_spec(manifest.spec["target" if manifest.kind == "pair" else "observation"])
    outputs = {entry.name: _row(_axes(entry)) for entry in model.graph.output}
    if None in outputs.values():
        raise BundleError(f"the target of {path} gives outputs whose sizes are not fixed; export the bundle again")
    stages = stages_of(model, cuts)
    spec = SplitSpec(
        cast(Any, manifest.kind), split_fingerprint(manifest), observation, tuple(cuts.values()),
        {name: shape for name, shape in outputs.items() if shape is not None},
    )  # fmt: skip
    out.mkdir(parents=True)
    for file, stage in zip(stage_parts(len(stages)).values(), stages, strict=True):
        write_whole(out / file, stage.SerializeToString())
    kept = {name: value for name, value in manifest.values().items() if name in ("name", "env", "words")}
    write_manifest(out, {**kept, "kind": KIND}, spec, stage_parts(len(stages)))
    return load_staged(out)


def split_tokens(name_or_path: str | Path, out: Path) -> TokenStages:
    """Writes a token policy to a new folder, as :func:`split_bundle` does: its bundle, which is all of its stages."""
    bundle = load_tokens(name_or_path)
    spec = TokenStages(bundle).spec
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another --out")
    copy_bundle(bundle.path, out / POLICY, ignore=["calibration", "drafters"])
    write_manifest(out, {"name": bundle.name, "env": bundle.env, "kind": KIND}, spec, {})
    return TokenStages(load_tokens(out / POLICY))


def count_stages(name_or_path: str | Path) -> int:
    """Number of stages that :func:`split_bundle` writes of a bundle, with its errors."""
    path = find_bundle(name_or_path)
    return len(_read_network(path)[2]) + 1


def _read_network(path: Path) -> tuple[Manifest, onnx.ModelProto, dict[str, tuple[int, ...]]]:
    """A bundle's manifest, the network that is cut, and its cut points, at least one."""
    kind = read_manifest(path).kind
    if kind not in SPLIT_NETWORKS:
        raise BundleError(
            f"{path} is a bundle of the kind {kind!r}; the target of a pair of action codes, a policy by regression "
            "and a flow policy can be split into stages"
        )
    networks = SPLIT_NETWORKS[kind]
    bundle = open_bundle(path, kind, dict, _PARTS[kind])
    manifest = bundle.manifest
    if not set(networks) <= bundle.files.keys():
        raise BundleError(f"{path} was exported without its target; split the complete bundle")
    model = _joined([onnx.load(bundle.files[network]) for network in networks])
    cuts = cut_points(model)
    if not cuts:
        raise BundleError(f"the target of {path} has no tensor through which all passes; it cannot be split")
    return manifest, model, cuts


def _joined(models: Sequence[onnx.ModelProto]) -> onnx.ModelProto:
    """Composes networks in sequence: each one's inputs are the previous one's outputs of the same names."""
    model = models[0]
    for number, after in enumerate(models[1:]):
        connections = [(entry.name, entry.name) for entry in model.graph.output]
        # Internal names may clash.
        inside = compose.add_prefix(after, f"{number}.", rename_inputs=False, rename_outputs=False)
        model = compose.merge_models(model, inside, connections)
    return model


def cut_points(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """The tensors that determine all later ones, from a network's inputs to its outputs, with the shape of one row.

    A tensor qualifies if it is float32, has the batch as its first axis and fixed sizes otherwise, and no later
    operator reads an input or another earlier tensor. Of several without a weight product in between, the smallest is
    chosen, and the last of those.
    """
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    entries = {entry.name: entry for entry in (*graph.value_info, *graph.input, *graph.output)}
    nodes, last = _live(model)
    cuts: list[tuple[str, tuple[int, ...]]] = []
    alive: set[str] = {entry.name for entry in model.graph.input}
    products = 0
    since = -1  # products before the newest cut
    for place, node in enumerate(nodes, 1):
        products += node.op_type in _PRODUCTS
        alive = {name for name in alive | set(node.output) if last.get(name, 0) > place}
        if len(alive) > 1 or place == len(nodes):
            continue
        name = next(iter(alive))
        shape = _row(_axes(entries[name])) if name in entries else None
        if shape is None or entries[name].type.tensor_type.elem_type != TensorProto.FLOAT:
            continue
        if products > since:
            cuts.append((name, shape))
        elif math.prod(shape) <= math.prod(cuts[-1][1]):
            cuts[-1] = (name, shape)
        since = products
    # The part after the last cut must contain a product as well.
    return dict(cuts if products > since else cuts[:-1])


def stages_of(model: onnx.ModelProto, cuts: Mapping[str, tuple[int, ...]]) -> list[onnx.ModelProto]:
    """The network's stages; each outputs the tensor at its cut, the last one the network's outputs."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    batch = _axes(model.graph.input[0])[0]
    boundaries = [helper.make_tensor_value_info(cut, TensorProto.FLOAT, [batch, *row]) for cut, row in cuts.items()]
    whole.graph.value_info.extend(boundaries)
    inputs, outputs = ([entry.name for entry in ends] for ends in (model.graph.input, model.graph.output))
    extractor, ends = Extractor(whole), [inputs, *([cut] for cut in cuts), outputs]
    stages = [extractor.extract_model(given, wanted) for given, wanted in itertools.pairwise(ends)]
    for stage in stages:
        onnx.checker.check_model(stage)
    return stages


def _live(model: onnx.ModelProto) -> tuple[list[onnx.NodeProto], dict[str, int]]:
    """The operators that depend on inputs, and for each tensor the last one that reads it, counted from 1."""
    reached = {entry.name for entry in model.graph.input}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if reached & set(node.input):
            nodes.append(node)
            reached.update(node.output)
    last = {name: place for place, node in enumerate(nodes, 1) for name in node.input if name in reached}
    return nodes, last | {entry.name: len(nodes) + 1 for entry in model.graph.output}


def _axes(entry: onnx.ValueInfoProto) -> list[int | str]:
    return [axis.dim_param or axis.dim_value for axis in entry.type.tensor_type.shape.dim]


def _row(axes: list[int | str]) -> tuple[int, ...] | None:
    """The shape of one row, if the first axis is the batch and the others have fixed sizes."""
    sizes = [axis for axis in axes[1:] if isinstance(axis, int) and axis > 0]
    return tuple(sizes) if axes and isinstance(axes[0], str) and len(sizes) == len(axes) - 1 else None
