"""How long a gate's decision takes on this machine."""

from __future__ import annotations

import time

import numpy as np

from specact.families.load import AnyPair
from specact.gates.gate import Gate
from specact.rng import Role, stream


def measure_decision(gate: Gate, bundle: AnyPair, repeats: int = 200) -> float:
    """Median seconds of one decision, a learned gate's head included, on an observation of zeros, after a warm-up.

    Args:
        gate: its memory is that of another robot afterwards.
        bundle: whose draft makes the proposals.
        repeats: how many decisions the median is of.
    """
    rng, window = stream(0, Role.GATE), bundle.observation.zeros()
    drafter = bundle.drafter
    gate.reset()
    times = []
    for _ in range(repeats + 10):
        proposal = drafter.propose(window, rng)
        start = time.perf_counter()
        gate.decide(proposal, rng)
        times.append(time.perf_counter() - start)
        gate.update(proposal.actions[0], proposal.actions[0])
    return float(np.median(times[10:]))
