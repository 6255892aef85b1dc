"""What an ONNX file may hold: networks whose work is known before they run. Nothing here executes them.

A bundle may come from anyone. A file passes where it has no control flow, no operators but those of ONNX and a few of
ONNX Runtime, no data in other files, and where the size of everything it computes follows from the sizes of its inputs
and stays below a limit. The first is read from the file's bytes; the second is what ONNX Runtime infers, without
optimisation (which would execute what is constant), for a copy of the graph without the shapes the file declares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specact.errors import BundleError
from specact.runtime.protobuf import BYTES, VARINT, Field, field, fields, numbers

# Numbers that a network may compute for one row of a batch, over all of its operators: 2 GiB in single precision.
MOST_COMPUTED = 1 << 29
# Rows of a batch for which sizes are inferred: more than one, so that what grows faster than the batch is seen.
ROWS = 64
_SHAPE_OF = "specact:shape of "
# ONNX adds up the axes of a concatenation in 32 bits: with these it cannot overflow.
_LONGEST_AXIS, _MOST_INPUTS = 1 << 24, 100
_MOST_BYTES = (1 << 31) - 1  # of a protocol buffer
_MOST_FIELDS = 1_000_000
_MOST_AXES = 32

# Of the domain com.microsoft: what quantisation and the fusion of layers make.
_RUNTIMES_OWN = frozenset(
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
    """What ONNX Runtime says of an output."""

    name: str
    type: str
    shape: Sequence[int | str | None]


@dataclass(frozen=True)
class Outline:
    """A model that tells the size of everything it computes.

    Attributes:
        content: the same model, except that it declares no shapes, that everything it computes is an output, and so is
            the shape of that: ONNX Runtime describes what has no axes and what has any number of them alike.
        free: names of the sizes that its inputs leave open, such as that of a batch. Infer it with :data:`ROWS` each.
    """

    content: bytes
    free: frozenset[str]


def outline_of(path: Path, content: bytes) -> Outline:
    """Looks through an ONNX file.

    Raises:
        BundleError: if the file is malformed, or holds what a bundle may not.
    """
    try:
        return _Reader(path).model(content)
    except ValueError as error:
        raise BundleError(f"{path} is not a readable ONNX model: {error}") from None


def check_sizes(path: Path, outputs: Sequence[Value]) -> None:
    """Refuses a network by what is inferred for the outputs of its outline.

    Raises:
        BundleError: if the size of something is not known before it runs, is too large, or is no tensor of numbers.
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
        if max(sizes, default=0) > _LONGEST_AXIS:
            raise BundleError(
                f"{path} needs too much computation: {entry.name!r} has {max(sizes)} entries along one axis for {ROWS} "
                f"observations, a bundle's network at most {_LONGEST_AXIS}; export a smaller one"
            )
        computed += math.prod(sizes)
    if computed > MOST_COMPUTED * ROWS:
        raise BundleError(
            f"{path} needs too much computation: {computed / ROWS:.1e} numbers for one observation, a "
            f"bundle's network at most {MOST_COMPUTED:.1e}; export a smaller one"
        )


class _Reader:
    """Walks through one model. Field numbers are those of onnx.proto."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = _MOST_FIELDS
        self._computed: list[bytes] = []
        self._free: set[str] = set()

    def model(self, content: bytes) -> Outline:
        if len(content) > _MOST_BYTES:
            raise BundleError(
                f"{self._path} has {len(content)} bytes, but a bundle's network may have at most {_MOST_BYTES}"
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
        # Of a field that is there twice, the last counts; here all have to be allowed.
        for operator in operators:
            for domain in domains or [""]:
                if domain not in ("", "ai.onnx") and not (domain == "com.microsoft" and operator in _RUNTIMES_OWN):
                    raise BundleError(
                        f"{self._path} uses the operator {domain}.{operator}, which is not allowed in a bundle; "
                        "export the network with operators of ONNX"
                    )
        if "Shape" in operators or "Size" in operators:
            raise BundleError(
                f"{self._path} computes sizes when it runs, with the operator {'/'.join(operators)}; "
                "export it with fixed sizes except for the batch"
            )
        if sum(part.number == 1 for part in parts) > _MOST_INPUTS:
            raise BundleError(
                f"{self._path}: an operator {'/'.join(operators)} has more than {_MOST_INPUTS} inputs; "
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
                sizes += numbers(part, most=_MOST_AXES + 1)
            elif part.number == 8:
                name = _text(part)
            elif part.number == 13 or (part.number == 14 and part.value != 0):
                raise BundleError(
                    f"{self._path} keeps the tensor {name!r} in another file; export the network with its weights "
                    "inside"
                )
        # Two elements of 4 bits share a byte; nothing is smaller.
        if len(sizes) > _MOST_AXES or min(sizes, default=0) < 0 or math.prod(sizes) > 2 * len(message):
            raise BundleError(
                f"{self._path}: the tensor {name!r} of shape {sizes[:8]} is larger than its data; copy the bundle again"
            )

    def _fields(self, message: memoryview) -> Iterator[Field]:
        for part in fields(message):
            self._left -= 1
            if self._left < 0:
                raise BundleError(f"{self._path} has more than {_MOST_FIELDS} parts; export a smaller network")
            yield part


def _text(part: Field) -> str:
    if part.kind != BYTES:
        return ""
    return bytes(part.content).decode()
