"""One episode of a policy pair in a moving world: while the robot thinks and while it asks, it waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specact.execution.verdicts import WAIT, LateVerdicts
from specact.families.flash.pair import FlashPair
from specact.families.flash.verify import Round
from specact.families.load import AnyPair
from specact.gates.baseline import Always
from specact.gates.prefetch import PrefetchPredictor
from specact.gates.settings import GateSettings
from specact.lab.envs.moving import MovingWorld
from specact.lab.rollout.episode import Episode, EpisodeMetrics
from specact.lab.rollout.history import ObservationSampler, WorldClock
from specact.lab.rollout.simulated_target import Route, SimulatedTarget
from specact.lab.rollout.timed import TimedDrafter, TimedRounds
from specact.links.model import Link
from specact.policy import SpeculativePolicy
from specact.rng import Role, stream
from specact.types import Decision
from specact.verification import LocalTarget, Target, Verifier


@dataclass(frozen=True)
class Pairing:
    """A method as a composition, and what its parts take.

    Attributes:
        gate: the calibrated gate.
        link: between device and target.
        draft_s: of the draft's inference [s]; 0 where nobody waits for it, as the ungated target needs no draft.
        target_s: of the target's [s].
        verifier: made for a target, in place of the pair's own.
        ahead: whether requests leave ahead of the draft where the prefetch predictor says so.
        late_for_s: with a number, the draft's chunk runs at once and the verdict corrects the rest; see
            :class:`~specact.execution.verdicts.LateVerdicts`.
    """

    gate: GateSettings
    link: Link
    draft_s: float
    target_s: float
    verifier: Callable[[Target[Any]], Verifier] | None = None
    ahead: bool = False
    late_for_s: float | None = None


def run_pair(
    world: MovingWorld,
    pair: AnyPair,
    pairing: Pairing,
    *,
    start: int,
    seed: int,
    episode: int,
    decided: Callable[[Decision, bool], None] | None = None,
) -> tuple[Episode, Mapping[str, int]]:
    """Runs one episode to its success, its loss or its time limit.

    The algorithm is :class:`~specact.policy.SpeculativePolicy`, unchanged: only its clock is the world's. In a world at
    pace 0 with a pair that takes no time it acts as in :mod:`specact.lab.rollout.rollout`.

    Args:
        world: where.
        pair: of any family.
        pairing: how it is used.
        start: the environment's seed.
        seed, episode: address of all random streams.
        decided: told of every decision, and whether the gate wanted the step sent; where verdicts may be late, such a
            step is not sent while another one is under way.

    Returns:
        How it went, and the policy's ``counts``.
    """
    world.reset(start)
    sampler, metrics = ObservationSampler(world, pair.observation), EpisodeMetrics()
    clock = WorldClock(sampler)
    route = Route.of(pairing.link, pair.codec.dialect, stream(seed, Role.LINK, episode=episode))
    far = SimulatedTarget(pair.target, route, clock, pairing.target_s)
    gate = pairing.gate.build(pair)
    policy = SpeculativePolicy(
        pair,
        gate,
        drafter=TimedDrafter(pair.drafter, clock, pairing.draft_s),
        verifier=(pairing.verifier or pair.verifier)(far),
        prefetch=PrefetchPredictor(gate) if pairing.ahead else None,
        verdicts=WAIT if pairing.late_for_s is None else LateVerdicts(pairing.late_for_s),
        seed=seed,
        clock=clock,
    )
    wants = "transmitted" if pairing.late_for_s is None else "wanted"
    return _driven(world, sampler, metrics, policy, episode, wants, decided), policy.counts


def run_rounds(
    world: MovingWorld, pair: FlashPair, takes: Callable[[Round, float], float], *, start: int, seed: int, episode: int
) -> Episode:
    """Runs one episode of a flow in rounds, see :func:`run_pair`.

    Args:
        world, start, seed, episode: see there.
        pair: with its rounds.
        takes: see :class:`~specact.lab.rollout.timed.TimedRounds`.
    """
    world.reset(start)
    sampler, metrics = ObservationSampler(world, pair.observation), EpisodeMetrics()
    clock = WorldClock(sampler)
    verifier = TimedRounds(pair.verifier(LocalTarget(pair.target, clock)), clock, takes)
    policy = SpeculativePolicy(pair, Always(), verifier=verifier, seed=seed, clock=clock)
    return _driven(world, sampler, metrics, policy, episode, "transmitted", None)


def _driven(
    world: MovingWorld,
    sampler: ObservationSampler,
    metrics: EpisodeMetrics,
    policy: SpeculativePolicy,
    episode: int,
    wants: str,
    decided: Callable[[Decision, bool], None] | None,
) -> Episode:
    policy.reset(episode)
    window = sampler.window()
    while not world.done:
        thinking, seen_s, wanted = policy.wants_inference, world.now, policy.counts[wants]
        if thinking:
            window = sampler.window()
        action = policy.act_on(window)
        if thinking and policy.record is not None:
            metrics.inferred(policy.record.times.total, policy.record.decision.transmit)
            if decided is not None:
                decided(policy.record.decision, policy.counts[wants] > wanted)
            if not world.done:
                metrics.began(world.now - seen_s)
        sampler.play(action)
    return metrics.episode(episode, sampler)
