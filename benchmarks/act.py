"""What SpeculativePolicy.act costs beside the policies: sampling, gate, verification, decoding, records.

Run: python benchmarks/act.py [BUNDLE ...]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

from specact import SpeculativePolicy, calibrated_gate, load_bundle
from specact.families.codes.bundle import Bundle
from specact.families.codes.spec import CodePolicy
from specact.families.codes.values import CodeDistribution
from specact.families.codes.verify import CodeDrafter, SpeculativeVerifier
from specact.gates import Always, Gate, Never
from specact.observation import Window
from specact.rng import StepAddress
from specact.verification import LocalTarget

INFERENCES = 2000


class Timed:
    """A policy that adds up the time spent in it."""

    def __init__(self, policy: CodePolicy) -> None:
        self.policy, self.spent = policy, 0.0

    def infer(self, window: Window) -> CodeDistribution:
        start = time.perf_counter()
        answer = self.policy.infer(window)
        self.spent += time.perf_counter() - start
        return answer

    def answer(self, window: Window, address: StepAddress) -> CodeDistribution:
        return self.infer(window)

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        return [self.infer(window) for window in windows]


def main() -> None:
    print(f"{INFERENCES} calls of act that infer, interleaved over the gates; one thread; ms, median and p99")
    print(f"{'bundle':10} {'gate':10} {'act':>7} {'inference':>10} {'other':>7} {'other p99':>10}")
    for name in sys.argv[1:] or ("ball", "swarm", "pusht", "kitchen"):
        bundle = load_bundle(name)
        gates = {"never": Never(), "deviation": calibrated_gate(bundle, "deviation", 0.6), "always": Always()}
        for gate, rows in measure(bundle, gates).items():
            act, inference = np.array(rows).T
            other = act - inference
            print(
                f"{name:10} {gate:10} {statistics.median(act):7.3f} {statistics.median(inference):10.3f} "
                f"{statistics.median(other):7.3f} {np.quantile(other, 0.99):10.3f}"
            )


def measure(bundle: Bundle, gates: dict[str, Gate]) -> dict[str, list[tuple[float, float]]]:
    """(act, inference) in ms for every inferring step of each gate, on a random walk of observations."""
    rng = np.random.default_rng(0)
    robots = {}
    for name, gate in gates.items():
        draft, target = Timed(bundle.draft), Timed(bundle.target)
        policy = SpeculativePolicy(
            bundle,
            gate,
            drafter=CodeDrafter(draft, bundle.tokenizer),
            verifier=SpeculativeVerifier(LocalTarget(target), bundle.tokenizer),
        )
        robots[name] = (policy, draft, target)
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in gates}
    seen = {name: np.zeros(field.shape) for name, field in bundle.observation.fields.items()}
    while len(rows["never"]) < INFERENCES:
        seen["state"] = np.clip(seen["state"] + 0.1 * rng.standard_normal(seen["state"].shape), -1, 1)
        for name, (policy, draft, target) in robots.items():
            inferring, before = policy.wants_inference, draft.spent + target.spent
            start = time.perf_counter()
            policy.act(seen)
            spent = time.perf_counter() - start
            if inferring:
                rows[name].append((1e3 * spent, 1e3 * (draft.spent + target.spent - before)))
    return rows


if __name__ == "__main__":
    main()
