"""Policies on ONNX Runtime, the inference engine of device and server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as raised

from specact.errors import BundleError, ConfigError
from specact.families.codes.sampling import softmax
from specact.families.codes.spec import PolicySpec
from specact.families.codes.values import CodeDistribution
from specact.families.words import NetworkInputs, Words
from specact.observation import ObservationSpec, Window
from specact.rng import StepAddress
from specact.runtime.graph import ROWS, check_sizes, outline_of
from specact.runtime.manifest import read_part

# What ONNX Runtime raises for files it cannot use; its exceptions have no base class of their own.
_LOAD_ERRORS = (
    raised.EPFail,
    raised.Fail,  # sizes or versions that do not fit
    raised.InvalidArgument,  # empty files, dangling inputs
    raised.InvalidGraph,
    raised.InvalidProtobuf,  # cut files, anything else than ONNX
    raised.NoSuchFile,
    raised.NotImplemented,  # operators the provider lacks
    raised.RuntimeException,
    UnicodeDecodeError,  # its own messages, where they quote a damaged name
)


class OnnxPolicy:
    """An exported VQ-BeT.

    Args:
        path: the ``.onnx`` file.
        spec: of the bundle it belongs to; the file's outputs are checked against it.
        observation: its observation spec; the file's inputs are checked against it.
        words: its vocabulary, if it needs an instruction.
        provider: ONNX Runtime execution provider, such as ``CPUExecutionProvider``.
        threads: threads of one inference; 1 is fastest for small policies and keeps the robot's other cores free.

    Attributes:
        observation: as given.
        inputs: converts windows to the network's inputs.

    Raises:
        BundleError: if the file is no ONNX model or does not fit the spec, or needs an instruction but no vocabulary is
            given.
        ConfigError: if this installation of ONNX Runtime has no such provider, or for less than one thread.
    """

    def __init__(
        self,
        path: Path,
        spec: PolicySpec,
        observation: ObservationSpec,
        *,
        words: Words | None = None,
        provider: str = "CPUExecutionProvider",
        threads: int = 1,
    ) -> None:
        self.inputs = NetworkInputs(observation, words if observation.instruction else None)
        self._session = open_session(path, provider, threads)
        self._spec, self.observation = spec, observation
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._check(path)

    def infer(self, window: Window) -> CodeDistribution:
        """See :class:`~specact.families.codes.spec.CodePolicy`."""
        return self.infer_batch([window])[0]

    def answer(self, window: Window, address: StepAddress) -> CodeDistribution:
        """See :class:`~specact.verification.TargetPolicy`; deterministic."""
        return self.infer(window)

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        """See :class:`~specact.families.codes.spec.CodePolicy`."""
        return distributions(self._session.run(self._outputs, self.inputs.stack(windows)), self._spec.temperature)

    def _check(self, path: Path) -> None:
        spec = self._spec
        wanted = self.inputs.shapes
        found = {entry.name: entry.shape[1:] for entry in self._session.get_inputs()}
        if found != wanted:
            raise BundleError(
                f"{path} takes {found}, but the bundle's manifest says {wanted}: they do not match; "
                "export the bundle again"
            )
        outputs = self._session.get_outputs()
        if len(outputs) != 2 + spec.sequential:
            raise BundleError(
                f"{path} gives {len(outputs)} outputs, but the bundle's manifest (sequential: {spec.sequential}) says "
                f"{2 + spec.sequential}: they do not match; export the bundle again"
            )
        offsets = outputs[1].shape[1:]
        if offsets != [spec.codebooks, spec.codes, spec.chunk, spec.actions]:
            raise BundleError(
                f"{path} gives offsets of shape {offsets}, but the bundle's manifest says "
                f"{[spec.codebooks, spec.codes, spec.chunk, spec.actions]}: they do not match; export the bundle again"
            )


def distributions(outputs: Sequence[NDArray[Any]], temperature: float) -> list[CodeDistribution]:
    """Distributions of B windows from a network's ``logits``, ``offsets`` and, if sequential, ``conditional``."""
    logits, offsets, *conditional = outputs
    probs = softmax(logits, temperature)
    if not conditional:
        return list(map(CodeDistribution, probs, offsets))
    rows = softmax(conditional[0], temperature)
    # Row 1 of the probabilities is the marginal of the secondary code.
    marginal = np.einsum("bi,bij->bj", probs[:, 0], rows)
    probs = np.stack([probs[:, 0], marginal], axis=1)
    return list(map(CodeDistribution, probs, offsets, rows))


def open_session(path: Path, provider: str, threads: int) -> onnxruntime.InferenceSession:
    """A session for an ONNX model that passes the checks of :mod:`specact.runtime.graph`.

    Arguments and errors as for :class:`OnnxPolicy`.
    """
    check_provider(provider, threads)
    options, unoptimised = session_options(threads), session_options(threads)
    content = read_part(path)
    outline = outline_of(path, content)
    unoptimised.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for name in outline.free:
        unoptimised.add_free_dimension_override_by_name(name, ROWS)
    try:
        inferred = onnxruntime.InferenceSession(outline.content, unoptimised, providers=["CPUExecutionProvider"])
        check_sizes(path, inferred.get_outputs())
        return onnxruntime.InferenceSession(content, options, providers=[provider])
    except _LOAD_ERRORS as error:
        raise BundleError(f"{path} is not a readable ONNX model: {str(error).splitlines()[0]}") from None


def check_provider(provider: str, threads: int) -> None:
    """Refuses an execution provider that ONNX Runtime itself would replace by another one.

    Arguments as for :class:`OnnxPolicy`.

    Raises:
        ConfigError: if this installation of ONNX Runtime has no such provider, or for less than one thread.
    """
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise ConfigError(
            f"execution provider {provider!r} is not part of this ONNX Runtime; it has {', '.join(available)}"
        )


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """Options of a session with so many threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.load_model_format", "ONNX")  # the format that was checked
    return options
