"""Inference time on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from specact.families.codes.spec import CodePolicy
from specact.observation import ObservationSpec, Window


def measure_inference(policy: CodePolicy, observation: ObservationSpec, repeats: int = 200) -> float:
    """Median seconds of one inference at batch 1, on an observation of zeros, after a warm-up."""
    return measure_call(policy.infer, observation.zeros(), repeats)


def measure_call(infer: Callable[[Window], object], window: Window, repeats: int = 200) -> float:
    """Median seconds of one call, after a warm-up."""
    times = []
    for _ in range(repeats + 10):
        start = time.perf_counter()
        infer(window)
        times.append(time.perf_counter() - start)
    return float(np.median(times[10:]))
