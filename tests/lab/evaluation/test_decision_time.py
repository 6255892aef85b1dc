"""A decision whose time is accounted on a clock of ours is the robot's."""

import numpy as np
import pytest

from specact import load_pair
from specact.families.codes.policy import CodeDrafter
from specact.gates import ActionDeviation
from specact.lab.rollout.timed import TimedGate
from specact.policy import SpeculativePolicy
from specact.types import StepRecord, VirtualClock


def test_a_gate_that_takes_time_decides_as_it_would_at_once() -> None:
    bundle, clock = load_pair("ball"), VirtualClock()
    window = bundle.parts.spec.observation.zeros()
    drafter = CodeDrafter(bundle.parts.draft, bundle.parts.tokenizer)

    def decisions(gate: ActionDeviation | TimedGate) -> list[tuple[bool, float, str]]:
        rng, found = np.random.default_rng(0), []
        for episode in range(2):
            gate.reset()
            for _ in range(10 + episode):
                step = drafter.propose(window, rng)
                decision = gate.decide(step, rng)
                gate.on_action(step.actions[0], step.actions[0])
                found.append((decision.transmit, decision.score, decision.reason))
        return found

    # Half of the free steps lie above it.
    threshold = float(np.median([score for _, score, _ in decisions(ActionDeviation(np.inf))]))
    plain = decisions(ActionDeviation(threshold, max_skips=2))
    timed = decisions(TimedGate(ActionDeviation(threshold, max_skips=2), clock, 0.003))
    assert timed == plain
    assert {"first", "max_skips", "score"} <= {reason for _, _, reason in plain}, "one of them is not tested"
    assert clock.now() == pytest.approx(21 * 0.003)


def test_a_gate_that_takes_time_hears_of_verifications() -> None:
    """Virtual time and the robot drive a gate in the same way."""

    class Told(ActionDeviation):
        told = 0

        def on_verified(self, record: StepRecord) -> None:
            self.told += 1

    bundle, clock, gate = load_pair("ball"), VirtualClock(), Told(0.0)
    policy = SpeculativePolicy(bundle, TimedGate(gate, clock, 0.003), clock=clock)
    for _ in range(3 * bundle.parts.spec.execute):
        policy.act_on(bundle.parts.spec.observation.zeros())
    assert gate.told == policy.counts["transmitted"] > 0
