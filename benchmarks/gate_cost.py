"""The time of a learned gate relative to its draft: medians of interleaved calls on one core.

Run: OMP_NUM_THREADS=1 python benchmarks/gate_cost.py (scripts/make-pretrained swarm brings back its second pair)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from specact import load_pair
from specact.families.codes.pair import codes_of
from specact.gates.settings import gate_settings
from specact.rng import Role, stream

CALLS = 3000


def main() -> None:
    for name in ("ball", "swarm", "pusht"):
        bundle = load_pair(name)
        rng, window = stream(0, Role.GATE), bundle.observation.zeros()
        draft, drafter = codes_of(bundle, "the gates' cost").draft, bundle.drafter()
        gates = {gate: gate_settings(gate, bundle).build(bundle) for gate in ("learned", "learned_action")}
        times: dict[str, list[float]] = {"draft": [], **{gate: [] for gate in gates}}
        for _ in range(CALLS):
            timed(times["draft"], draft.infer, window)  # alone, without sampling and decoding
            step = drafter.propose(window, rng)
            for gate, built in gates.items():
                timed(times[gate], built.score, step, rng)
        medians = {part: 1e3 * float(np.median(values)) for part, values in times.items()}
        shares = ", ".join(f"{gate} {medians[gate]:.3f} ms ({medians[gate] / medians['draft']:.0%})" for gate in gates)
        print(f"{name}: draft {medians['draft']:.3f} ms; {shares}")


def timed(times: list[float], call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a call, and appends its duration to the times."""
    start = time.perf_counter()
    result = call(*arguments)
    times.append(time.perf_counter() - start)
    return result


if __name__ == "__main__":
    main()
