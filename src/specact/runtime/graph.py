"""Checks of an untrusted ONNX file before it runs: allowed operators and bounded computation.

A file passes if it has no control flow, only operators of ONNX and some of ONNX Runtime, no external data, and if the
sizes of all intermediate results follow from the input sizes and stay below a limit. The operators are read from the
file's bytes; the sizes are inferred by ONNX Runtime, without optimisation (which would execute constant parts), for a
copy of the graph without declared shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specact.errors import BundleError
from specact.runtime.protobuf import BYTES, VARINT, Field, field, fields, numbers

# Maximum of computed numbers per row of a batch, over all operators: 2 GiB in single precision.
MAX_COMPUTED = 1 << 29
# Batch size for the inference of sizes; above 1, to detect sizes that grow faster than the batch.
ROWS = 64
_SHAPE_OF = "specact:shape of "
# ONNX sums the axes of a concatenation in 32 bits; these limits prevent an overflow.
_MAX_AXIS, _MAX_INPUTS = 1 << 24, 100
_MAX_BYTES = (1 << 31) - 1  # of a protocol buffer
_MAX_FIELDS = 1_000_000
_MAX_AXES = 32

# Allowed operators of the domain com.microsoft, which quantisation and layer fusion produce.
_RUNTIME_OPERATORS = frozenset(
    (
        "Attention", "BiasGelu", "DequantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "FastGelu",
        "FusedConv", "FusedGemm", "FusedMatMul", "Gelu", "GroupQueryAttention", "MatMulIntegerToFloat", "MatMulNBits",
        "MultiHeadAttention", "QAttention", "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat",
        "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid", "QLinearSoftmax",
        "QuantizeLinear", "QuickGelu", "RotaryEmbedding", "SimplifiedLayerNormalization", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    )
)  # fmt: skip


class Value(Protocol):
    """An output as described by ONNX Runtime."""

    name: str
    type: str
    shape: Sequence[int | str | None]


@dataclass(frozen=True)
class Outline:
    """A copy of a model for the inference of sizes.

    Attributes:
        content: the model without declared shapes, with every intermediate result and its shape as outputs; the shapes
            are needed because ONNX Runtime describes scalars and tensors of unknown rank alike.
        free: names of the symbolic input sizes, such as the batch size. Infer with :data:`ROWS` for each.
    """

    content: bytes
    free: frozenset[str]


def outline_of(path: Path, content: bytes) -> Outline:
    """Checks an ONNX file's structure.

    Raises:
        BundleError: if the file is malformed or has a part that is not allowed.
    """
    try:
        return _Reader(path).model(content)
    except ValueError as error:
        raise BundleError(f"{path} is not a readable ONNX model: {error}") from None


def check_sizes(path: Path, outputs: Sequence[Value]) -> None:
    """Refuses a network by the inferred sizes of its outline's outputs.

    Raises:
        BundleError: if a size is unknown before it runs or too large, or an output is no tensor of numbers.
    """
    axes = {entry.name: list(entry.shape) for entry in outputs if entry.name.startswith(_SHAPE_OF)}
    computed = 0
    for entry in outputs:
        if entry.name in axes:
            continue
        if not entry.type.startswith("tensor(") or entry.type == "tensor(string)":
            raise BundleError(
                f"{path}: {entry.name!r} is a {entry.type}; a bundle's networks compute only with numbers"
            )
        sizes = [size for size in entry.shape if isinstance(size, int) and size >= 0]
        if axes.get(_SHAPE_OF + entry.name) != [len(sizes)]:
            raise BundleError(
                f"{path}: the size of {entry.name!r} is known only when the network runs; "
                "export it with fixed sizes except for the batch"
            )
        if max(sizes, default=0) > _MAX_AXIS:
            raise BundleError(
                f"{path} needs too much computation: {entry.name!r} has {max(sizes)} entries along one axis for {ROWS} "
                f"observations, a bundle's network at most {_MAX_AXIS}; export a smaller one"
            )
        computed += math.prod(sizes)
    if computed > MAX_COMPUTED * ROWS:
        raise BundleError(
            f"{path} needs too much computation: {computed / ROWS:.1e} numbers for one observation, a "
            f"bundle's network at most {MAX_COMPUTED:.1e}; export a smaller one"
        )


class _Reader:
    """Parses one model. Field numbers are those of onnx.proto."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = _MAX_FIELDS
        self._computed: list[bytes] = []
        self._free: set[str] = set()

    def model(self, content: bytes) -> Outline:
        if len(content) > _MAX_BYTES:
            raise BundleError(
                f"{self._path} has {len(content)} bytes, but a bundle's network may have at most {_MAX_BYTES}"
            )
        kept: list[bytes | memoryview] = []
        graph: list[bytes | memoryview] = []
        for part in self._fields(memoryview(content)):
            if part.number == 7 and part.kind == BYTES:
                graph += self._graph(part.content)
                continue
            if part.number in (20, 25):
                what = "a training graph" if part.number == 20 else "functions of its own"
                raise BundleError(f"{self._path} holds {what}; export the network as one plain graph")
            kept.append(part.raw)
        for name in self._computed:
            if name.startswith(_SHAPE_OF.encode()):
                raise ValueError(f"nothing in it may be named {_SHAPE_OF!r}")
            shape = _SHAPE_OF.encode() + name
            graph.append(field(1, field(1, name) + field(2, shape) + field(4, b"Shape")))
            graph += [field(12, field(1, output)) for output in (name, shape)]
        return Outline(b"".join([*kept, field(7, b"".join(graph))]), frozenset(self._free))

    def _graph(self, message: memoryview) -> list[memoryview]:
        """Checks a graph and returns its fields without outputs and declared shapes."""
        kept = []
        for part in self._fields(message):
            if part.number == 1 and part.kind == BYTES:
                self._node(part.content)
            elif part.number == 5 and part.kind == BYTES:
                self._tensor(part.content)
            elif part.number == 11 and part.kind == BYTES:
                self._input(part.content)
            elif part.number == 15:
                raise BundleError(f"{self._path} holds a sparse tensor; export the network with dense ones")
            if part.number not in (12, 13):
                kept.append(part.raw)
        return kept

    def _input(self, message: memoryview) -> None:
        """Finds the names of open sizes: type, tensor, shape, size, name."""
        inside = [message]
        for number in (2, 1, 2, 1):
            inside = [
                part.content for outer in inside for part in self._fields(outer)
                if part.number == number and part.kind == BYTES
            ]  # fmt: skip
        self._free.update(_text(part) for size in inside for part in self._fields(size) if part.number == 2)

    def _node(self, message: memoryview) -> None:
        parts = list(self._fields(message))
        operators, domains = ([_text(part) for part in parts if part.number == number] for number in (4, 7))
        # If a field is repeated the last one counts; all of them have to be allowed.
        for operator in operators:
            for domain in domains or [""]:
                if domain not in ("", "ai.onnx") and not (domain == "com.microsoft" and operator in _RUNTIME_OPERATORS):
                    raise BundleError(
                        f"{self._path} uses the operator {domain}.{operator}, which is not allowed in a bundle; "
                        "export the network with operators of ONNX"
                    )
        if "Shape" in operators or "Size" in operators:
            raise BundleError(
                f"{self._path} computes sizes when it runs, with the operator {'/'.join(operators)}; "
                "export it with fixed sizes except for the batch"
            )
        if sum(part.number == 1 for part in parts) > _MAX_INPUTS:
            raise BundleError(
                f"{self._path}: an operator {'/'.join(operators)} has more than {_MAX_INPUTS} inputs; "
                "export the network with several smaller ones"
            )
        for part in parts:
            if part.number == 2 and part.kind == BYTES and len(part.content):
                self._computed.append(bytes(part.content))
            if part.number == 5 and part.kind == BYTES:
                self._attribute(part.content, "/".join(operators))

    def _attribute(self, message: memoryview, operator: str) -> None:
        for part in self._fields(message):
            if part.number in (6, 11):
                raise BundleError(
                    f"{self._path} uses control flow, the operator {operator}, which may not terminate; "
                    "export the network without loops and branches"
                )
            if part.number in (22, 23):
                raise BundleError(f"{self._path} holds a sparse tensor; export the network with dense ones")
            if part.number in (5, 10) and part.kind == BYTES:
                self._tensor(part.content)

    def _tensor(self, message: memoryview) -> None:
        sizes: list[int] = []
        name = ""
        for part in self._fields(message):
            if part.number == 1 and part.kind in (VARINT, BYTES):
                sizes += numbers(part, most=_MAX_AXES + 1)
            elif part.number == 8:
                name = _text(part)
            elif part.number == 13 or (part.number == 14 and part.value != 0):
                raise BundleError(
                    f"{self._path} keeps the tensor {name!r} in another file; export the network with its weights "
                    "inside"
                )
        # The smallest elements have 4 bits.
        if len(sizes) > _MAX_AXES or min(sizes, default=0) < 0 or math.prod(sizes) > 2 * len(message):
            raise BundleError(
                f"{self._path}: the tensor {name!r} of shape {sizes[:8]} is larger than its data; copy the bundle again"
            )

    def _fields(self, message: memoryview) -> Iterator[Field]:
        for part in fields(message):
            self._left -= 1
            if self._left < 0:
                raise BundleError(f"{self._path} has more than {_MAX_FIELDS} parts; export a smaller network")
            yield part


def _text(part: Field) -> str:
    if part.kind != BYTES:
        return ""
    return bytes(part.content).decode()
