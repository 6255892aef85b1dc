"""How long an inference takes on this machine."""

from __future__ import annotations

import time

import numpy as np

from specact.families.codes.spec import CodePolicy, PolicySpec
from specact.types import Window


def measure_inference(policy: CodePolicy, spec: PolicySpec, repeats: int = 200) -> float:
    """Median seconds of one inference at batch 1, on an observation of zeros, after a warm-up."""
    window, times = empty_window(spec), []
    for _ in range(repeats + 10):
        start = time.perf_counter()
        policy.infer(window)
        times.append(time.perf_counter() - start)
    return float(np.median(times[10:]))


def empty_window(spec: PolicySpec) -> Window:
    """Observations of zeros."""
    return Window(
        np.zeros((spec.window, spec.state), np.float32),
        np.zeros(spec.goal, np.float32) if spec.goal else None,
        np.zeros((spec.window, *spec.image, 3), np.uint8) if spec.image else None,
    )
