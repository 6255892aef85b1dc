"""Runs one episode of a chunk policy in a world that does not wait, and measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.execution.schedule import NOW_S, Execution, Schedule
from specact.families.chunks.policy import Chunk, ChunkPolicy
from specact.lab.envs.moving import MovingWorld
from specact.lab.rollout.history import ObservationSampler
from specact.rng import Role, StepAddress, StepStreams

_NAN = float("nan")


def jerk(positions: NDArray[np.floating[Any]], period_s: float) -> float:
    """``mean_t ||x_{t+3} - 3 x_{t+2} + 3 x_{t+1} - x_t|| / dt^3`` (TISED, equation 32, derived).

    Args:
        positions: ``[T, D]``, one row per period, in the task's unit of length.
        period_s: dt > 0, time between two rows [s].

    Returns:
        The jerk in the unit of length per s^3; NaN for fewer than four rows, which have no third difference.
    """
    if len(positions) < 4:
        return _NAN
    return float(np.linalg.norm(np.diff(positions, n=3, axis=0), axis=1).mean() / period_s**3)


def path_length(positions: NDArray[np.floating[Any]]) -> float:
    """``sum_t ||x_{t+1} - x_t||`` of positions ``[T, D]``, in their unit; 0 for fewer than two rows."""
    return float(np.linalg.norm(np.diff(positions, axis=0), axis=1).sum())


@dataclass(frozen=True)
class Episode:
    """The result of one episode in a moving world.

    Attributes:
        episode: its number.
        success: whether it succeeded; it ended there.
        score: the best score reached until then, see :class:`~specact.lab.envs.task.Task`.
        task_s: time of success, else of the end [s].
        limit_s: the time-out [s].
        chunks: N, inferences with at least one executed action.
        inference_s: mean latency of the inferences, link included [s].
        stall_s: total time without an action to execute [s], including the first inference, which no overlap can hide.
        age_s: mean age of the observation when the first action of its chunk ran [s]. Overlap shortens the stall but
            makes observations older.
        jerk, path: of the end effector, at every control period, see :func:`jerk` and :func:`path_length`; NaN where
            the task does not define one.
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
    """Accumulates the figures of an :class:`Episode`."""

    def __init__(self) -> None:
        self._latencies: list[float] = []
        self._ages: list[float] = []
        self._sent: list[bool] = []

    def record_inference(self, latency_s: float, sent: bool | None = None) -> None:
        """Records an inference: its latency [s], and with a gate whether the target was queried."""
        self._latencies.append(latency_s)
        if sent is not None:
            self._sent.append(sent)

    def record_chunk_start(self, age_s: float) -> None:
        """Records the start of a chunk's first action, and the age of its observation [s]."""
        self._ages.append(age_s)

    def episode(self, number: int, sampler: ObservationSampler) -> Episode:
        """The result, once the episode is over."""
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
    """Runs one episode to its success, its failure or its time limit.

    Args:
        world: the environment.
        policy: its own computation time does not count.
        execution: how its chunks are executed.
        latency: time of an inference in seconds of the world: constant, or a function of its start time.
        start: the environment's seed.
        seed, episode: address of the policy's random streams.

    Raises:
        ConfigError: if policy, task and execution do not go together, or a latency is negative.
    """
    execution.check(policy.spec, inpaints=policy.inpaints, rolls_forward=world.task.roll_forward is not None)
    world.reset(start)
    driver = _Driver(world, policy, execution, latency, StepAddress(seed, 0, episode, 0))
    while not world.done:
        driver.step()
    return driver.metrics.episode(episode, driver.sampler)


class _Driver:
    """The robot's control loop: handles due events, then acts or waits."""

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
        # The pending chunk, its latency and its arrival time [s].
        self._pending: tuple[Chunk, float, float] | None = None

    def step(self) -> None:
        self._receive()
        if self._schedule.wants:
            self._infer()
            self._receive()
        played = self._schedule.play()
        if played is not None:
            if played.first:
                self.metrics.record_chunk_start(self._world.now - played.seen_s)
            self.sampler.play(played.action)
        elif self._pending is not None:
            self.sampler.wait(self._pending[2] - self._world.now)

    def _infer(self) -> None:
        now, schedule = self._world.now, self._schedule
        rng = self._streams(Role.DRAFT, self._address)
        chunk = self._policy.infer(self.sampler.window(schedule.ahead), rng, schedule.inpainting)
        took = self._latency(now) if callable(self._latency) else self._latency
        if not took >= 0.0:
            raise ConfigError(f"the time of an inference must be at least 0 s, got {took}; check the latency")
        self._address = self._address.following
        self.metrics.record_inference(took)
        schedule.ask(now)
        self._pending = chunk, took, now + took

    def _receive(self) -> None:
        now = self._world.now
        if self._pending is not None and self._pending[2] <= now + NOW_S:
            self._schedule.arrive(*self._pending[:2])
            self._pending = None
        self._schedule.advance(now)
