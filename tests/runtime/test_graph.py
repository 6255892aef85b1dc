"""What a bundle's networks may hold: hostile graphs are refused before they run, ordinary ones load as they did."""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from specact import load_bundle
from specact.errors import BundleError
from specact.families.codes.bundle import PARTS
from specact.families.codes.network import open_session
from specact.runtime.graph import outline_of
from specact.runtime.manifest import fingerprint_of

Change = Callable[[ModelProto], Any]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
X = helper.make_tensor_value_info("x", FLOAT, ["batch", 4])


def model(
    nodes: Sequence[Any], constants: dict[str, Any] | None = None, inputs: Sequence[Any] = (X,), opset: int = 18
) -> ModelProto:
    """A model whose output is called y."""
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    output = helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph(list(nodes), "g", list(inputs), [output], initializers)
    domains = {node.domain for node in nodes if node.domain} - {"ai.onnx"}
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in sorted(domains))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def node(operator: str, *names: str, **attributes: Any) -> Any:
    """A node; the last name is the output's."""
    return helper.make_node(operator, names[:-1], names[-1:], **attributes)


def body(operator: str) -> Any:
    condition = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("more", "again")]
    count = helper.make_tensor_value_info("i", INT64, [])
    inputs = {"Loop": [count, condition[0]], "If": []}[operator]
    outputs = {"Loop": [condition[1]], "If": []}[operator]
    value = helper.make_tensor_value_info("z", FLOAT, [4])
    nodes = [node("Constant", "z", value=numpy_helper.from_array(np.zeros(4, np.float32)))]
    if operator == "Loop":
        nodes.append(node("Identity", "more", "again"))
    return helper.make_graph(nodes, "body", inputs, [*outputs, value])


def loop() -> ModelProto:
    return model([node("Loop", "", "yes", "y", body=body("Loop"))], {"yes": np.array(True)})


def branch() -> ModelProto:
    return model([node("If", "yes", "y", then_branch=body("If"), else_branch=body("If"))], {"yes": np.array(True)})


def scan() -> ModelProto:
    row = [helper.make_tensor_value_info(name, FLOAT, []) for name in ("a", "b")]
    inner = helper.make_graph([node("Neg", "a", "b")], "body", row[:1], row[1:])
    return model([node("Scan", "x", "y", num_scan_inputs=1, body=inner)])


def functions() -> ModelProto:
    made = model([helper.make_node("Twice", ["x"], ["y"], domain="mine")])
    twice = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [node("Add", "a", "a", "b")], [helper.make_opsetid("", 18)]
    )
    made.functions.append(twice)
    return made


def elsewhere(made: ModelProto, tensor: TensorProto) -> ModelProto:
    """The tensor's data in another file, which is there and large enough."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"
    return made


def weights_elsewhere() -> ModelProto:
    made = model([node("Add", "x", "w", "y")], {"w": np.zeros(4, np.float32)})
    return elsewhere(made, made.graph.initializer[0])


def constant_elsewhere() -> ModelProto:
    value = numpy_helper.from_array(np.zeros(4, np.float32))
    made = model([node("Constant", "w", value=value), node("Add", "x", "w", "y")])
    return elsewhere(made, made.graph.node[0].attribute[0].t)


def sparse(attribute: bool) -> ModelProto:
    values, where = numpy_helper.from_array(np.ones(1, np.float32), "w"), numpy_helper.from_array(np.zeros(1, np.int64))
    tensor = helper.make_sparse_tensor(values, where, [1 << 40])
    if attribute:
        return model([node("Constant", "y", sparse_value=tensor)])
    made = model([node("Add", "x", "w", "y")])
    made.graph.sparse_initializer.append(tensor)
    return made


def oversized() -> ModelProto:
    made = model([node("Add", "x", "w", "y")], {"w": np.zeros(4, np.float32)})
    made.graph.initializer[0].dims[:] = [1 << 20, 1 << 20]
    return made


def declared(made: ModelProto, *shape: int) -> ModelProto:
    """The same, claiming a harmless shape for what it computes."""
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", FLOAT, shape))
    hidden = [name for entry in made.graph.node for name in entry.output if name != "y"]
    made.graph.value_info.extend(helper.make_tensor_value_info(name, INT64, shape) for name in hidden)
    return made


def doubling(times: int) -> ModelProto:
    names = ["x", *(f"x{i}" for i in range(times - 1)), "y"]
    return model([node("Concat", a, a, b, axis=1) for a, b in itertools.pairwise(names)])


def powers_of_the_batch() -> ModelProto:
    """One number for a batch of one, and more than there is memory for one of 64."""
    squares = [node("Shape", "x", "s0", start=0, end=1)]
    squares += [node("Mul", f"s{i}", f"s{i}", f"s{i + 1}") for i in range(3)]
    return model([*squares, node("ConstantOfShape", "s3", "y")])


TOO_MUCH = "needs too much computation"
HUGE = np.array([1 << 20, 1 << 20], np.int64)
READ = node("Cast", "x", "sizes", to=INT64)
FLAT = [READ, node("Reshape", "sizes", "all", "flat")]
ALL = {"all": np.array([-1], np.int64)}

REFUSED: dict[str, tuple[Callable[[], ModelProto], str]] = {
    "Loop": (loop, r"uses control flow, the operator Loop"),
    "If": (branch, r"uses control flow, the operator If"),
    "Scan": (scan, r"uses control flow, the operator Scan"),
    "functions": (functions, r"holds functions of its own|uses the operator mine\.Twice"),
    "a custom operator": (
        lambda: model([helper.make_node("Anything", ["x"], ["y"], domain="mine")]),
        r"uses the operator mine\.Anything"),
    "an operator of the runtime that is none of a network": (
        lambda: model([helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft")]),
        r"uses the operator com\.microsoft\.EPContext"),
    "weights in another file": (weights_elsewhere, r"keeps the tensor 'w' in another file"),
    "a constant in another file": (constant_elsewhere, r"keeps the tensor '' in another file"),
    "sparse weights": (lambda: sparse(attribute=False), "holds a sparse tensor"),
    "a sparse constant": (lambda: sparse(attribute=True), "holds a sparse tensor"),
    "weights larger than their data": (oversized, r"tensor 'w' of shape \[1048576, 1048576\] is larger than its data"),
    "ConstantOfShape": (lambda: model([node("ConstantOfShape", "n", "y")], {"n": HUGE}), TOO_MUCH),
    "Expand": (lambda: model([node("Expand", "one", "n", "y")], {"n": HUGE, "one": np.ones(1, np.float32)}), TOO_MUCH),
    "Tile": (lambda: model([node("Tile", "x", "n", "y")], {"n": HUGE}), TOO_MUCH),
    "Range": (
        lambda: model([node("Range", "a", "b", "c", "y")], {"a": 0.0, "b": 1e11, "c": 1.0}), TOO_MUCH),
    "Pad": (
        lambda: model([node("Pad", "x", "n", "y")], {"n": np.array([0, 0, 1 << 20, 1 << 20], np.int64)}), TOO_MUCH),
    "Resize": (
        lambda: model([node("Resize", "x", "", "n", "y")], {"n": np.array([1e5, 1e5], np.float32)}), TOO_MUCH),
    "doubling": (lambda: doubling(40), TOO_MUCH),
    "outer products": (
        lambda: model([node("MatMul", "column", "row", "y")],
                      {"column": np.zeros((1 << 18, 1), np.float32), "row": np.zeros((1, 1 << 18), np.float32)}),
        TOO_MUCH),
    "powers of the batch": (powers_of_the_batch, "computes sizes when it runs, with the operator Shape"),
    "a concatenation that overflows": (
        lambda: model([node("Expand", "one", "n", "e"), node("Concat", *["e"] * 1024, "y", axis=0)],
                      {"one": np.ones(1, np.float32), "n": np.array([1 << 22], np.int64)}), "more than 100 inputs"),
    "many results below the limit": (
        lambda: model([*(node("Expand", "one", "n", f"e{i}") for i in range(40)), node("Neg", "x", "y")],
                      {"one": np.ones(1, np.float32), "n": np.array([1 << 15, 1 << 15], np.int64)}), TOO_MUCH),
    "ConstantOfShape of what it is shown": (
        lambda: model([*FLAT, node("ConstantOfShape", "flat", "y")], ALL), "'y' is known only when the network runs"),
    "a harmless shape declared": (
        lambda: declared(model([*FLAT, node("ConstantOfShape", "flat", "y")], ALL), 1), "'y' is known only when"),
    "an unknown number of axes": (
        lambda: model([node("Reshape", "x", "k", "y")],
                      inputs=[X, helper.make_tensor_value_info("k", INT64, [None])]), "'y' is known only when"),
    "Range of what it is shown": (
        lambda: model([node("Squeeze", "x", "s"), node("Range", "zero", "s", "one", "y")],
                      {"zero": np.float32(0.0), "one": np.float32(1.0)}), "only when the network runs|not a readable"),
    "an input of any size": (
        lambda: model([node("Neg", "x", "y")], inputs=[helper.make_tensor_value_info("x", FLOAT, [None, 4])]),
        "'y' is known only when"),
    "text": (
        lambda: model([node("Cast", "x", "y", to=TensorProto.STRING)]), r"'y' is a tensor\(string\)"),
    "a list of tensors": (lambda: model([node("SequenceConstruct", "x", "x", "y")]), "not a readable|is a seq"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_hostile_graph_is_refused_with_a_sentence(tmp_path: Path, case: str) -> None:
    make, sentence = REFUSED[case]
    file = tmp_path / "network.onnx"
    file.write_bytes(make().SerializeToString())
    with pytest.raises(BundleError, match=sentence) as caught:
        open_session(file, "CPUExecutionProvider", 1)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["Loop", "Expand", "weights in another file"])
@pytest.mark.parametrize("part", ["draft", "target"])
def test_a_bundle_that_vouches_for_a_hostile_graph_is_refused(bundle_copy: Path, part: str, case: str) -> None:
    make, sentence = REFUSED[case]
    (bundle_copy / PARTS[part]).write_bytes(make().SerializeToString())
    file = bundle_copy / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["fingerprints"] = {part: fingerprint_of(bundle_copy / name) for part, name in PARTS.items()}
    file.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=sentence):
        load_bundle(bundle_copy)


def test_a_graph_appended_to_a_graph_is_looked_through_too(tmp_path: Path) -> None:
    """Protocol buffers merge what is there twice, so that the second graph's nodes would run as well."""
    file = tmp_path / "network.onnx"
    harmless = model([node("Neg", "x", "y")])
    file.write_bytes(harmless.SerializeToString() + loop().SerializeToString())
    with pytest.raises(BundleError, match="uses control flow, the operator Loop"):
        open_session(file, "CPUExecutionProvider", 1)


def test_a_name_for_its_own_use_is_not_for_a_graph(tmp_path: Path) -> None:
    """Else a huge tensor could pass for the shape of something."""
    file = tmp_path / "network.onnx"
    name = "specact:shape of nothing"
    nodes = [node("ConstantOfShape", "n", name), node("Neg", "x", "y")]
    file.write_bytes(model(nodes, {"n": HUGE}).SerializeToString())
    with pytest.raises(BundleError, match="nothing in it may be named"):
        open_session(file, "CPUExecutionProvider", 1)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x3a", b"\x3a\xff\xff\xff\xff\x7f", b"\x00\x00", b"\x0b\x0c", b"\xff" * 40, b"\x3a\x02\x0a\x05", b"text"],
    ids=repr,
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "network.onnx"
    file.write_bytes(content)
    with pytest.raises(BundleError, match="not a readable ONNX model"):
        open_session(file, "CPUExecutionProvider", 1)


def test_a_damaged_file_is_read_to_its_end_or_refused() -> None:
    content = model([node("Add", "x", "w", "y")], {"w": np.zeros(4, np.float32)}).SerializeToString()
    rng = np.random.default_rng(0)
    for _ in range(3000):
        damaged = bytearray(content[: rng.integers(len(content)) or None])
        if damaged:
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        try:
            outline_of(Path("network.onnx"), bytes(damaged))
        except BundleError:
            continue


def test_many_axes_and_many_parts_are_refused_at_once(tmp_path: Path) -> None:
    made = model([node("Add", "x", "w", "y")], {"w": np.zeros(4, np.float32)})
    made.graph.initializer[0].dims[:] = [(1 << 62) + 1] * 200_000
    started = time.process_time()
    with pytest.raises(BundleError, match="is larger than its data"):
        outline_of(Path("network.onnx"), made.SerializeToString())
    with pytest.raises(BundleError, match="has more than 1000000 parts"):
        outline_of(Path("network.onnx"), b"\x3a\x80\x89\x7a" + b"\x40\x00" * 1_000_000)
    assert time.process_time() - started < 60.0


# --- what ordinary exporters make ---


def run(made: ModelProto, tmp_path: Path, **feeds: np.ndarray) -> np.ndarray:
    file = tmp_path / "network.onnx"
    file.write_bytes(made.SerializeToString())
    session = open_session(file, "CPUExecutionProvider", 1)
    found: np.ndarray = session.run(["y"], feeds)[0]
    return found


def test_the_batch_may_be_open(tmp_path: Path) -> None:
    nodes = [
        node("Reshape", "x", "halves", "pairs"),
        node("Transpose", "pairs", "turned", perm=[0, 2, 1]),
        node("MatMul", "turned", "pairs", "products"),
        node("Add", "products", "token", "y"),
    ]
    constants = {"halves": np.array([-1, 2, 2], np.int64), "token": np.ones((1, 1, 2), np.float32)}
    for rows in (1, 3, 200):
        x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
        pairs = x.reshape(rows, 2, 2)
        wanted = pairs.transpose(0, 2, 1) @ pairs + 1
        np.testing.assert_array_equal(run(model(nodes, constants), tmp_path, x=x), wanted)


def test_an_image_network(tmp_path: Path) -> None:
    seen = helper.make_tensor_value_info("x", FLOAT, ["n", 3, 16, 16])
    constants = {
        "w": np.ones((8, 3, 3, 3), np.float32), "scales": np.array([1, 1, 2, 2], np.float32),
        "scale": np.ones(8, np.float32), "bias": np.zeros(8, np.float32),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
    }  # fmt: skip
    nodes = [
        node("Conv", "x", "w", "c", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", "c", "scale", "bias", "bias", "scale", "b"),
        node("Relu", "b", "r"),
        node("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2]),
        node("Resize", "p", "", "scales", "up"),
        node("Pad", "up", "pads", "padded"),
        node("GlobalAveragePool", "padded", "g"),
        node("Flatten", "g", "y"),
    ]
    assert run(model(nodes, constants, [seen]), tmp_path, x=np.ones((5, 3, 16, 16), np.float32)).shape == (5, 8)


def test_a_recurrent_network_and_other_layers(tmp_path: Path) -> None:
    seen = helper.make_tensor_value_info("x", FLOAT, [7, "batch", 4])
    constants = {
        "w": np.ones((1, 12, 4), np.float32), "r": np.ones((1, 12, 3), np.float32), "k": np.array([2], np.int64),
        "gain": np.ones(3, np.float32), "axis": np.array([-1], np.int64),
    }  # fmt: skip
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r"], ["all", "last"], hidden_size=3),
        node("Squeeze", "last", "zero", "h"),
        node("LayerNormalization", "h", "gain", "n"),
        helper.make_node("TopK", ["n", "k"], ["top", "which"], axis=-1),
        node("CumSum", "top", "one", "c"),
        node("Softmax", "c", "y", axis=-1),
    ]
    constants |= {"zero": np.array([0], np.int64), "one": np.int64(1)}
    assert run(model(nodes, constants, [seen]), tmp_path, x=np.ones((7, 5, 4), np.float32)).shape == (5, 2)
