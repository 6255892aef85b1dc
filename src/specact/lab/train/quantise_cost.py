"""What a variant of a network saves, and what it changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specact.families.codes.network import open_session
from specact.lab.train.quantise import Feeds


@dataclass(frozen=True)
class VariantCost:
    """A variant against its original.

    Attributes:
        size_bytes, original_bytes: of the files.
        seconds, original_seconds: median time of one inference at batch 1.
        ratio: median of the ratios of neighbouring runs, below 1 where the variant is faster; an alpha of TISED, for
            this one network.
        error: root mean square difference of all outputs, in units of the original's own root mean square.
    """

    size_bytes: int
    original_bytes: int
    seconds: float
    original_seconds: float
    ratio: float
    error: float


def measure_variant(original: Path, variant: Path, inputs: Sequence[Feeds], *, repeats: int = 300) -> VariantCost:
    """Runs both by turns, so that whatever slows the machine down slows both, on the processor with one thread.

    Args:
        original, variant: ``.onnx`` files with the same inputs and outputs.
        inputs: used in turn.
        repeats: timed runs of each, after a tenth as many untimed.
    """
    sessions = [open_session(file, "CPUExecutionProvider", threads=1) for file in (original, variant)]
    answers = [[session.run(None, feeds) for feeds in inputs] for session in sessions]
    wanted, found = (np.concatenate([np.ravel(output) for run in runs for output in run]) for runs in answers)
    seconds = np.empty((repeats, 2))
    for number in range(-(repeats // 10), repeats):  # what is below 0 is overwritten
        for side, session in enumerate(sessions):
            start = time.perf_counter()
            session.run(None, inputs[number % len(inputs)])
            seconds[max(number, 0), side] = time.perf_counter() - start
    original_s, variant_s = np.median(seconds, axis=0)
    return VariantCost(
        size_bytes=variant.stat().st_size,
        original_bytes=original.stat().st_size,
        seconds=float(variant_s),
        original_seconds=float(original_s),
        ratio=float(np.median(seconds[:, 1] / seconds[:, 0])),
        error=float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))),
    )
