"""The cost of a method: its parameter counts, and the times that its parts are accounted with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specact.bundle.manifest import MANIFEST, read_manifest
from specact.families.codes.head import HeadDraft, load_head
from specact.families.codes.pair import CodeParts
from specact.families.codes.policy import CodePolicy
from specact.families.distance import load_distance_head
from specact.gates.gate import Gate
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.rollout.families import decoded_by
from specact.lab.rollout.methods import Method
from specact.lab.rollout.rollout import Shard
from specact.observation import ObservationSpec, Window
from specact.pair import Pair
from specact.rng import Role, StepAddress, stream
from specact.verification import LocalTarget

# Gates without a decision, and oracles, which query the target: their time is not meaningful.
_WITHOUT_TIME = ("never", "always", "oracle", "oracle_action")


@dataclass(frozen=True)
class Timing:
    """Times that inferences are accounted with [ms]; those of the device are multiplied by the evaluation's kappa.

    Attributes:
        draft_ms: one inference of the draft, on the device.
        head_ms: one inference of the learned gate's head, on the device; 0 where no method evaluates it.
        target_ms: one inference of the target, at the server.
        target_on_device_ms: the same on the device.
        gate_ms: one decision of each gate, on the device; of a learned gate with its head.
    """

    draft_ms: float
    head_ms: float
    target_ms: float
    target_on_device_ms: float
    gate_ms: dict[str, float]

    def draft_s(self, method: Method) -> float:
        """Time of one proposal of a method [s]."""
        proposal_ms = self.draft_ms + (self.head_ms if method.proposes == "head" else 0.0)
        return proposal_ms / 1e3 if method.waits_for_draft else 0.0

    def gate_s(self, method: Method) -> float:
        """Time of one gate decision of a method [s]."""
        return self.gate_ms[method.gate] / 1e3

    def target_s(self, method: Method) -> float:
        """Time of one inference of the target, on the method's device or server [s]."""
        return (self.target_on_device_ms if method.on_device else self.target_ms) / 1e3


def measure(evaluation: Evaluation, pair: Pair[Any]) -> Timing:
    """The times of an evaluation: those that its settings give, and measured ones for the others."""
    methods = evaluation.resolved
    draft_ms, head_ms, target_ms = evaluation.draft_ms, evaluation.head_ms, evaluation.target_ms
    if draft_ms is None:
        draft_ms = 1e3 * measure_proposal(pair)
    if target_ms is None:
        target_ms = 1e3 * measure_answer(pair)
    if not any(method.uses_head for method in methods):
        head_ms = 0.0
    elif head_ms is None:
        head_ms = 1e3 * measure_head(pair)
    gate_ms = {}
    for gate, method in sorted({method.gate: method for method in methods}.items()):
        if gate in _WITHOUT_TIME:
            gate_ms[gate] = 0.0
        elif evaluation.gate_ms is not None:
            gate_ms[gate] = evaluation.kappa * evaluation.gate_ms
        else:
            decoded = decoded_by(method, pair)
            built = evaluation.gates.settings(gate, decoded).build(decoded)
            gate_ms[gate] = evaluation.kappa * 1e3 * measure_decision(built, decoded)
    return Timing(
        evaluation.kappa * draft_ms, evaluation.kappa * head_ms, target_ms, evaluation.kappa * target_ms, gate_ms
    )


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


def measure_head(pair: Pair[Any]) -> float:
    """Median seconds of one inference of the learned gate's head on this machine."""
    if isinstance(pair.parts, CodeParts):
        both = measure_inference(HeadDraft(pair.parts.draft, load_head(pair)), pair.parts.spec.draft)
        return max(0.0, both - measure_inference(pair.parts.draft, pair.parts.spec.draft))
    head, drafted = load_distance_head(pair), np.zeros((pair.execute, len(pair.units.centre)), np.float32)
    return measure_call(lambda window: head.estimate(window, drafted), pair.observation.zeros())


def measure_proposal(pair: Pair[Any]) -> float:
    """Median seconds of one inference of the draft on this machine."""
    if isinstance(pair.parts, CodeParts):
        return measure_inference(pair.parts.draft, pair.parts.spec.draft)
    drafter, rng = pair.drafter(), np.random.default_rng(0)
    return measure_call(lambda window: drafter.propose(window, rng), pair.observation.zeros())


def measure_answer(pair: Pair[Any]) -> float:
    """Median seconds of one inference of the target on this machine."""
    if isinstance(pair.parts, CodeParts):
        return measure_inference(pair.parts.target, pair.parts.spec.target)
    verify = verification(pair)
    return measure_call(lambda _: verify(), pair.observation.zeros())


def verification(pair: Pair[Any]) -> Callable[[], object]:
    """The verification of one proposal by the target in this process, on an observation of zeros.

    The targets of some families only prepare when they answer, and compute when the proposal is judged.

    Raises:
        BundleError: if the pair's target is only on a server.
    """
    proposal = pair.drafter().propose(pair.observation.zeros(), np.random.default_rng(0))
    verifier, address = pair.verifier(LocalTarget(pair.target())), StepAddress(0, 0, 0, 0)
    return lambda: verifier.submit(proposal, address).result()


def timed(shard: Shard, timing: Timing, **settings: Any) -> Shard:
    """The shard with accounted times, and further settings of its own."""
    method = shard.method
    times = {"draft_s": timing.draft_s(method), "gate_s": timing.gate_s(method), "target_s": timing.target_s(method)}
    return replace(shard, **settings | times)


def read_timing(manifest: dict[str, Any]) -> Timing:
    """The times in a run folder's manifest."""
    return Timing(**manifest["timing"])


def method_cost(method: Method, bundle: Pair[Any], timing: Timing) -> dict[str, float]:
    """Size and time of the networks that a method evaluates; 0 for those that it does not.

    Returns:
        ``draft_parameters``, ``head_parameters``, ``target_parameters``: as their manifest says; ``draft_ms``,
        ``head_ms``, ``target_ms``: of one inference; ``gate_ms``: of one decision, of a learned gate with its head.
    """
    used = {"draft": method.waits_for_draft, "head": method.uses_head, "target": method.gate != "never"}
    # Parameters of third-party policies are unknown.
    known = (
        {} if bundle.path is None or not (bundle.path / MANIFEST).exists() else read_manifest(bundle.path).parameters
    )
    parts = ["draft", "target"] if isinstance(bundle.parts, CodeParts) else []
    parts += ["head"] if method.uses_head else []
    sizes = {f"{part}_parameters": known.get(part, 0) if used[part] else 0 for part in parts}
    return {
        "head_parameters": 0,
        **sizes,
        "draft_ms": timing.draft_ms if used["draft"] else 0.0,
        "gate_ms": timing.gate_ms[method.gate],
        "head_ms": timing.head_ms if used["head"] else 0.0,
        "target_ms": 1e3 * timing.target_s(method) if used["target"] else 0.0,
    }


def measure_decision(gate: Gate, bundle: Pair[Any], repeats: int = 200) -> float:
    """Median seconds of one decision, a learned gate's head included, on an observation of zeros, after a warm-up.

    Args:
        gate: its state is changed.
        bundle: its draft makes the proposals.
        repeats: number of timed decisions.
    """
    rng, window = stream(0, Role.GATE), bundle.observation.zeros()
    drafter = bundle.drafter()
    gate.reset()
    times = []
    for _ in range(repeats + 10):
        proposal = drafter.propose(window, rng)
        start = time.perf_counter()
        gate.decide(proposal, rng)
        times.append(time.perf_counter() - start)
        gate.on_action(proposal.actions[0], proposal.actions[0])
    return float(np.median(times[10:]))
