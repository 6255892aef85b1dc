"""Runs one episode of a policy pair in a moving world; the robot waits during inferences and requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specact.execution.player import WAIT, LateVerdicts
from specact.gates.baseline import Always
from specact.gates.settings import GateSettings
from specact.lab.envs.moving import MovingWorld
from specact.lab.rollout.episode import Episode, EpisodeMetrics
from specact.lab.rollout.history import ObservationSampler, WorldClock
from specact.lab.rollout.simulated_target import Route, SimulatedTarget
from specact.lab.rollout.timed import TimedDrafter, TimedRounds
from specact.links.model import Link
from specact.pair import LocalTarget, Pair, Target, Verifier
from specact.policy import SpeculativePolicy
from specact.rng import Role, stream
from specact.systems.flash import Round
from specact.types import Decision


@dataclass(frozen=True)
class Pairing:
    """A method as a composition, and the times of its parts.

    Attributes:
        gate: the calibrated gate.
        link: between device and target.
        draft_s: time of the draft's inference [s]; 0 for the ungated target, which needs no draft.
        target_s: time of the target's [s].
        verifier: factory that replaces the pair's own verifier.
        late_for_s: with a number, the draft's chunk runs at once and the late verdict corrects the rest; see
            :class:`~specact.execution.player.LateVerdicts`.
    """

    gate: GateSettings
    link: Link
    draft_s: float
    target_s: float
    verifier: Callable[[Target[Any]], Verifier] | None = None
    late_for_s: float | None = None


def run_pair(
    world: MovingWorld,
    pair: Pair[Any],
    pairing: Pairing,
    *,
    start: int,
    seed: int,
    episode: int,
    on_decision: Callable[[Decision, bool], None] | None = None,
) -> tuple[Episode, Mapping[str, int]]:
    """Runs one episode to its success, its failure or its time limit.

    The algorithm is :class:`~specact.policy.SpeculativePolicy` with the world's clock. In a world at pace 0 with zero
    latency it acts as in :mod:`specact.lab.rollout.rollout`.

    Args:
        world: the environment.
        pair: of any family.
        pairing: gate, link and times.
        start: the environment's seed.
        seed, episode: address of all random streams.
        on_decision: called with every decision, and whether the gate wanted the step sent; with late verdicts such a
            step is not sent while another request is in flight.

    Returns:
        The result, and the policy's ``counts``.
    """
    world.reset(start)
    sampler, metrics = ObservationSampler(world, pair.observation), EpisodeMetrics()
    clock = WorldClock(sampler)
    route = Route.of(pairing.link, pair.exchange.contract, stream(seed, Role.LINK, episode=episode))
    remote = SimulatedTarget(pair.target(), route, clock, pairing.target_s)
    gate = pairing.gate.build(pair)
    policy = SpeculativePolicy(
        pair,
        gate,
        drafter=TimedDrafter(pair.drafter(), clock, pairing.draft_s),
        verifier=(pairing.verifier or pair.verifier)(remote),
        verdicts=WAIT if pairing.late_for_s is None else LateVerdicts(pairing.late_for_s),
        seed=seed,
        clock=clock,
    )
    wants = "transmitted" if pairing.late_for_s is None else "wanted"
    return _run(world, sampler, metrics, policy, episode, wants, on_decision), policy.counts


def run_rounds(
    world: MovingWorld,
    pair: Pair[Any],
    duration_s: Callable[[Round, float], float],
    *,
    start: int,
    seed: int,
    episode: int,
) -> Episode:
    """Runs one episode of a flow in rounds, see :func:`run_pair`.

    Args:
        world, start, seed, episode: see there.
        pair: with its rounds.
        duration_s: see :class:`~specact.lab.rollout.timed.TimedRounds`.
    """
    world.reset(start)
    sampler, metrics = ObservationSampler(world, pair.observation), EpisodeMetrics()
    clock = WorldClock(sampler)
    verifier = TimedRounds(pair.verifier(LocalTarget(pair.target(), clock)), clock, duration_s)
    policy = SpeculativePolicy(pair, Always(), verifier=verifier, seed=seed, clock=clock)
    return _run(world, sampler, metrics, policy, episode, "transmitted", None)


def _run(
    world: MovingWorld,
    sampler: ObservationSampler,
    metrics: EpisodeMetrics,
    policy: SpeculativePolicy,
    episode: int,
    wants: str,
    on_decision: Callable[[Decision, bool], None] | None,
) -> Episode:
    policy.reset(episode)
    window = sampler.window()
    while not world.done:
        inferring, seen_s, wanted = policy.wants_inference, world.now, policy.counts[wants]
        if inferring:
            window = sampler.window()
        action = policy.act_on(window)
        if inferring and policy.record is not None:
            metrics.record_inference(policy.record.times.total, policy.record.decision.transmit)
            if on_decision is not None:
                on_decision(policy.record.decision, policy.counts[wants] > wanted)
            if not world.done:
                metrics.record_chunk_start(world.now - seen_s)
        sampler.play(action)
    return metrics.episode(episode, sampler)
