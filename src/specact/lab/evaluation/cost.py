"""The cost of a method: its parameter counts, and the times that its parts are accounted with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from specact.bundle.manifest import MANIFEST, read_manifest
from specact.families.codes.pair import CodeParts
from specact.gates.gate import Gate
from specact.lab.rollout.methods import Method
from specact.lab.rollout.rollout import Shard
from specact.pair import Pair
from specact.rng import Role, stream

Key = TypeVar("Key")


@dataclass(frozen=True)
class Timing:
    """Times that inferences are accounted with [ms]; those of the device are multiplied by the evaluation's kappa."""

    draft_ms: float  # one inference of the draft, on the device
    head_ms: float  # one inference of the learned gate's head, on the device; 0 where no method evaluates it
    target_ms: float  # one inference of the target, at the server
    target_on_device_ms: float
    gate_ms: dict[str, float]  # one decision of each gate, on the device; of a learned gate with its head

    def target_of(self, method: Method) -> float:
        """Time of one inference of the target, on the method's device or server [ms]."""
        return self.target_on_device_ms if method.on_device else self.target_ms


def median_ms(calls: Mapping[Key, Callable[[], object]], repeats: int = 200, warm_up: int = 10) -> dict[Key, float]:
    """Median milliseconds of calls that alternate, after a warm-up: the machine's other work hits all of them."""
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(repeats + warm_up):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - start)
    return {key: 1e3 * float(np.median(seconds[warm_up:])) for key, seconds in times.items()}


def decision(gate: Gate, pair: Pair[Any]) -> Callable[[], object]:
    """A decision of a gate on a proposal for an observation of zeros, a learned gate's head included."""
    rng = stream(0, Role.GATE)
    proposal = pair.drafter().propose(pair.observation.zeros(), rng)
    gate.reset()
    gate.on_action(proposal.actions[0], proposal.actions[0])
    return lambda: gate.decide(proposal, rng)


def timed(shard: Shard, timing: Timing, **settings: Any) -> Shard:
    """The shard with accounted times, and further settings of its own."""
    method = shard.method
    proposal_ms = timing.draft_ms + (timing.head_ms if method.proposes == "head" else 0.0)
    return replace(
        shard, draft_s=proposal_ms / 1e3 if method.waits_for_draft else 0.0,
        gate_s=timing.gate_ms[method.gate] / 1e3, target_s=timing.target_of(method) / 1e3, **settings,
    )  # fmt: skip


def method_cost(method: Method, pair: Pair[Any], timing: Timing) -> dict[str, float]:
    """Parameters, by the manifest, and time of each network; 0 for a network that the method does not evaluate."""
    used = {"draft": method.waits_for_draft, "head": method.uses_head, "target": method.gate != "never"}
    # Parameters of third-party policies are unknown.
    known = {} if pair.path is None or not (pair.path / MANIFEST).exists() else read_manifest(pair.path).parameters
    parts = ["draft", "target"] if isinstance(pair.parts, CodeParts) else []
    parts += ["head"] if method.uses_head else []
    sizes = {f"{part}_parameters": known.get(part, 0) if used[part] else 0 for part in parts}
    return {
        "head_parameters": 0,
        **sizes,
        "draft_ms": timing.draft_ms if used["draft"] else 0.0,
        "gate_ms": timing.gate_ms[method.gate],
        "head_ms": timing.head_ms if used["head"] else 0.0,
        "target_ms": timing.target_of(method) if used["target"] else 0.0,
    }
