"""Counting parameters from the file alone, against the onnx package and against what training counted."""

import math
from pathlib import Path

import onnx
import pytest

from specact import load_bundle
from specact.runtime.parameters import count_parameters

PRETRAINED = Path(__file__).parents[2] / "pretrained"
FILES = sorted(path for path in PRETRAINED.glob("*/*.onnx") if path.parent.name in ("ball", "pusht-distilled"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_the_count_is_that_of_the_onnx_package(file: Path) -> None:
    tensors = onnx.load(file).graph.initializer
    integers = (onnx.TensorProto.INT32, onnx.TensorProto.INT64, onnx.TensorProto.BOOL)
    expected = sum(math.prod(tensor.dims) for tensor in tensors if tensor.data_type not in integers)
    assert count_parameters(file) == expected > 1000


@pytest.mark.parametrize("packed", [False, True])
def test_dimensions_may_be_packed(tmp_path: Path, packed: bool) -> None:
    """ONNX writes them one by one; other writers of protocol buffers pack them."""
    dims = b"\x0a\x03\x03\xac\x02" if packed else b"\x08\x03\x08\xac\x02"  # 3 and 300
    tensor = dims + b"\x10\x01"
    graph = b"\x2a" + bytes([len(tensor)]) + tensor
    (tmp_path / "model.onnx").write_bytes(b"\x08\x09" + b"\x3a" + bytes([len(graph)]) + graph)
    assert count_parameters(tmp_path / "model.onnx") == 900


@pytest.mark.parametrize("part", ["draft", "target"])
def test_the_count_is_what_training_counted_but_for_a_few_constants(part: str) -> None:
    bundle = load_bundle("ball")
    trained = bundle.manifest["parameters"][part]
    assert trained <= count_parameters(bundle.path / f"{part}.onnx") <= 1.02 * trained + 60
