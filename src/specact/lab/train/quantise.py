"""Networks of fewer bits: a policy's linear layers quantised group by group, in tiers from mild to strong.

A lever of TISED: each tier rounds one more group of layers than the one before, first to 8 bits, then to 4.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from specact.errors import ConfigError
from specact.files import write_whole
from specact.lab.train.export import forget_sources, store_as_half
from specact.lab.train.quantise_fold import folded
from specact.lab.train.quantise_layers import GROUPS, Group, layer_groups

Method = Literal["int8_dynamic", "int8_static", "int4"]
Feeds = Mapping[str, NDArray[np.generic]]

# Unsigned, as the activations are. Of signed ones a processor without VNNI adds two products in 16 bits, where they
# saturate: the error of a network in 8 bits is then seven times as large.
_WEIGHTS = QuantType.QUInt8
# Weights that share a scale in 4 bits.
_BLOCK = 32
# Activations of 4-bit layers are rounded to 8 bits where they enter a product: as exact, and faster on most processors.
_INT8_PRODUCTS = 4


@dataclass(frozen=True)
class Tier:
    """How strongly a network is quantised.

    Attributes:
        name: such as ``int4_dynamic-mlps``: fewest bits, how layers of 8 bits treat activations, last group reached.
        methods: of every group that is quantised. ``int8_dynamic``: weights of 8 bits, a scale per output;
            activations of 8 bits, scaled as they come. ``int8_static``: the same with the activations' scales fixed on
            given inputs. ``int4``: weights of 4 bits, a scale per 32; activations of 8 bits, scaled as they come.
    """

    name: str
    methods: Mapping[Group, Method]


def tiers(eight: Literal["int8_dynamic", "int8_static"] = "int8_dynamic") -> tuple[Tier, ...]:
    """Eight tiers from mild to strong: group by group to 8 bits, then group by group on to 4.

    Args:
        eight: how layers of 8 bits treat their activations.
    """
    made = []
    begun: dict[Group, Method] = {}
    passes: tuple[tuple[Method, str], ...] = ((eight, eight), ("int4", eight.replace("int8", "int4")))
    for method, name in passes:
        for group in GROUPS:
            begun = begun | {group: method}
            made.append(Tier(f"{name}-{group}", begun))
    return tuple(made)


def quantise(source: Path, out: Path, tier: Tier, calibration: Sequence[Feeds] = ()) -> Path:
    """Writes a quantised variant of an exported network; inputs and outputs stay as they were.

    Args:
        source: an ``.onnx`` file of a bundle: draft or target of a pair, or encoder, prefix or expert of a flow policy.
        out: file to write.
        tier: how strongly.
        calibration: inputs by name, of typical observations; only ``int8_static`` needs them.

    Returns:
        ``out``.

    Raises:
        ConfigError: if the tier needs calibration inputs and there are none, or the file cannot be written.
    """
    model = folded(source)
    nodes: dict[Method, list[str]] = {}
    for name, group in layer_groups(model).items():
        if group in tier.methods:
            nodes.setdefault(tier.methods[group], []).append(name)
    if "int8_static" in nodes and not calibration:
        raise ConfigError(f"tier {tier.name!r} needs typical inputs to calibrate the scales of activations; pass some")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".quantising-", dir=out.parent) as folder, _quiet():
        half_done = Path(folder) / out.name
        if "int4" in nodes:
            model = _to_int4(model, nodes["int4"])
        if "int8_static" in nodes:
            _to_static_int8(model, half_done, nodes["int8_static"], calibration)
            model = onnx.load(half_done)
        if "int8_dynamic" in nodes:
            extra = {"MatMulConstBOnly": True}
            quantize_dynamic(
                model, half_done, ["MatMul"], True, weight_type=_WEIGHTS,
                nodes_to_quantize=nodes["int8_dynamic"], extra_options=extra,
            )  # fmt: skip
            model = onnx.load(half_done)
    forget_sources(model)
    store_as_half(model)  # what is left of the weights as they were
    write_whole(out, model.SerializeToString())
    return out


def _to_int4(model: onnx.ModelProto, nodes: list[str]) -> onnx.ModelProto:
    others = [node.name for node in model.graph.node if node.name not in nodes]
    quantiser = MatMulNBitsQuantizer(
        model, bits=4, block_size=_BLOCK, is_symmetric=True, accuracy_level=_INT8_PRODUCTS, nodes_to_exclude=others
    )
    quantiser.process()
    made: onnx.ModelProto = quantiser.model.model
    return made


def _to_static_int8(model: onnx.ModelProto, out: Path, nodes: list[str], calibration: Sequence[Feeds]) -> None:
    quantize_static(
        model, out, _Inputs(calibration), op_types_to_quantize=["MatMul"], per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=_WEIGHTS, nodes_to_quantize=nodes,
        extra_options={"MatMulConstBOnly": True},
    )  # fmt: skip


class _Inputs(CalibrationDataReader):  # type: ignore[misc]
    """What the tools read calibration inputs from."""

    def __init__(self, feeds: Sequence[Feeds]) -> None:
        self._left = iter(feeds)

    def get_next(self) -> Feeds | None:
        return next(self._left, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """The tools narrate to the root logger what they find and skip."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
