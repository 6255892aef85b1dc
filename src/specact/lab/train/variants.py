"""Cheaper variants of a bundle's networks, levers of TISED: of fewer bits, with fewer observations, and in stages."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.quant_utils import add_pre_process_metadata

from specact.families.chunks.flow import NETWORKS, FlowBundle
from specact.families.codes.pair import PARTS, CodeParts
from specact.files import write_whole
from specact.lab.train.codes import Role, export_policy, rebuild
from specact.lab.train.export import forget_sources, store_as_half
from specact.lab.train.split import count_stages, split_bundle
from specact.pair import Pair

Bits = Literal[8, 4]
# Unsigned, like the activations. With signed weights a processor without VNNI adds two products in 16 bits, which
# saturates: the error of an 8-bit network is then seven times as large.
_WEIGHTS = QuantType.QUInt8
# Block size of 4-bit quantisation: weights with a common scale.
_BLOCK = 32
# 4-bit layers quantise activations to 8 bits in products: no less exact, and faster on most processors.
_INT8_PRODUCTS = 4


class BundleVariants:
    """Quantised, pruned and split networks of one bundle: first their paths, and the files with :meth:`make`.

    The bundle is a pair of action codes or a flow policy; other pairs have no variants.
    """

    def __init__(self, bundle: Pair[Any] | FlowBundle, folder: Path) -> None:
        self._source, self._folder = bundle, folder
        # By the file that is written last: what writes it.
        self._requested: dict[Path, Callable[[], object]] = {}

    def make(self) -> None:
        """Writes all variants whose paths were requested and that do not exist."""
        for file, write in self._requested.items():
            if not file.exists():
                write()

    @property
    def _bundle(self) -> CodeParts | FlowBundle:
        parts: Any = self._source.parts if isinstance(self._source, Pair) else self._source
        assert isinstance(parts, CodeParts | FlowBundle), "levers see to it"
        return parts

    def quantised(self, bits: Bits) -> Mapping[str, Path]:
        """The networks in 8 or 4 bits, by part: ``target`` of a pair; encoder, prefix and expert of a flow policy."""
        files = {"target": PARTS["target"]} if isinstance(self._bundle, CodeParts) else dict(NETWORKS)
        files.pop("guide", None)  # inpainting is a lever of its own
        paths = {part: self._folder / f"int{bits}" / file for part, file in files.items()}
        for part, file in paths.items():
            self._requested[file] = partial(quantise, self._bundle.files[part], file, bits)
        return paths

    def windowed(self, window: int) -> Path:
        """The pair's target with a shorter observation history."""
        bundle = self._bundle
        assert isinstance(bundle, CodeParts), "only a VQ-BeT's window can be cut"
        file = self._folder / f"window-{window}" / PARTS["target"]
        self._requested[file] = partial(prune_history, bundle, window, file)
        return file

    def stages(self) -> Path:
        """The folder of the pair's target in stages."""
        folder = self._folder / "stages"
        self._requested[folder / "manifest.json"] = partial(self._split, folder)
        return folder

    @cached_property
    def stage_count(self) -> int:
        """Number of stages of the pair's target."""
        return count_stages(self._bundle.path)

    def _split(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of a split that was interrupted
        split_bundle(self._bundle.path, folder)


def prune_history(bundle: CodeParts, window: int, out: Path, role: Role = "target") -> Path:
    """Writes the variant of a pair's policy with a history of ``window`` observations, as an ``.onnx`` file.

    It runs like the original, with the bundle's spec except ``window``, see :func:`~specact.lab.train.codes.rebuild`.
    Attention is cheaper, and earlier observations are unknown.
    """
    export_policy(rebuild(bundle, role, window), out)
    return out


def quantise(source: Path, out: Path, bits: Bits) -> Path:
    """Writes a variant of a bundle's network whose products have weights of so many bits; inputs and outputs stay.

    8-bit weights have a scale per output and activations are scaled as they come, 4-bit weights have one per 32.
    """
    model = folded(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".quantising-", dir=out.parent) as folder, _quiet():
        if bits == 4:
            quantiser = MatMulNBitsQuantizer(
                model, bits=4, block_size=_BLOCK, is_symmetric=True, accuracy_level=_INT8_PRODUCTS
            )
            quantiser.process()
            model = quantiser.model.model
        else:
            file = Path(folder) / out.name
            quantize_dynamic(
                model, file, ["MatMul"], True, weight_type=_WEIGHTS, extra_options={"MatMulConstBOnly": True}
            )
            model = onnx.load(file)
    forget_sources(model)
    store_as_half(model)  # what is left of the weights as they were
    write_whole(out, model.SerializeToString())
    return out


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the tools, which log to the root logger."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def folded(file: Path) -> onnx.ModelProto:
    """The network with float32 weights under their own names, and ``Gemm`` replaced by ``MatMul`` and ``Add``.

    The quantisation tools skip weights that are stored as float16 with a cast, or transposed, and ``Gemm``. The
    network's function does not change.
    """
    model = onnx.load(file)
    graph = model.graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        values = weights.get(node.input[0]) if node.input else None
        if values is not None and node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT:
            weights[node.output[0]] = values.astype(np.float32)
        elif values is not None and node.op_type == "Transpose" and values.ndim == 2:
            weights[node.output[0]] = np.ascontiguousarray(values.T)
        else:
            nodes.append(node)
    read = {name for node in nodes for name in node.input} | {output.name for output in graph.output}
    shapes = [entry for entry in graph.value_info if entry.name not in weights]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.value_info.extend(shapes)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items() if name in read)
    ONNXModel(model).replace_gemm_with_matmul()
    add_pre_process_metadata(model)  # says that there is nothing left to fold
    onnx.checker.check_model(model)
    return model
