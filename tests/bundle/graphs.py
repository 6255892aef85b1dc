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


def _filled(shape: str, *before: NodeProto) -> list[NodeProto]:
    """``y = x`` plus the sum of zeros of this shape."""
    return [
        *before,
        helper.make_node("ConstantOfShape", [shape], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros"], ["zero"], keepdims=0),
        helper.make_node("Add", ["x", "zero"], ["y"]),
    ]


def huge(path: Path) -> Path:
    """A file of a few hundred bytes that asks for 256 GiB."""
    return write_graph(path, _filled("shape"), [helper.make_tensor("shape", INT64, [2], [1 << 20, 1 << 16])])


def multiplied(path: Path) -> Path:
    """Constants that are repeated up to 3.1 GB, none of them large."""
    unit = helper.make_tensor("one", FLOAT, [1, 1], [1.0])
    shape = helper.make_tensor("shape", INT64, [2], [31, 1000000])
    parts = [f"part{n}" for n in range(25)]
    nodes = [helper.make_node("Tile" if n % 2 else "Expand", ["one", "shape"], [name]) for n, name in enumerate(parts)]
    ends = [
        helper.make_node("Concat", parts, ["whole"], axis=0),
        helper.make_node("ReduceSum", ["whole"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    return write_graph(path, [*nodes, *ends], [unit, shape])


def branching(path: Path) -> Path:
    """3.1 GB in a branch within branches."""
    value = helper.make_tensor_value_info
    then = helper.make_graph(_filled("shape"), "deepest", [], [value("y", FLOAT, None)])
    identity = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "other", [], [value("y", FLOAT, None)])
    for depth in range(8):
        node = helper.make_node("If", ["true"], ["y"], then_branch=then, else_branch=identity)
        then = helper.make_graph([node], f"depth{depth}", [], [value("y", FLOAT, None)])
    shape = helper.make_tensor("shape", INT64, [2], [775, 1000000])
    nodes = [helper.make_node("If", ["true"], ["y"], then_branch=then, else_branch=identity)]
    return write_graph(path, nodes, [shape, helper.make_tensor("true", BOOL, [], [True])])


def by_batch(path: Path) -> Path:
    """Nothing at batch 1, 0.4 GB for every further row."""
    constants = [helper.make_tensor("one", INT64, [1], [1]), helper.make_tensor("many", INT64, [1], [100000000])]
    before = [
        helper.make_node("Shape", ["x"], ["batch"], start=0, end=1),
        helper.make_node("Sub", ["batch", "one"], ["further"]),
        helper.make_node("Mul", ["further", "many"], ["shape"]),
    ]
    return write_graph(path, _filled("shape", *before), constants)


def by_value(path: Path) -> Path:
    """Nothing for zeros, 3.1 GB for ones."""
    constants = [helper.make_tensor("many", FLOAT, [], [775e6]), helper.make_tensor("axis", INT64, [1], [0])]
    before = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Mul", ["most", "many"], ["numbers"]),
        helper.make_node("Cast", ["numbers"], ["number"], to=INT64),
        helper.make_node("Unsqueeze", ["number", "axis"], ["shape"]),
    ]
    return write_graph(path, _filled("shape", *before), constants)


def outside(path: Path) -> Path:
    """A constant whose numbers lie in a file outside the network's folder."""
    tensor = helper.make_tensor("c", FLOAT, [2], [0.0, 0.0])
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "../numbers.bin"), ("offset", "0"), ("length", "8")):
        tensor.external_data.add(key=key, value=value)
    return write_graph(path, [helper.make_node("Add", ["x", "c"], ["y"])], [tensor])
