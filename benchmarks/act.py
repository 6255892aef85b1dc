"""The overhead of SpeculativePolicy.act over the networks: checks, sampling, gate, verification, decoding, records.

The networks' time is that of ``session.run`` itself, in the same call of ``act``.

Run: python benchmarks/act.py [BUNDLE ...] (without names swarm is needed: scripts/make-pretrained swarm)
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from specact import SpeculativePolicy, calibrated_gate, load_pair
from specact.gates import Always, Gate, Never
from specact.pair import Pair

INFERENCES, BLOCK = 2000, 50


class TimedSession:
    """An ONNX Runtime session that adds up the time spent in ``run``."""

    def __init__(self, session: Any) -> None:
        self._session, self.spent = session, 0.0

    def run(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        answer = self._session.run(*arguments)
        self.spent += time.perf_counter() - start
        return answer


def main() -> None:
    print(
        f"{INFERENCES} calls of act that infer, gates in turn, {BLOCK} calls each; one thread; ms; "
        f"ratio and difference are medians over single calls; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
    )
    print(
        f"{'bundle':10} {'gate':10} {'step':11} {'calls':>6} {'act':>7} {'run':>7} {'ratio':>6} {'diff':>7} {'p10':>7}"
    )
    for name in sys.argv[1:] or ("ball", "swarm", "pusht", "kitchen"):
        bundle = load_pair(name)
        gates = {**plain_gates(), "adahi": calibrated_gate(bundle, "adahi", 0.6)}
        for (gate, step), rows in measure(bundle, gates).items():
            act, run = np.array(rows).T
            print(
                f"{name:10} {gate:10} {step:11} {len(rows):6} {np.median(act):7.3f} {np.median(run):7.3f} "
                f"{np.median(act / run):6.2f} {np.median(act - run):+7.3f} {np.quantile(act - run, 0.1):+7.3f}"
            )


def plain_gates() -> dict[str, Gate]:
    """Of steps with the draft alone, and of verified ones."""
    return {"never": Never(), "always": Always()}


def measure(
    bundle: Pair[Any], gates: dict[str, Gate], steps: int = INFERENCES
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(act, session.run) in ms of every inferring step, by gate and kind of step, on a random walk of observations."""
    rng = np.random.default_rng(0)
    sessions = []
    for network in (bundle.parts.draft._network, bundle.parts.target._network):
        sessions.append(TimedSession(network._session))
        network._session = sessions[-1]
    robots = {name: SpeculativePolicy(bundle, gate) for name, gate in gates.items()}
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    seen = {name: np.zeros(field.shape) for name, field in bundle.observation.fields.items()}
    inferences = 0
    while inferences < steps:
        walk = []
        for _ in range(BLOCK * bundle.execute):
            seen = seen | {"state": np.clip(seen["state"] + 0.1 * rng.standard_normal(seen["state"].shape), -1, 1)}
            walk.append(seen)
        for name, policy in robots.items():
            for observation in walk:
                inferring, before = policy.wants_inference, sum(session.spent for session in sessions)
                start = time.perf_counter()
                policy.act(observation)
                spent = time.perf_counter() - start
                if inferring and policy.record is not None:
                    step = "verified" if policy.record.outcome is not None else "draft only"
                    run = sum(session.spent for session in sessions) - before
                    rows.setdefault((name, step), []).append((1e3 * spent, 1e3 * run))
        inferences += BLOCK
    return rows


if __name__ == "__main__":
    main()
