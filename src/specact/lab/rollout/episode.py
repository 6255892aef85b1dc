"""One episode of a chunk policy in a moving world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specact.errors import ConfigError
from specact.execution.schedule import NOW_S, Schedule
from specact.execution.strategy import Execution
from specact.families.chunks.policy import Chunk, ChunkPolicy
from specact.lab.envs.moving import MovingWorld
from specact.lab.rollout.episode_metrics import Episode, EpisodeMetrics
from specact.lab.rollout.history import ObservationSampler
from specact.rng import Role, StepAddress, StepStreams

Latency = Callable[[float], float]


def run_episode(
    world: MovingWorld,
    policy: ChunkPolicy,
    execution: Execution,
    latency: Latency | float,
    *,
    start: int,
    seed: int,
    episode: int,
) -> Episode:
    """Runs one episode to its success, its loss or its time limit.

    Args:
        world: where.
        policy: drives; its own time does not count.
        execution: how its chunks are played.
        latency: what an inference takes, in seconds of the world: always the same, or given the time at which it
            starts.
        start: the environment's seed.
        seed, episode: address of the policy's random streams.

    Raises:
        ConfigError: if policy, task and execution do not go together, or a latency is negative.
    """
    execution.check(policy, rolls_forward=world.task.roll_forward is not None)
    world.reset(start)
    driver = _Driver(world, policy, execution, latency, StepAddress(seed, 0, episode, 0))
    while not world.done:
        driver.step()
    return driver.metrics.episode(episode, driver.sampler)


@dataclass(frozen=True)
class _Coming:
    """A chunk that is being inferred."""

    chunk: Chunk
    took_s: float
    arrives_s: float


class _Driver:
    """The robot's loop: what is due at this moment, then an action or a wait."""

    def __init__(
        self,
        world: MovingWorld,
        policy: ChunkPolicy,
        execution: Execution,
        latency: Latency | float,
        first: StepAddress,
    ) -> None:
        self._world, self._policy, self._latency = world, policy, latency
        self._streams, self._address = StepStreams(), first
        self._schedule = Schedule(execution, world.period_s, (policy.spec.chunk, policy.spec.actions))
        self.sampler, self.metrics = ObservationSampler(world, policy.spec.observation), EpisodeMetrics()
        self._coming: _Coming | None = None

    def step(self) -> None:
        self._take_what_came()
        if self._schedule.wants:
            self._infer()
            self._take_what_came()
        played = self._schedule.play()
        if played is not None:
            if played.first:
                self.metrics.began(self._world.now - played.seen_s)
            self.sampler.play(played.action)
        elif self._coming is not None:
            self.sampler.wait(self._coming.arrives_s - self._world.now)

    def _infer(self) -> None:
        now, schedule = self._world.now, self._schedule
        rng = self._streams(Role.DRAFT, self._address)
        chunk = self._policy.infer(self.sampler.window(schedule.ahead), rng, schedule.inpainting)
        took = self._latency(now) if callable(self._latency) else self._latency
        if not took >= 0.0:
            raise ConfigError(f"the time of an inference must be at least 0 s, got {took}; check the latency")
        self._address = self._address._replace(step=self._address.step + 1)
        self.metrics.inferred(took)
        schedule.ask(now)
        self._coming = _Coming(chunk, took, now + took)

    def _take_what_came(self) -> None:
        coming, now = self._coming, self._world.now
        if coming is not None and coming.arrives_s <= now + NOW_S:
            self._schedule.arrive(coming.chunk, coming.took_s)
            self._coming = None
        self._schedule.advance(now)
