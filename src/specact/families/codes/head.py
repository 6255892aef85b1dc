"""The target head: a small network on the device that estimates the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from specact.bundle.manifest import fingerprint_of
from specact.bundle.words import NetworkInputs
from specact.families.codes.policy import CodePolicy, PolicySpec
from specact.families.codes.sampling import CodeDistribution
from specact.families.head import TrainedFor, calibrate_command, head_file, open_head
from specact.observation import Window
from specact.pair import Pair
from specact.types import Floats


def load_head(pair: Pair[Any]) -> TargetHead:
    """The target head of a pair of action codes. Robots of one process share its session, which is stateless.

    Raises:
        ConfigError: if the pair has none.
        BundleError: if it does not fit the pair.
    """
    file, parts = head_file(pair), pair.parts
    command = calibrate_command(pair)
    return _load_head(file, parts.spec, parts.draft.inputs, TrainedFor.of(pair), command, fingerprint_of(file))


@cache
def _load_head(
    path: Path, spec: PolicySpec, seen: NetworkInputs, wanted: TrainedFor, command: str, weights: str
) -> TargetHead:
    """``weights`` is part of the cache key, since a file can be overwritten with another head."""
    return TargetHead(path, spec, seen, wanted, command)


class TargetHead:
    """Estimates the target's distribution from the window and the draft's.

    Args:
        path: the ``.onnx`` file, next to the draft's.
        spec: of the bundle it belongs to; the file's inputs and output are checked against it.
        seen: the draft's network inputs, which are also the head's.
        wanted, command: see :func:`~specact.families.head.open_head`.

    Attributes:
        fingerprint: of the file.

    Raises:
        BundleError: if the file is no ONNX model, does not fit the spec, or was made for another pair.
    """

    def __init__(self, path: Path, spec: PolicySpec, seen: NetworkInputs, wanted: TrainedFor, command: str) -> None:
        self._inputs = seen
        probs = ("batch", spec.codebooks, spec.codes)
        self._network = open_head(path, wanted, seen.shapes | {"draft_probs": probs}, {"target_probs": probs}, command)
        self.fingerprint = fingerprint_of(path)

    def estimate(self, window: Window, draft: CodeDistribution) -> Floats:
        """``p^``, ``[G, K]``."""
        estimate: Floats = self.estimate_batch([window], [draft])[0]
        return estimate

    def estimate_batch(self, windows: Sequence[Window], drafts: Sequence[CodeDistribution]) -> Floats:
        """``p^`` of several windows in one pass, ``[B, G, K]``."""
        inputs = self._inputs.stack(windows)
        inputs["draft_probs"] = np.stack([draft.probs for draft in drafts]).astype(np.float32)
        return np.asarray(self._network.run(inputs)[0], dtype=np.float64)


class HeadDraft:
    """A :class:`~specact.families.codes.policy.CodePolicy` that drafts from the head's estimate of the target.

    Codes are sampled from ``p^`` instead of ``q``, with the draft's offsets. It shows what the head contributes without
    a gate. Verified with ``p^`` in place of ``q``, the codes follow the target's distribution exactly.

    Args:
        draft: its offsets are used, and its distribution is an input of the head.
        head: estimates the target's distribution; ``p^`` is a distribution for heads that were trained on it.
    """

    def __init__(self, draft: CodePolicy, head: TargetHead) -> None:
        self._draft, self._head = draft, head

    def infer(self, window: Window) -> CodeDistribution:
        return self.infer_batch([window])[0]

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        drafts = self._draft.infer_batch(windows)
        estimates = self._head.estimate_batch(windows, drafts)
        # Rows sum to 1 only up to single precision.
        estimates /= estimates.sum(axis=-1, keepdims=True)
        return [CodeDistribution(probs, draft.offsets) for probs, draft in zip(estimates, drafts, strict=True)]
