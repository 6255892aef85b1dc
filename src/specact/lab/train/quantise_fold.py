"""An exported network as the tools of quantisation want it: float32 weights, and every linear layer a plain product."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.quant_utils import add_pre_process_metadata


def folded(file: Path) -> onnx.ModelProto:
    """The network with its weights in float32 under their own names, and ``Gemm`` written as ``MatMul`` and ``Add``.

    Exported weights may be stored as float16 behind a cast, and a ``Gemm`` may hold its weight transposed. The tools
    pass over both. What the network computes stays the same.
    """
    model = onnx.load(file)
    graph = model.graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "Cast" and node.input[0] in weights and _attribute(node, "to", 0) == TensorProto.FLOAT:
            weights[node.output[0]] = weights[node.input[0]].astype(np.float32)
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
