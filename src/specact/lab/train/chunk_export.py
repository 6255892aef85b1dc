"""Export of a trained chunk policy to a bundle: ONNX graphs with a parity check, the units, the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from safetensors.numpy import save
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from specact.bundle.manifest import write_manifest
from specact.bundle.words import INSTRUCTION
from specact.errors import BundleError
from specact.families.chunks.bundle import FLOW_PARTS, REGRESSION_PARTS
from specact.families.chunks.flow import FlowUnits
from specact.families.tokens.bundle import TOKEN_PARTS
from specact.files import write_whole
from specact.lab.train.export import (
    PARITY,
    kept_head,
    round_to_half,
    some_observations,
    store_as_half,
    take_manifest,
    to_onnx,
)
from specact.lab.train.flow import Expert, Flow
from specact.lab.train.tokens import TokenModel

_OUTPUTS = {
    "encoder": ["tokens"], "prefix": ["cache"], "expert": ["velocity"], "guide": ["velocity", "pull"],
    "policy": ["actions"], "decoder": ["logits", "features", "entries"],
}  # fmt: skip

# Networks with observations as inputs.
_SEEING = ("encoder", "policy")
# Axes of the decoder's inputs with a dynamic number of tokens.
_TOKENS = {"embeddings": {1: "tokens"}, "positions": {1: "tokens"}, "among": {1: "tokens", 2: "tokens"}}

ChunkModel = Flow | TokenModel


class Guide(nn.Module):
    """Velocity of the expert, and its pull towards wanted actions: ``(Y - x^_1)^T diag(W) dx^_1/dx_t``.

    One pass forward and one back through the expert; see :func:`~specact.families.chunks.flow.integrate_guided`.
    """

    def __init__(self, expert: Expert) -> None:
        super().__init__()
        self.expert = expert

    def forward(
        self, chunk: Tensor, time: Tensor, cache: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Both ``[B, H, A]``; the first three arguments as for the expert, ``wanted [B, H, A]``, ``weights [B, H]``."""
        velocity, pull_back, *_ = torch.func.vjp(lambda x: self.expert(x, time, cache), chunk)
        rest = (1.0 - time)[:, None, None]
        missing = weights[..., None] * (wanted - (chunk + rest * velocity))
        return velocity, missing + rest * pull_back(missing)[0]


class Regression(nn.Module):
    """Observations to chunks ``[B, H, A]`` in the environment's units, in one pass."""

    centre: Tensor
    scale: Tensor

    def __init__(self, model: Flow, units: FlowUnits) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("centre", torch.from_numpy(units.centre))
        self.register_buffer("scale", torch.from_numpy(units.scale))

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        return self.centre + self.scale * self.model.regressed(self.model.cache(observation))


def write_flow_bundle(path: Path, *, manifest: dict[str, Any], model: Flow, units: FlowUnits, half: bool) -> None:
    """Writes a bundle folder; the manifest last, so that an incomplete export cannot be loaded.

    Args:
        path: folder to write; its manifest, if any, is removed first.
        manifest: name, env, recipe, training metrics.
        model: trained; with ``half`` its weights are rounded in place.
        units: of its actions.
        half: store weights as float16 (computed in float32 after loading).

    Raises:
        BundleError: if an exported network's outputs differ from the trained one's.
    """
    modules = {"encoder": model.encoder, "prefix": model.prefix, "expert": model.expert, "guide": Guide(model.expert)}
    _write(path, {"kind": "flow", **manifest}, model, modules, units, FLOW_PARTS, half)


def write_regression_bundle(path: Path, *, manifest: dict[str, Any], model: Flow, units: FlowUnits, half: bool) -> None:
    """:func:`write_flow_bundle` for a policy by regression, as a single graph."""
    modules: dict[str, nn.Module] = {"policy": Regression(model, units).eval()}
    _write(path, {"kind": "regression", **manifest}, model, modules, units, REGRESSION_PARTS, half)


def write_token_bundle(
    path: Path, *, manifest: dict[str, Any], model: TokenModel, units: FlowUnits, half: bool
) -> None:
    """:func:`write_flow_bundle` for a token policy; its token embedding is stored as a lookup table."""
    modules = {"encoder": model.encoder, "decoder": model.decoder}
    _write(path, {"kind": "tokens", **manifest}, model, modules, units, TOKEN_PARTS, half)


# By the kind of a recipe.
WRITERS: dict[str, Callable[..., None]] = {
    "flow": write_flow_bundle, "regression": write_regression_bundle, "tokens": write_token_bundle,
}  # fmt: skip


def _write(
    path: Path,
    manifest: dict[str, Any],
    model: ChunkModel,
    modules: Mapping[str, nn.Module],
    units: FlowUnits,
    parts: Mapping[str, str],
    half: bool,
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    before = take_manifest(path)
    model.eval().requires_grad_(False)
    if half:
        round_to_half(model)
    if isinstance(model, TokenModel):
        write_whole(path / parts["embedding"], save({"embedding": model.embedding.weight.numpy()}))
    vocabulary = {} if model.words is None else {"words": model.words.describe()}
    parity = {part: _export(part, module, model, path / parts[part], half) for part, module in modules.items()}
    write_whole(path / parts["normalisation"], save(vars(units)))
    parameters = {
        part: sum(p.numel() for p in module.parameters()) for part, module in modules.items() if part != "guide"
    }
    told = {**manifest, **vocabulary, **kept_head(path, before, parts), "parity": parity, "parameters": parameters}
    write_manifest(path, told, model.spec, parts)


def _export(part: str, module: nn.Module, model: ChunkModel, file: Path, half: bool) -> float:
    """Exports one network and returns the largest difference found between PyTorch and ONNX Runtime."""
    if part == "guide":
        inputs = example(model, part, 1)
        # The backward pass can only be exported from a trace, with a fixed batch size; guided steps have batch 1.
        traced = make_fx(module, decomposition_table=dict(core_aten_decompositions().items()))(*inputs.values())
        proto = to_onnx(_Named(traced), {**inputs}, _OUTPUTS[part], free_batch=False)
    else:
        inputs = example(model, part, 3)
        free = _TOKENS if part == "decoder" else {}
        proto = to_onnx(module, {"observation": inputs} if part in _SEEING else {**inputs}, _OUTPUTS[part], free=free)
    if part == "expert":
        # One window's cache is broadcast over any number of chunks.
        _input(proto, "cache").type.tensor_type.shape.dim[0].dim_param = "windows"
    if half:
        store_as_half(proto)
    onnx.checker.check_model(proto)
    write_whole(file, proto.SerializeToString())
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    difference = 0.0
    for batch in (1,) if part == "guide" else (1, 7):
        values = example(model, part, batch)
        expected = module(values) if part in _SEEING else module(**values)
        outputs = session.run(None, {name: value.numpy() for name, value in values.items()})
        for want, got in zip((expected,) if isinstance(expected, Tensor) else expected, outputs, strict=True):
            difference = max(difference, float(np.abs(want.numpy() - got).max()))
    if difference > PARITY:
        raise BundleError(f"{file} differs from the trained network by {difference:.1e}, more than {PARITY:.0e}")
    return difference


def example(model: ChunkModel, part: str, batch: int) -> dict[str, Tensor]:
    """Random inputs of a network, by name, with the statistics of the training data."""
    spec, encoder, generator = model.spec, model.encoder, torch.Generator().manual_seed(batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    observation = some_observations(encoder, spec.observation, generator, batch)
    if model.words is not None and spec.observation.instruction:
        observation[INSTRUCTION] = torch.randint(0, model.words.size, (batch, model.words.length), generator=generator)
    if part in _SEEING:
        return observation
    tokens = encoder(observation)
    if isinstance(model, TokenModel):
        return _read_next(model, tokens, normal)
    if part == "prefix":
        return {"tokens": tokens}
    noisy = {
        "chunk": normal(batch, spec.chunk, spec.actions),
        "time": torch.rand(batch, generator=generator),
        "cache": model.prefix(tokens),
    }
    if part == "expert":
        return noisy
    wanted = {
        "wanted": normal(batch, spec.chunk, spec.actions),
        "weights": torch.rand(batch, spec.chunk, generator=generator),
    }
    return noisy | wanted


def _read_next(model: TokenModel, prefix: Tensor, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Inputs of a decoder after the prefix ``[B, P, W]``: some new tokens, one of which is masked for another."""
    batch, count, width = prefix.shape
    length, new_tokens = count + model.length, 2 * batch + 1  # more than one, and different from all other sizes
    visible = torch.ones(batch, new_tokens, new_tokens).tril()
    visible[:, -1, 0] = 0.0
    decoder = model.decoder
    entries = (batch, len(decoder.layers), 2, decoder.heads, length, width // decoder.heads)
    return {
        "embeddings": normal(batch, new_tokens, width),
        "positions": torch.arange(count, count + new_tokens).clamp(max=length - 1).expand(batch, -1),
        "seen": (torch.arange(length) < count).expand(batch, -1),
        "among": visible.bool(),
        "cache": normal(*entries),
    }


class _Named(nn.Module):
    """Gives a trace, which takes positional arguments only, named ones."""

    def __init__(self, traced: nn.Module) -> None:
        super().__init__()
        self.traced = traced

    def forward(self, chunk: Tensor, time: Tensor, cache: Tensor, wanted: Tensor, weights: Tensor) -> Any:
        return self.traced(chunk, time, cache, wanted, weights)


def _input(proto: onnx.ModelProto, name: str) -> onnx.ValueInfoProto:
    entry_: onnx.ValueInfoProto = next(entry for entry in proto.graph.input if entry.name == name)
    return entry_
