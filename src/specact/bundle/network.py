"""Networks on ONNX Runtime, the engine of device and server, and their inputs; all are checked at loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as raised

from specact.bundle.manifest import INSTRUCTION, WEIGHTS, Words, read_part
from specact.errors import BundleError, ConfigError
from specact.observation import ObservationSpec, Window
from specact.records import Count, check_fields

# A size is a number, or a name that stands for one size wherever it is used.
Shape = Sequence[int | str]
Shapes = Mapping[str, Shape]

# What ONNX Runtime raises for files it cannot use. Its exceptions have no base class of their own; the last one is that
# of its messages, where they quote a damaged name.
LOAD_ERRORS: tuple[type[Exception], ...] = (
    *(kind for kind in vars(raised).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    UnicodeDecodeError,
)


@dataclass(frozen=True)
class Compute:
    """Where networks run: an execution provider of ONNX Runtime, and the threads of one inference.

    One thread is fastest for small policies and keeps the robot's other cores free.

    Raises:
        ConfigError: if this installation of ONNX Runtime has no such provider, or for less than one thread.
    """

    provider: str = "CPUExecutionProvider"  # of ONNX Runtime, such as CUDAExecutionProvider
    threads: Count = 1  # of one inference, on ONNX Runtime

    def __post_init__(self) -> None:
        check_fields(self)
        available = onnxruntime.get_available_providers()
        # ONNX Runtime itself would replace it by another one.
        if self.provider not in available:
            raise ConfigError(
                f"execution provider {self.provider!r} is not part of this ONNX Runtime; it has {', '.join(available)}"
            )


CPU = Compute()


class Network:
    """An ``.onnx`` file with declared inputs and outputs: shape by name, the batch included; None takes the file's.

    The outputs' order is that of a run. Afterwards ``inputs`` and ``outputs`` are the shapes in the file, and ``sizes``
    the numbers that named sizes stand for; sizes that are free in the file have none. ``repair`` says in messages what
    to do about a network that does not fit. Weights in other files are read in its folder.

    Raises:
        BundleError: if the file is no ONNX model, or has other inputs or outputs.
    """

    def __init__(
        self,
        file: Path,
        inputs: Shapes | None = None,
        outputs: Shapes | None = None,
        compute: Compute = CPU,
        *,
        sizes: Mapping[str, int] = MappingProxyType({}),
        repair: str = "export the bundle again",
    ) -> None:
        self._session = open_session(file, compute)
        self.inputs, self.outputs = _shapes(self._session.get_inputs()), _shapes(self._session.get_outputs())
        self.sizes = dict(sizes)
        for verb, shapes, wanted in (("takes", self.inputs, inputs), ("gives", self.outputs, outputs)):
            if wanted is not None and not (
                shapes.keys() == wanted.keys() and all(fits(shapes[name], wanted[name], self.sizes) for name in shapes)
            ):
                dims = {name: list(shape) for name, shape in wanted.items()}
                raise BundleError(
                    f"{file} {verb} {shapes}, but the bundle's manifest and its other parts say {dims}: they do not "
                    f"match; {repair}"
                )
        self._names = list(self.outputs if outputs is None else outputs)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's own entries, by name."""
        entries: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map
        return entries

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """The outputs of a batch, in the order of :attr:`outputs`."""
        outputs: list[NDArray[Any]] = self._session.run(self._names, inputs)
        return outputs


def fits(shape: Shape, wanted: Shape, sizes: dict[str, int]) -> bool:
    """Whether a shape is the wanted one; notes in ``sizes`` the numbers that named sizes stand for."""
    return len(shape) == len(wanted) and all(
        size == given if isinstance(size, int) else isinstance(given, str) or sizes.setdefault(size, given) == given
        for given, size in zip(shape, wanted, strict=True)
    )


@dataclass(frozen=True)
class NetworkInputs:
    """A network's inputs: the arrays of its spec and, if it needs one, the instruction in its vocabulary.

    An instruction without a vocabulary is a BundleError.
    """

    spec: ObservationSpec
    words: Words | None = None

    def __post_init__(self) -> None:
        if self.spec.instruction and self.words is None:
            raise BundleError("a policy that needs an instruction must say which words it knows; export it again")

    def stack(self, windows: Sequence[Window]) -> dict[str, NDArray[Any]]:
        """Arrays of B windows by name, ``[B, *window_shape]``, and ``instruction`` int64 ``[B, L]``."""
        stacked = self.spec.stack(windows)
        if self.spec.instruction and self.words is not None:
            stacked[INSTRUCTION] = self.words.numbers([window.instruction for window in windows])
        return stacked

    @property
    def shapes(self) -> dict[str, tuple[int | str, ...]]:
        """Shapes by name, the batch first, as :class:`~specact.bundle.network.Network` takes them."""
        shapes: dict[str, tuple[int | str, ...]] = {
            name: ("batch", *field.window_shape) for name, field in self.spec.fields.items()
        }
        if self.spec.instruction and self.words is not None:
            shapes[INSTRUCTION] = "batch", self.words.length
        return shapes


def open_session(file: Path, compute: Compute = CPU) -> onnxruntime.InferenceSession:
    """A session for an ONNX model; BundleError if the file cannot be read, or is no ONNX model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = compute.threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # A policy's weights are also those of networks in folders below its own.
    parent, above = file.absolute().parents[:2]
    folder = above if (above / WEIGHTS).is_file() and not (parent / WEIGHTS).is_file() else parent
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        return onnxruntime.InferenceSession(read_part(file), options, providers=[compute.provider])
    except LOAD_ERRORS as error:
        raise BundleError(f"{file} is not a readable ONNX model: {str(error).splitlines()[0]}") from None


def _shapes(entries: Sequence[Any]) -> dict[str, list[int | str]]:
    return {entry.name: list(entry.shape) for entry in entries}
