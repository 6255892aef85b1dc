"""One episode of a chunk policy or a policy pair in a world that does not wait, and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.execution.history import SampledHistory
from specact.execution.player import WAIT, LateVerdicts
from specact.execution.schedule import NOW_S, Execution, Schedule
from specact.execution.seams import Seams
from specact.families.chunks.policy import Chunk, ChunkPolicy
from specact.gates.settings import GateSettings
from specact.lab.envs.robot import MovingWorld
from specact.lab.rollout.timed import Route, SimulatedTarget, TimedDrafter, TimedRounds
from specact.links.model import Link
from specact.observation import ObservationSpec, Window
from specact.pair import LocalTarget, Pair, Target
from specact.policy import SpeculativePolicy
from specact.rng import Role, StepAddress, StepStreams, stream
from specact.systems.flash import Round
from specact.types import Clock, Decision

_NAN = float("nan")


def jerk(positions: NDArray[np.floating[Any]], period_s: float) -> float:
    """``mean_t ||x_{t+3} - 3 x_{t+2} + 3 x_{t+1} - x_t|| / dt^3`` (TISED, equation 32, derived).

    Of ``positions [T, D]``, one row per period dt > 0 [s], in the unit of length per s^3; NaN for fewer than four rows.
    """
    if len(positions) < 4:
        return _NAN
    return float(np.linalg.norm(np.diff(positions, n=3, axis=0), axis=1).mean() / period_s**3)


def path_length(positions: NDArray[np.floating[Any]]) -> float:
    """``sum_t ||x_{t+1} - x_t||`` of positions ``[T, D]``, in their unit; 0 for fewer than two rows."""
    return float(np.linalg.norm(np.diff(positions, axis=0), axis=1).sum())


@dataclass(frozen=True)
class Episode:
    """The result of one episode in a moving world; a success ended it.

    Attributes:
        score: the best one reached. ``task_s``: time of success, else of the end; ``limit_s``: the time-out [s].
        chunks: N, inferences with an executed action. ``inference_s``: mean latency, link included [s].
        stall_s: total time without an action to execute [s], with the first inference, which no overlap can hide.
        age_s: mean age of the observation when the first action of its chunk ran [s]; overlap makes it older.
        jerk, path: of the end effector, see :func:`jerk` and :func:`path_length`; NaN where the task defines none.
        sent: share of inferences sent to the target; NaN without a gate.
        seam_step, seam_jerk: of the actions where one chunk follows another, see
            :class:`~specact.execution.seams.Seams`.
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
    sent: float = _NAN
    seam_step: float = _NAN
    seam_jerk: float = _NAN


class TimedRobot(Clock):
    """A robot in a moving world, and its clock: it is observed once per control period, acts, waits, and is measured.

    A control period is an action, or ``period_s`` of waiting; the world is at the start of an episode. ``waited_s`` is
    the total waiting time [s]; ``latencies``, ``ages`` and ``sent`` are of every inference its latency [s], of every
    chunk the age of its observation at its first action [s], and with a gate, whether the target was queried.
    """

    def __init__(self, world: MovingWorld, spec: ObservationSpec) -> None:
        self.world, self._length = world, spec.history
        self._history = SampledHistory(spec, world.period_s, world.task.roll_forward)
        self._sampled_s, self.waited_s = -1.0, 0.0
        self.latencies, self.ages, self.sent = list[float](), list[float](), list[bool]()
        self._seams = Seams(world.period_s)

    def window(self, ahead: NDArray[np.float32] | None = None) -> Window:
        """The window that ends now, or after the remaining actions ``[r, A]``, by the task's ``roll_forward``.

        Raises:
            ObservationError: if the world's observations do not fit the policy.
        """
        self._sample()
        return self._history.window(ahead)

    def play(self, action: NDArray[np.float32], seam: bool = False) -> None:
        """Executes an action ``[A]`` for one control period; at a seam it is the first of its chunk."""
        self._sample_history()
        self._seams.play(action, seam)
        self.world.advance(self.world.period_s, action)
        self._history.play(action)

    def now(self) -> float:
        return self.world.now

    def sleep(self, seconds: float) -> None:
        # Without an action, at most to the end of the episode.
        before = self.world.now
        while seconds > 0.0 and not self.world.done:
            self._sample_history()
            step_s = min(self.world.period_s, seconds)
            self.world.advance(step_s, None)
            seconds -= step_s
        self.waited_s += self.world.now - before

    def episode(self, number: int) -> Episode:
        """The result, once the episode is over."""
        world = self.world
        moves = world.task.effector is not None
        return Episode(
            number, world.success, world.score, world.now, world.limit_s, len(self.ages), _mean(self.latencies),
            self.waited_s, _mean(self.ages), jerk(world.motion(), world.period_s) if moves else _NAN,
            path_length(world.motion()) if moves else _NAN, _mean(self.sent),
            self._seams.largest_step[True], self._seams.jerk[True],
        )  # fmt: skip

    def _sample_history(self) -> None:
        if self._length > 1:
            self._sample()

    def _sample(self) -> None:
        """Samples the observation, once per time."""
        if self._sampled_s != self.world.now:
            self._sampled_s = self.world.now
            self._history.sample(self.world.now, self.world.observe())


def _mean(values: list[float] | list[bool]) -> float:
    return sum(values) / len(values) if values else _NAN


def run_episode(
    world: MovingWorld, policy: ChunkPolicy, execution: Execution, latency: Callable[[float], float] | float,
    *, start: int, seed: int, episode: int,
) -> Episode:  # fmt: skip
    """Runs one episode of a chunk policy, whose computation time does not count, to its success or end.

    ``latency`` is the time of an inference in seconds of the world: constant, or a function of its start time;
    ``start`` the environment's seed; ``seed`` and ``episode`` address the policy's random streams.

    Raises:
        ConfigError: if policy, task and execution do not go together, or a latency is negative.
    """
    execution.check(policy.spec, inpaints=policy.inpaints, rolls_forward=world.task.roll_forward is not None)
    world.reset(start)
    robot, streams = TimedRobot(world, policy.spec.observation), StepStreams()
    address = StepAddress(seed, 0, episode, 0)
    schedule = Schedule(execution, world.period_s, (policy.spec.chunk, policy.spec.actions))
    # The chunk under way, its latency and its arrival time [s].
    pending: tuple[Chunk, float, float] | None = None

    def receive() -> None:
        nonlocal pending
        if pending is not None and pending[2] <= world.now + NOW_S:
            schedule.arrive(*pending[:2])
            pending = None
        schedule.advance(world.now)

    while not world.done:
        receive()
        if schedule.wants:
            chunk = policy.infer(robot.window(schedule.ahead), streams(Role.DRAFT, address), schedule.inpainting())
            time_s = latency(world.now) if callable(latency) else latency
            if not time_s >= 0.0:
                raise ConfigError(f"the time of an inference must be at least 0 s, got {time_s}; check the latency")
            address = address.following
            robot.latencies.append(time_s)
            schedule.ask(world.now)
            pending = chunk, time_s, world.now + time_s
            receive()
        played = schedule.play()
        if played is not None:
            if played.first:
                robot.ages.append(world.now - played.seen_s)
            robot.play(played.action, played.first)
        elif pending is not None:
            robot.sleep(pending[2] - world.now)
    return robot.episode(episode)


@dataclass(frozen=True)
class Pairing:
    """A method with its calibrated gate, and the times of its parts [s]; without ``link`` the target is on the device.

    The ungated target needs no draft, of 0 s. With ``late_for_s`` the draft's chunk runs at once and the late verdict
    corrects the rest; for a flow's rounds see :class:`~specact.lab.rollout.timed.TimedRounds`.
    """

    gate: GateSettings
    link: Link | None = None
    draft_s: float = 0.0
    target_s: float = 0.0
    late_for_s: float | None = None
    round_s: Callable[[Round], float] | None = None


def run_pair(
    world: MovingWorld, pair: Pair[Any], pairing: Pairing, *, start: int, seed: int, episode: int,
    on_decision: Callable[[Decision, bool], None] | None = None,
) -> tuple[Episode, Mapping[str, int]]:  # fmt: skip
    """Runs one episode of a pair, by the algorithm of a robot with the world's clock; also returns its ``counts``.

    The robot waits during inferences and requests. With zero latency it acts as in :mod:`specact.lab.rollout.rollout`.
    ``on_decision`` is called with every decision, and whether the gate wanted the step sent; with late verdicts such a
    step is not sent while another request is in flight.
    """
    world.reset(start)
    robot = TimedRobot(world, pair.observation)
    target: Target[Any] = LocalTarget(pair.target(), robot)
    if pairing.link is not None:
        route = Route.of(pairing.link, pair.exchange.contract, stream(seed, Role.LINK, episode=episode))
        target = SimulatedTarget(pair.target(), route, robot, pairing.target_s)
    verifier = pair.verifier(target)
    policy = SpeculativePolicy(
        pair, pairing.gate.build(pair), seed=seed, clock=robot,
        drafter=TimedDrafter(pair.drafter(), robot, pairing.draft_s),
        verifier=verifier if pairing.round_s is None else TimedRounds(verifier, robot, pairing.round_s),
        verdicts=WAIT if pairing.late_for_s is None else LateVerdicts(pairing.late_for_s),
    )  # fmt: skip
    wants = "transmitted" if pairing.late_for_s is None else "wanted"
    policy.reset(episode)
    window = robot.window()
    while not world.done:
        inferring, seen_s, wanted = policy.wants_inference, world.now, policy.counts[wants]
        if inferring:
            window = robot.window()
        action = policy.act_on(window)
        if inferring and policy.record is not None:
            robot.latencies.append(policy.record.times.total)
            robot.sent.append(policy.record.decision.transmit)
            if on_decision is not None:
                on_decision(policy.record.decision, policy.counts[wants] > wanted)
            if not world.done:
                robot.ages.append(world.now - seen_s)
        robot.play(action, policy.seam)
    return robot.episode(episode), policy.counts
