"""Processor time of an evaluation in virtual time, by method and as a whole, and its speed on all processors.

One shard of each of six methods runs in this process, its tables' way to files included; *all of it* is an evaluation
of these methods from loading the bundle to the summary.

Run: python benchmarks/rollouts.py [BUNDLE ...]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specact.gates.calibration import find_calibration
from specact.lab.evaluation.calibrate import gate_of_method
from specact.lab.evaluation.run import Evaluation, evaluate, write_shard
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import Shard, run_shard
from specact.load import load_pair
from specact.pair import Pair

METHODS = ("draft", "target", "hybrid", "random", "adahi", "learned")
ROUNDS, EPISODES = 5, 20


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in sys.argv[1:] or ("ball", "pusht"):
            pair = load_pair(name)
            print(f"{name}: {EPISODES} episodes per method; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
            for method in METHODS:
                shard = shard_of(pair, method)

                def work(shard: Shard = shard) -> int:
                    outcomes, steps = run_shard(shard)
                    write_shard(folder, shard, outcomes, steps)
                    return sum(outcome.steps for outcome in outcomes)

                print(f"  {method:13} {spent_us(work):6.1f} us of the processor per control step", flush=True)
            print(f"  {'all of it':13} {spent_us(lambda name=name: evaluation(name, folder, 1)):6.1f} us")  # type: ignore[misc]
            for workers in sorted({1, os.cpu_count() or 1}):
                start = time.perf_counter()
                steps = evaluation(name, folder, workers)
                seconds = time.perf_counter() - start
                print(f"  {workers} processes: {steps:,} steps in {seconds:.1f} s, {steps / seconds:,.0f} per second")


def shard_of(pair: Pair[Any], name: str) -> Shard:
    """The method's first shard, with its stored calibration, random gates at 0.6, and fixed accounted times."""
    method = load_method(name)
    stored = find_calibration(pair, method.gate, 0.6)
    gate = gate_of_method(method, pair, 0.6, lambda wanted: wanted if stored is None else stored.settings)
    shard = Shard.of(pair, pair.env, method, gate, range(EPISODES), 1)
    return replace(shard, link="wifi-paper", draft_s=2e-4, target_s=5e-4, gate_s=5e-5)


def spent_us(work: Callable[[], int]) -> float:
    """Median processor time of this process per control step of a piece of work, which returns their number."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        steps = work()
        times.append(1e6 * (time.process_time() - start) / steps)
    return float(np.median(times))


def evaluation(name: str, folder: Path, workers: int) -> int:
    """Runs an evaluation of the methods that the bundle has a calibration for; returns its control steps."""
    what = Evaluation(name, None, METHODS, EPISODES, draft_ms=0.2, gate_ms=0.05, head_ms=0.1, target_ms=0.5)
    with Pool(workers) as pool:
        summary = evaluate(what, Path(tempfile.mkdtemp(dir=folder)), lambda *_: None, pool)
    return sum(method["control_steps"] for method in summary["methods"].values())


if __name__ == "__main__":
    main()
