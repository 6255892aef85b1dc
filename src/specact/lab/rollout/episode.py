"""One episode of a chunk policy in a world that does not wait, and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specact.errors import ConfigError
from specact.execution.schedule import NOW_S, Schedule
from specact.execution.strategy import Execution
from specact.families.chunks.policy import Chunk, ChunkPolicy
from specact.lab.envs.moving import MovingWorld
from specact.lab.rollout.history import ObservationSampler
from specact.rng import Role, StepAddress, StepStreams
from specact.tised.motion import jerk, path_length

_NAN = float("nan")


@dataclass(frozen=True)
class Episode:
    """How one episode in a moving world went.

    Attributes:
        episode: its number.
        success: whether it succeeded; it ended there.
        score: the best score reached until then, see :class:`~specact.lab.envs.task.Task`.
        task_s: when it succeeded, else when it ended [s].
        limit_s: the time-out [s].
        chunks: N, inferences of whose actions at least one ran.
        inference_s: mean latency of the inferences, link included [s].
        stall_s: total time the robot had no action to play [s], the first inference's included: that one no overlap
            can hide.
        age_s: mean age of the observation when the first action of its chunk ran [s]. It is not the stall: overlap
            shortens the stall and makes observations older.
        jerk, path: of what the robot moves, at every control period, see :mod:`specact.tised.motion`; NaN where the
            task does not say what that is.
        transmission_rate: share of inferences sent to the target; NaN where there is no gate.
    """

    episode: int
    success: bool
    score: float
    task_s: float
    limit_s: float
    chunks: int
    inference_s: float
    stall_s: float
    age_s: float
    jerk: float
    path: float
    transmission_rate: float = _NAN


class EpisodeMetrics:
    """Counts what :class:`Episode` tells."""

    def __init__(self) -> None:
        self._latencies: list[float] = []
        self._ages: list[float] = []
        self._sent: list[bool] = []

    def inferred(self, latency_s: float, sent: bool | None = None) -> None:
        """An inference: what it took [s], and whether the target was asked, where there is a gate."""
        self._latencies.append(latency_s)
        if sent is not None:
            self._sent.append(sent)

    def began(self, age_s: float) -> None:
        """The first action of a chunk begins to run, on an observation so old [s]."""
        self._ages.append(age_s)

    def episode(self, number: int, sampler: ObservationSampler) -> Episode:
        """The episode as a whole, once it is over."""
        world = sampler.world
        moves = world.task.effector is not None
        return Episode(
            episode=number,
            success=world.success,
            score=world.score,
            task_s=world.now,
            limit_s=world.limit_s,
            chunks=len(self._ages),
            inference_s=_mean(self._latencies),
            stall_s=sampler.waited_s,
            age_s=_mean(self._ages),
            jerk=jerk(world.motion(), world.period_s) if moves else _NAN,
            path=path_length(world.motion()) if moves else _NAN,
            transmission_rate=_mean(self._sent),
        )


def _mean(values: list[float] | list[bool]) -> float:
    return sum(values) / len(values) if values else _NAN


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
        # The chunk that is being inferred, how long that takes and when it arrives [s].
        self._coming: tuple[Chunk, float, float] | None = None

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
            self.sampler.wait(self._coming[2] - self._world.now)

    def _infer(self) -> None:
        now, schedule = self._world.now, self._schedule
        rng = self._streams(Role.DRAFT, self._address)
        chunk = self._policy.infer(self.sampler.window(schedule.ahead), rng, schedule.inpainting)
        took = self._latency(now) if callable(self._latency) else self._latency
        if not took >= 0.0:
            raise ConfigError(f"the time of an inference must be at least 0 s, got {took}; check the latency")
        self._address = self._address.following
        self.metrics.inferred(took)
        schedule.ask(now)
        self._coming = chunk, took, now + took

    def _take_what_came(self) -> None:
        now = self._world.now
        if self._coming is not None and self._coming[2] <= now + NOW_S:
            self._schedule.arrive(*self._coming[:2])
            self._coming = None
        self._schedule.advance(now)
