"""Latency of a step over a real link: methods, interleaved step by step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.families.codes.bundle import Bundle
from specact.families.codes.spec import CodePolicy
from specact.families.codes.values import CodeDistribution
from specact.families.codes.verify import CodeDrafter, TargetSampler
from specact.gates import Always, Gate, Never
from specact.gates.calibration import threshold_for_rate
from specact.gates.settings import GateChoices, GateSettings
from specact.lab.envs import env_of, load_task
from specact.lab.processes import linked, serving
from specact.lab.rollout.rollout import episode_seed
from specact.lab.rollout.steps import STAGES
from specact.lab.statistics import mean_interval
from specact.links.link import load_link, round_trip
from specact.observation import Window
from specact.policy import SpeculativePolicy
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.target import RemoteTarget, remote_verifier
from specact.rng import Role, stream
from specact.types import StepRecord
from specact.verification import Verifier

METHODS = ("target", "hybrid", "adahi")
WAYS = ("draft", *METHODS)
_DEADLINE_MS, _WARM_UP, _ROUNDS = 2_000.0, 10, 6
BLOCK = 25  # steps whose mean is one value of an interval


class SlowDraft:
    """Emulates a slower device: delays the draft's answers to ``took_s`` after the call.

    Args:
        policy: the draft.
        took_s: time of an inference [s]; no shorter than on this machine.
    """

    def __init__(self, policy: CodePolicy, took_s: float) -> None:
        self._policy, self._took_s = policy, took_s

    def infer(self, window: Window) -> CodeDistribution:
        until = time.monotonic() + self._took_s
        answer = self._policy.infer(window)
        time.sleep(max(0.0, until - time.monotonic()))
        return answer

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        return [self.infer(window) for window in windows]


def measure_latency(
    pair: Bundle, server_bundle: str, link: str, steps: int, rate: float, draft_ms: float | None, seed: int,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """Times every way of :data:`WAYS` on the same observations, in random order within each step.

    Args:
        pair: the bundle on the device.
        server_bundle: path of what the server serves, with the same tokenizer.
        link: see :func:`~specact.links.link.load_link`.
        steps: inferences per way.
        rate: ADAHI's transmission rate; its threshold is calibrated on the same observations.
        draft_ms: emulated time of the draft on a slower device [ms]; None for this machine's own.
        seed: random seed.
        progress: called with (steps done, total).

    Returns:
        ``draft_ms``, ``target_ms``, ``link_ms`` (the terms of the bounds) and per way: ``transmission_rate``,
        ``missed``, ``total_ms`` of each inference, ``stages_ms`` (means), ``mean_ms`` with its 95 % interval over
        blocks of steps, ``bound_ms`` (draft + rate x (link + target)), ``over_bound`` (median over blocks).
    """
    seen = list(islice(observations(pair, seed), _WARM_UP + steps))
    gate = calibrated_on(pair, seen, rate, seed)
    with ExitStack() as stack:
        server = stack.enter_context(serving(server_bundle))
        relay = stack.enter_context(linked(server.port, link, seed))
        draft = pair.draft if draft_ms is None else SlowDraft(pair.draft, draft_ms / 1e3)
        policies = {way: _policy(way, pair, draft, gate, relay.port, seed, stack) for way in WAYS}
        records: dict[str, list[StepRecord]] = {way: [] for way in WAYS}
        order = stream(seed, Role.ENVIRONMENT, robot=1)
        for step, (episode, observation) in enumerate(seen, start=-_WARM_UP):
            for index in order.permutation(len(WAYS)):
                record = _step(policies[WAYS[index]], episode, observation)
                if step >= 0:
                    records[WAYS[index]].append(record)
            progress(max(0, step + 1), steps)
    costs = _costs(pair, records, link, seed)
    ways = {way: _summary(way, records[way], costs) for way in WAYS}
    return costs | {"steps": steps, "link": link, "rate": rate, "seed": seed, "ways": ways}


def measure_deadline(
    pair: Bundle, link: str, steps: int, deadline_ms: float, rate_hz: float, jpeg_quality: int, seed: int,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """Deadline misses of verified steps over a link: frames raw and as JPEG, back to back and at a control rate.

    Each inference is verified over the WebSocket. The ways alternate in blocks of steps.

    Args:
        pair: the bundle on both sides.
        link: see :func:`~specact.links.link.load_link`.
        steps: inferences of each way, at each pace.
        deadline_ms: of a step's request, from sending [ms].
        rate_hz: inferences per second of the paced ways; the others run back to back.
        jpeg_quality: of the frames, where the target has cameras.
        seed: random seed.
        progress: called with (steps done, total).

    Returns:
        The arguments, and under ``ways`` per encoding and pace: ``missed`` by cause, ``quantiles_ms`` of the whole
        step, draft included, and the mean ``encode_ms``.
    """
    seen = list(islice(observations(pair, seed), _WARM_UP + steps))
    qualities = {"raw": None} | ({"jpeg": jpeg_quality} if pair.spec.target.images else {})
    ways = [(frames, pace) for pace in (0.0, rate_hz) for frames in qualities]
    records: dict[tuple[str, float], list[StepRecord]] = {way: [] for way in ways}
    with ExitStack() as stack:
        server = stack.enter_context(serving(pair.path))
        relay = stack.enter_context(linked(server.port, link, seed))
        policies = {}
        for frames, quality in qualities.items():
            endpoint = Endpoint("ws", "127.0.0.1", relay.port)
            client = stack.enter_context(Client(endpoint, pair.exchange.contract, frames, jpeg_quality=quality))
            client.connect(30.0)
            policies[frames] = SpeculativePolicy(
                pair, Always(), verifier=remote_verifier(client, pair, deadline_ms), seed=seed
            )
            for episode, observation in seen[:_WARM_UP]:
                _step(policies[frames], episode, observation)
        for start in range(_WARM_UP, len(seen), BLOCK):
            for frames, pace in ways:
                due = time.monotonic()
                for episode, observation in seen[start : start + BLOCK]:
                    due += 1.0 / pace if pace else 0.0
                    time.sleep(max(0.0, due - time.monotonic()))
                    records[frames, pace].append(_step(policies[frames], episode, observation))
            progress(min(start + BLOCK, len(seen)) - _WARM_UP, steps)
    return {
        "link": link, "steps": steps, "deadline_ms": deadline_ms, "rate_hz": rate_hz, "jpeg_quality": jpeg_quality,
        "seed": seed,
        "ways": [
            {
                "frames": frames,
                "rate_hz": pace or None,
                "missed": Counter(record.miss for record in measured if record.miss is not None),
                "quantiles_ms": _quantiles(np.array([1e3 * record.times.total for record in measured])),
                "encode_ms": 1e3 * float(np.mean([record.times.offload.encode for record in measured])),
            }
            for (frames, pace), measured in records.items()
        ],
    }  # fmt: skip


def observations(pair: Bundle, seed: int) -> Iterator[tuple[int, Any]]:
    """The observations at inferences, with their episodes, in rollouts of the target."""
    task, spec = load_task(env_of(pair, None), pair.observation), pair.spec
    env = task.make()
    policy = SpeculativePolicy(pair, Always(), seed=seed)
    episode = 0
    while True:
        policy.reset(episode)
        observation, _ = env.reset(seed=episode_seed(seed, episode, task))
        for step in range(task.max_steps):
            if step % spec.execute == 0:
                yield episode, observation
            observation, _, terminated, truncated, _ = env.step(policy.act(observation))
            if terminated or truncated:
                break
        episode += 1


def _policy(
    way: str, pair: Bundle, draft: CodePolicy, settings: GateSettings, port: int, seed: int, stack: ExitStack
) -> SpeculativePolicy:
    gate: Gate = Never() if way == "draft" else Always()
    if way == "adahi":
        gate = settings.build(pair)
    verifier: Verifier | None = None
    if way != "draft":
        client = stack.enter_context(Client(Endpoint("ws", "127.0.0.1", port), pair.exchange.contract, way))
        client.connect(30.0)
        if way == "target":
            verifier = TargetSampler(RemoteTarget(client, pair.exchange, _DEADLINE_MS), pair.tokenizer)
        else:
            verifier = remote_verifier(client, pair, _DEADLINE_MS)
    drafter = CodeDrafter(draft, pair.tokenizer)
    return SpeculativePolicy(pair, gate, drafter=drafter, verifier=verifier, seed=seed)


def calibrated_on(pair: Bundle, seen: Sequence[tuple[int, Any]], rate: float, seed: int) -> GateSettings:
    """The bundle's deviation gate with its threshold calibrated for this rate on these observations, without a link."""
    settings = GateChoices().settings("deviation", pair)
    settings = replace(settings, threshold=-np.inf)
    for _ in range(_ROUNDS):
        policy = SpeculativePolicy(pair, settings.build(pair), seed=seed)
        decisions = [_step(policy, episode, observation).decision for episode, observation in seen]
        free = np.array([decision.score for decision in decisions if decision.reason in ("score", "tie")])
        wanted = (rate * len(decisions) - (len(decisions) - len(free))) / len(free)
        threshold, tie = threshold_for_rate(free, float(np.clip(wanted, 0.0, 1.0)))
        settings = replace(settings, threshold=threshold, tie_probability=tie)
    return settings


def _step(policy: SpeculativePolicy, episode: int, observation: Any) -> StepRecord:
    """One inference; the rest of its chunk is executed without waiting."""
    if policy.record is None or policy.record.address.episode != episode:
        policy.reset(episode)
    policy.act(observation)
    record = policy.record
    assert record is not None
    while not policy.wants_inference:
        policy.act(observation)
    return record


def _costs(pair: Bundle, records: dict[str, list[StepRecord]], link: str, seed: int) -> dict[str, float]:
    """The terms of the bound: the inference times measured in this run, and the modelled link.

    The remainder is overhead: messages, processes, sampling, records. Times of the same run are comparable on a
    machine under other load.
    """
    target_s = [record.times.offload.target for way in records.values() for record in way if record.decision.transmit]
    drafts = [record.times.draft for record in records[WAYS[0]]]
    model, rng = load_link(link), stream(seed, Role.LINK, robot=1)
    trips = [round_trip(model, *pair.exchange.contract.array_bytes, float(at), rng) for at in range(1000)]
    return {
        "draft_ms": 1e3 * float(np.mean(drafts)),
        "target_ms": 1e3 * float(np.mean(target_s)),
        "link_ms": 1e3 * float(np.mean(trips)),
    }


def _summary(way: str, records: Sequence[StepRecord], costs: dict[str, float]) -> dict[str, Any]:
    # The ungated target needs no draft, so its time excludes the draft's.
    needs_draft = way != "target"
    total = np.array([1e3 * (r.times.total - (0.0 if needs_draft else r.times.draft)) for r in records])
    sent = float(np.mean([record.decision.transmit for record in records]))
    bound = (costs["draft_ms"] if needs_draft else 0.0) + sent * (costs["link_ms"] + costs["target_ms"])
    blocks = _blocks(total)
    mean = mean_interval(blocks)
    return {
        "method": way,
        "transmission_rate": sent,
        "missed": sum(record.miss is not None for record in records),
        "mean_ms": {"mean": mean.mean, "low": mean.low, "high": mean.high},
        "quantiles_ms": _quantiles(total),
        "bound_ms": bound,
        "over_bound": float(np.median(blocks)) / bound - 1.0,
        "stages_ms": {stage: 1e3 * float(np.mean([_stage(r, stage) for r in records])) for stage in STAGES},
        "total_ms": total.tolist(),
    }


def _quantiles(total: NDArray[np.float64]) -> dict[str, float]:
    return dict(zip(("p50", "p95", "p99"), np.quantile(total, (0.5, 0.95, 0.99)).tolist(), strict=True))


def _blocks(total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over blocks of consecutive steps, which are unimodal where gated methods are bimodal."""
    blocks = len(total) // BLOCK
    return np.asarray(total[: blocks * BLOCK].reshape(-1, BLOCK).mean(axis=1) if blocks > 1 else total)


def _stage(record: StepRecord, stage: str) -> float:
    times = record.times if stage in ("draft", "gate", "finish") else record.times.offload
    return float(getattr(times, stage))
