"""Small ONNX graphs for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnx import NodeProto, TensorProto, helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def write_graph(path: Path, nodes: Sequence[NodeProto], constants: Sequence[TensorProto] = ()) -> Path:
    """A network from ``x [batch, 2]`` to ``y``."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", 2])],
        list(constants),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def doubling(path: Path) -> Path:
    """``y = x + x``."""
    return write_graph(path, [helper.make_node("Add", ["x", "x"], ["y"])])


def endless(path: Path) -> Path:
    """A loop that never ends when it runs."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["still"]), helper.make_node("Add", ["v", "v"], ["w"])],
        "body",
        [value("i", INT64, []), value("go", BOOL, []), value("v", FLOAT, None)],
        [value("still", BOOL, []), value("w", FLOAT, None)],
    )
    return write_graph(
        path,
        [helper.make_node("Loop", ["", "true", "x"], ["y"], body=body)],
        [helper.make_tensor("true", BOOL, [], [True])],
    )


def huge(path: Path) -> Path:
    """A file of a few hundred bytes that asks for 256 GiB."""
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros"], ["zero"], keepdims=0),
        helper.make_node("Add", ["x", "zero"], ["y"]),
    ]
    return write_graph(path, nodes, [helper.make_tensor("shape", INT64, [2], [1 << 20, 1 << 16])])


def outside(path: Path) -> Path:
    """A constant whose numbers lie in a file outside the network's folder."""
    tensor = helper.make_tensor("c", FLOAT, [2], [0.0, 0.0])
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "../numbers.bin"), ("offset", "0"), ("length", "8")):
        tensor.external_data.add(key=key, value=value)
    return write_graph(path, [helper.make_node("Add", ["x", "c"], ["y"])], [tensor])
