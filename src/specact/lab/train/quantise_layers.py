"""Which group of layers a product with a weight belongs to, read off the graph: weights lose their names on export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import onnx

Group = Literal["heads", "mlps", "attention", "rest"]
# From where a rounding error ends to where it begins, so that each group adds to what the ones before have spoilt.
GROUPS: tuple[Group, ...] = ("heads", "mlps", "attention", "rest")

# Outputs that no head makes: between encoder, prefix and expert of a flow policy.
_INNER = {"tokens", "cache"}


def layer_groups(model: onnx.ModelProto) -> dict[str, Group]:
    """The group of every product with a weight, by the name of its node.

    Heads come after the last norm; perceptrons are the two products on either side of a GELU; what else comes after a
    norm is attention; the rest, before any norm, embeds observations, actions and time.

    Args:
        model: folded, see :func:`~specact.lab.train.quantise_fold.folded`.
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
    start: onnx.NodeProto,
    way: Callable[[onnx.NodeProto], list[onnx.NodeProto]],
    wanted: str,
    stop: set[str] | None = None,
) -> bool:
    """Whether a node of a kind lies that way, without passing one of the kinds in ``stop``."""
    seen: set[str] = set()
    ahead = way(start)
    while ahead:
        node = ahead.pop()
        if node.op_type == wanted:
            return True
        if node.output[0] in seen or node.op_type in (stop or ()):
            continue
        seen.add(node.output[0])
        ahead.extend(way(node))
    return False
