"""Cheaper variants of a bundle's networks, levers of TISED: of fewer bits, with fewer observations, and in stages.

Each tier of quantisation does one more group of linear layers than the previous one, first in 8 bits, then in 4.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.quant_utils import add_pre_process_metadata

from specact.families.chunks.flow import NETWORKS, FlowBundle
from specact.families.codes.pair import PARTS, CodeParts
from specact.files import write_whole
from specact.lab.train.codes import Role, export_policy, rebuild
from specact.lab.train.export import forget_sources, store_as_half
from specact.lab.train.split import count_stages, split_bundle
from specact.pair import Pair

# 8-bit weights, a scale per output, or 4-bit weights, a scale per 32; 8-bit activations, scaled as they come.
Method = Literal["int8_dynamic", "int4"]
Group = Literal["heads", "mlps", "attention", "rest"]
# From the outputs to the inputs, so that each further group adds to the error of the previous ones.
GROUPS: tuple[Group, ...] = ("heads", "mlps", "attention", "rest")
# Intermediate outputs, between encoder, prefix and expert of a flow policy, which are not made by heads.
_INNER = {"tokens", "cache"}
# Unsigned, like the activations. With signed weights a processor without VNNI adds two products in 16 bits, which
# saturates: the error of an 8-bit network is then seven times as large.
_WEIGHTS = QuantType.QUInt8
# Block size of 4-bit quantisation: weights with a common scale.
_BLOCK = 32
# 4-bit layers quantise activations to 8 bits in products: no less exact, and faster on most processors.
_INT8_PRODUCTS = 4


def _tiers() -> Iterator[tuple[str, Mapping[Group, Method]]]:
    methods: dict[Group, Method] = {}
    passes: tuple[tuple[Method, str], ...] = (("int8_dynamic", "int8_dynamic"), ("int4", "int4_dynamic"))
    for method, name in passes:
        for group in GROUPS:
            methods = methods | {group: method}
            yield f"{name}-{group}", methods


# Eight tiers from mild to strong, group by group to 8 bits, then to 4: the method of every quantised group, by a name
# such as ``int4_dynamic-mlps``: fewest bits, and last quantised group.
TIERS = dict(_tiers())


class BundleVariants:
    """Quantised, pruned and split networks of one bundle: first their paths, and the files with :meth:`make`.

    The bundle is a pair of action codes or a flow policy; other pairs have no variants.
    """

    #: Names of the tiers of quantisation, from the mildest to the strongest.
    tiers = tuple(TIERS)

    def __init__(self, bundle: Pair[Any] | FlowBundle, folder: Path) -> None:
        self._made_of, self._folder = bundle, folder
        # By the file that is written last: what writes it.
        self._requested: dict[Path, Callable[[], object]] = {}

    def make(self) -> None:
        """Writes all variants whose paths were requested and that do not exist."""
        for file, write in self._requested.items():
            if not file.exists():
                write()

    @property
    def _bundle(self) -> CodeParts | FlowBundle:
        made_of: Any = self._made_of.parts if isinstance(self._made_of, Pair) else self._made_of
        assert isinstance(made_of, CodeParts | FlowBundle), "levers see to it"
        return made_of

    def quantised(self, tier: str) -> Mapping[str, Path]:
        """The networks of a tier, by part: ``target`` of a pair; encoder, prefix and expert of a flow policy."""
        files = {"target": PARTS["target"]} if isinstance(self._bundle, CodeParts) else dict(NETWORKS)
        files.pop("guide", None)  # inpainting is a lever of its own
        paths = {part: self._folder / tier / file for part, file in files.items()}
        for part, file in paths.items():
            self._requested[file] = partial(quantise, self._bundle.files[part], file, TIERS[tier])
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
    export_policy(rebuild(bundle, role, window), out, half=bundle.manifest.recipe["precision"] == "float16")
    return out


def quantise(source: Path, out: Path, tier: Mapping[Group, Method]) -> Path:
    """Writes a quantised variant of a bundle's network to ``out``; inputs and outputs are unchanged."""
    model = folded(source)
    nodes: dict[Method, list[str]] = {}
    for name, group in layer_groups(model).items():
        if group in tier:
            nodes.setdefault(tier[group], []).append(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".quantising-", dir=out.parent) as folder, _quiet():
        if "int4" in nodes:
            others = [node.name for node in model.graph.node if node.name not in nodes["int4"]]
            quantiser = MatMulNBitsQuantizer(
                model, bits=4, block_size=_BLOCK, is_symmetric=True, accuracy_level=_INT8_PRODUCTS,
                nodes_to_exclude=others,
            )  # fmt: skip
            quantiser.process()
            model = quantiser.model.model
        if "int8_dynamic" in nodes:
            half_done = Path(folder) / out.name
            quantize_dynamic(
                model, half_done, ["MatMul"], True, weight_type=_WEIGHTS, nodes_to_quantize=nodes["int8_dynamic"],
                extra_options={"MatMulConstBOnly": True},
            )  # fmt: skip
            model = onnx.load(half_done)
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

    The quantisation tools skip weights that are stored as float16 with a cast, and ``Gemm`` with transposed weights.
    The network's function does not change.
    """
    model = onnx.load(file)
    graph = model.graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "Cast" and node.input[0] in weights and _attribute(node, "to", 0) == TensorProto.FLOAT:
            weights[node.output[0]] = weights[node.input[0]].astype(np.float32)
        elif node.op_type == "Transpose" and node.input[0] in weights and weights[node.input[0]].ndim == 2:
            weights[node.output[0]] = np.ascontiguousarray(weights[node.input[0]].T)
        elif node.op_type == "Gemm" and node.input[1] in weights and _plain(node):
            nodes.extend(_as_product(node, weights))
        else:
            nodes.append(node)
    read = {name for node in nodes for name in node.input} | {output.name for output in graph.output}
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items() if name in read)
    add_pre_process_metadata(model)  # says that there is nothing left to fold
    onnx.checker.check_model(model)
    return model


def _plain(node: onnx.NodeProto) -> bool:
    return _attribute(node, "alpha", 1.0) == _attribute(node, "beta", 1.0) == 1.0 and not _attribute(node, "transA", 0)


def _as_product(node: onnx.NodeProto, weights: dict[str, np.ndarray]) -> list[onnx.NodeProto]:
    values, weight = weights[node.input[1]], node.input[1]
    if _attribute(node, "transB", 0):
        weight = f"{weight}.transposed"
        weights[weight] = np.ascontiguousarray(values.T)
    if len(node.input) < 3:
        return [helper.make_node("MatMul", [node.input[0], weight], node.output, name=node.name)]
    product = f"{node.output[0]}.product"
    return [
        helper.make_node("MatMul", [node.input[0], weight], [product], name=node.name),
        helper.make_node("Add", [product, node.input[2]], node.output, name=f"{node.name}.bias"),
    ]


def _attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    found: float = next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)
    return found


def layer_groups(model: onnx.ModelProto) -> dict[str, Group]:
    """The group of every product with a weight, by the name of its node.

    Heads come after the last norm; MLPs are the two products on either side of a GELU; other products after a norm are
    attention; the rest, before any norm, are embeddings of observations, actions and time. The model is :func:`folded`.
    """
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights]
    made_by = {name: node for node in graph.node for name in node.output}
    read_by: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            read_by.setdefault(name, []).append(node)

    def before(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        return [made_by[name] for name in node.input if name in made_by]

    def after(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        return [reader for name in node.output for reader in read_by.get(name, ())]

    headless = {output.name for output in graph.output} <= _INNER

    def group(product: onnx.NodeProto) -> Group:
        if not _meets(product, before, "LayerNormalization"):
            return "rest"
        if not headless and not _meets(product, after, "LayerNormalization"):
            return "heads"
        beside = [_meets(product, way, "Gelu", stop={"MatMul", "LayerNormalization"}) for way in (before, after)]
        return "mlps" if any(beside) else "attention"

    return {product.name: group(product) for product in products}


def _meets(
    start: onnx.NodeProto, way: Callable[[onnx.NodeProto], list[onnx.NodeProto]], wanted: str, stop: Container[str] = ()
) -> bool:
    """Whether a node of a kind is reachable in a direction without passing one of the kinds in ``stop``."""
    seen: set[str] = set()
    ahead = way(start)
    while ahead:
        node = ahead.pop()
        if node.op_type == wanted:
            return True
        if node.output[0] in seen or node.op_type in stop:
            continue
        seen.add(node.output[0])
        ahead.extend(way(node))
    return False
