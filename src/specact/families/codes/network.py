"""Policies of action codes on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.bundle.network import CPU, Compute, Network
from specact.bundle.words import NetworkInputs, Words
from specact.families.codes.sampling import softmax
from specact.families.codes.spec import PolicySpec
from specact.families.codes.values import CodeDistribution
from specact.observation import ObservationSpec, Window
from specact.rng import StepAddress


class OnnxPolicy:
    """An exported VQ-BeT.

    Args:
        path: the ``.onnx`` file.
        spec: of the bundle it belongs to.
        observation: its observation spec.
        words: its vocabulary, if it needs an instruction.
        compute: where it runs.

    Attributes:
        observation: as given.
        inputs: converts windows to the network's inputs.

    Raises:
        BundleError: if the file is no ONNX model or does not fit the spec, or needs an instruction but no vocabulary is
            given.
    """

    def __init__(
        self,
        path: Path,
        spec: PolicySpec,
        observation: ObservationSpec,
        *,
        words: Words | None = None,
        compute: Compute = CPU,
    ) -> None:
        self.inputs = NetworkInputs(observation, words if observation.instruction else None)
        self._spec, self.observation = spec, observation
        rows = ("batch", spec.codebooks, spec.codes)
        conditional = {"conditional": ("batch", spec.codes, spec.codes)} if spec.sequential else {}
        outputs = {"logits": rows, "offsets": (*rows, spec.chunk, spec.actions), **conditional}
        self._network = Network(path, self.inputs.shapes, outputs, compute)

    def infer(self, window: Window) -> CodeDistribution:
        """See :class:`~specact.families.codes.spec.CodePolicy`."""
        return self.infer_batch([window])[0]

    def answer(self, window: Window, address: StepAddress) -> CodeDistribution:
        """See :class:`~specact.verification.TargetPolicy`; deterministic."""
        return self.infer(window)

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        """See :class:`~specact.families.codes.spec.CodePolicy`."""
        return distributions(self._network.run(self.inputs.stack(windows)), self._spec.temperature)


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
