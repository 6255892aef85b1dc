"""One episode of a chunk policy in a moving world."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.execution.inpainting import handover
from specact.execution.strategy import Execution
from specact.families.chunks.policy import ChunkPolicy, Inpainting
from specact.lab.envs.moving import MovingWorld
from specact.lab.rollout.episode_metrics import Episode, Tally
from specact.lab.rollout.history import NOW_S, Senses
from specact.rng import Role, StepAddress, StepStreams

Chunk = NDArray[np.float32]
Latency = Callable[[float], float]

_REMEMBERED = 10  # latencies by whose longest real-time chunking reckons, as in its paper


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
    return driver.tally.episode(episode, driver.senses)


@dataclass(frozen=True)
class _Coming:
    """A chunk that is being inferred, or waits until the one before it has been played."""

    chunk: Chunk
    seen_s: float
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
        self._world, self._policy, self._execution = world, policy, execution
        self._latency, self._streams, self._address = latency, StepStreams(), first
        self.senses, self.tally = Senses(world, policy.spec.observation), Tally()
        self._latencies: deque[float] = deque(maxlen=_REMEMBERED)
        # The chunk in play, the next of its actions and the end of those to play; nothing at first.
        self._chunk: Chunk = np.zeros((0, policy.spec.actions), np.float32)
        self._next = self._end = 0
        self._seen_s: float | None = None  # its observation's time, until its first action has begun
        self._coming: _Coming | None = None

    def step(self) -> None:
        self._take_what_came()
        if self._coming is None and self._left <= self._execution.overlap:
            self._infer()
            self._take_what_came()
        if self._left:
            self._play()
        elif self._coming is not None:
            self.senses.wait(self._coming.arrives_s - self._world.now)

    @property
    def _left(self) -> int:
        return max(self._end - self._next, 0)

    def _infer(self) -> None:
        now = self._world.now
        ahead = self._chunk[self._next : self._end] if self._execution.kind == "roll_forward" else None
        inpainting = self._handover() if self._execution.kind == "inpainting" else None
        rng = self._streams(Role.DRAFT, self._address)
        chunk = self._policy.infer(self.senses.window(ahead), rng, inpainting)
        took = self._latency(now) if callable(self._latency) else self._latency
        if not took >= 0.0:
            raise ConfigError(f"the time of an inference must be at least 0 s, got {took}; check the latency")
        self._address = self._address._replace(step=self._address.step + 1)
        self._latencies.append(took)
        self.tally.inferred(took)
        self._coming = _Coming(chunk, now, now + took)

    def _take_what_came(self) -> None:
        coming, now = self._coming, self._world.now
        if coming is None or coming.arrives_s > now + NOW_S or (self._left and not self._execution.by_time):
            return
        past = round((now - coming.seen_s) / self._world.period_s) if self._execution.by_time else 0
        self._chunk, self._next, self._end = coming.chunk, past, self._execution.execute
        self._seen_s, self._coming = coming.seen_s, None

    def _play(self) -> None:
        if self._seen_s is not None:
            self.tally.began(self._world.now - self._seen_s)
            self._seen_s = None
        action = self._chunk[self._next]
        self._next += 1
        self.senses.play(action)

    def _handover(self) -> Inpainting | None:
        """What is left of the chunk in play; the delay reckoned with is the longest of the last few."""
        rest = self._chunk[self._next :]
        if not len(rest):
            return None
        delay = ceil(max(self._latencies) / self._world.period_s - NOW_S)
        return handover(rest, min(delay, self._left), self._policy.spec.chunk)
