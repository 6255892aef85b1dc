"""A bundle with a heavy target, for latency measurements: same outputs, inference time of a large transformer."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import compose, helper, numpy_helper
from torch import Tensor, nn

from specact.bundle.manifest import write_manifest
from specact.errors import ConfigError
from specact.families.codes.bundle import PARTS, Bundle
from specact.lab.train.attention import Layer
from specact.lab.train.export import Graph

TOKENS = 10


class _Heavy(nn.Module):
    """A pre-norm transformer over ten tokens, with random weights; its output is a number per row."""

    def __init__(self, inputs: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.inputs, self.project = inputs, nn.Linear(inputs, width)
        self.position = nn.Parameter(0.02 * torch.randn(TOKENS, width))
        self.blocks = nn.ModuleList(Layer(width, heads, dropout=0.0) for _ in range(layers))
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), -math.inf).triu(1), persistent=False)

    def forward(self, state: Tensor) -> Tensor:
        tokens = self.project(state.reshape(-1, self.inputs))[:, None] + self.position
        for block in self.blocks:
            tokens, _ = block(tokens, self.mask)
        weight: Tensor = tokens.mean(dim=(1, 2))
        return weight


def make_heavy_target(bundle: Bundle, out: Path, *, layers: int = 12, width: int = 768, heads: int = 12) -> None:
    """Copies a bundle and adds a large transformer to its target, whose output is multiplied by zero.

    Codes, acceptance and gates are those of the original pair; only the target's time differs.

    Args:
        bundle: the pair.
        out: folder to make.
        layers, width, heads: of the transformer.

    Raises:
        ConfigError: if the target sees nothing but camera frames.
    """
    out.mkdir(parents=True)
    for part in ("tokenizer", "draft"):
        shutil.copy(bundle.files[part], out / PARTS[part])
    torch.manual_seed(0)
    spec = bundle.spec
    # The transformer's input is the target's first observation that is not a camera's.
    name = next((name for name, field in spec.target.fields.items() if not field.is_image), None)
    if name is None:
        raise ConfigError(f"the target of {bundle.name!r} sees camera frames alone, which this transformer cannot read")
    shape = spec.target[name].window_shape
    heavy = _Heavy(math.prod(shape), layers, width, heads).eval()
    weight = Graph(heavy, lambda batch: {"state": torch.zeros(batch, *shape)}, ["weight"]).to_onnx()
    _join(onnx.load(bundle.files["target"]), weight, name, out / PARTS["target"])
    manifest = {
        key: value for key, value in bundle.manifest.values().items() if key not in ("format", "spec", "fingerprints")
    }
    write_manifest(out, manifest | {"name": f"{bundle.name}-{layers}x{width}"}, spec, PARTS)


def _join(target: onnx.ModelProto, heavy: onnx.ModelProto, seen: str, file: Path) -> None:
    """One graph: the target's logits plus zero times the transformer's output, so that neither is optimised away."""
    heavy = compose.add_prefix(heavy, "heavy_")
    graph = target.graph
    for node in graph.node:
        node.output[:] = ["own_logits" if name == "logits" else name for name in node.output]
        node.input[:] = ["own_logits" if name == "logits" else name for name in node.input]
    for node in heavy.graph.node:
        node.input[:] = [seen if name == "heavy_state" else name for name in node.input]
    graph.node.extend(heavy.graph.node)
    graph.initializer.extend(heavy.graph.initializer)
    graph.initializer.extend(
        [
            numpy_helper.from_array(np.zeros((), np.float32), "heavy_nothing"),
            numpy_helper.from_array(np.array([1, 2], np.int64), "heavy_axes"),
        ]
    )
    graph.node.extend(
        [
            helper.make_node("Mul", ["heavy_weight", "heavy_nothing"], ["heavy_zero"]),
            helper.make_node("Unsqueeze", ["heavy_zero", "heavy_axes"], ["heavy_shift"]),
            helper.make_node("Add", ["own_logits", "heavy_shift"], ["logits"]),
        ]
    )
    versions = {entry.domain: entry.version for entry in heavy.opset_import}
    known = {entry.domain for entry in target.opset_import}
    target.opset_import.extend(entry for entry in heavy.opset_import if entry.domain not in known)
    assert all(versions.get(entry.domain, entry.version) == entry.version for entry in target.opset_import)
    onnx.save(target, str(file))
