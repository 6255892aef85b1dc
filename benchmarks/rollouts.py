"""Control steps per second of an evaluation in virtual time, all methods and their bookkeeping included.

Run: python benchmarks/rollouts.py [BUNDLE] [EPISODES]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.run import evaluate
from specact.lab.rollout.methods import METHODS
from specact.lab.rollout.pool import Pool


def main() -> None:
    bundle = sys.argv[1] if len(sys.argv) > 1 else "ball"
    episodes = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    with tempfile.TemporaryDirectory() as folder, Pool() as pool:
        start = time.perf_counter()
        summary = evaluate(Evaluation(bundle, None, tuple(METHODS), episodes), Path(folder), lambda *_: None, pool)
        seconds = time.perf_counter() - start
    steps = sum(method["control_steps"] for method in summary["methods"].values())
    print(
        f"{bundle}: {steps:,} control steps of {len(METHODS)} methods in {seconds:.1f} s on {os.cpu_count()} cores: "
        f"{steps / seconds:,.0f} steps/s (processes, simulators and files included)"
    )


if __name__ == "__main__":
    main()
