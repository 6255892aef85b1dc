"""The robots of a batch: each has a history, random streams, a gate and a connection of its own."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lerobot_policy_specact.configuration_specact import SpecactConfig
from specact.errors import ConfigError, MissError, ObservationError
from specact.execution.player import WAIT, LateVerdicts
from specact.execution.schedule import Execution
from specact.families.chunks.pair import ChunkParts, PairSpec
from specact.families.chunks.remote import RemotePolicy, connect, target_endpoint
from specact.families.chunks.sources import try_out
from specact.gates.calibration import deciding_gate
from specact.gates.controller import RateBudget
from specact.gates.settings import load_gate
from specact.imports import make_object
from specact.load import load_pair, load_policy
from specact.observation import ObservationSpec
from specact.pair import Pair
from specact.policy import SpeculativePolicy
from specact.remote.client import Client
from specact.remote.endpoint import tls_context
from specact.remote.target import remote_verifier
from specact.robot.chunks import ChunkRunner, Inference, InferenceThread
from specact.robot.loop import Acting
from specact.safety import Fallback
from specact.types import Clock, Miss, VirtualClock

_TERMS = {"pusht": "lerobot_policy_specact.pusht:PushT"}
_PATIENCE_MS = 1000.0
_CONNECT_S = 10.0
_MOST_THREADS = 64
_STATE = "state"
_ALONE = ("synchronous", "append", "aligned", "rtc")

_logger = logging.getLogger(__name__)


class Terms(Protocol):
    """Puts an environment's observations and actions into those of the policies."""

    def observe(self, seen: Mapping[str, Any]) -> Mapping[str, Any]:
        """The observation for the policies."""
        ...

    def act(self, action: NDArray[np.float32], seen: Mapping[str, Any]) -> NDArray[np.float32]:
        """The environment's action, given the policies' ``[A]`` and what the environment showed last."""
        ...


class AsSeen:
    """Both have the same terms; but LeRobot's robots show all their numbers as one array."""

    def __init__(self, spec: ObservationSpec) -> None:
        arrays = {name: entry for name, entry in sorted(spec.fields.items()) if not entry.is_image}
        self._widths = {name: math.prod(entry.shape) for name, entry in arrays.items()}

    def observe(self, seen: Mapping[str, Any]) -> Mapping[str, Any]:
        """Divides ``state`` among the arrays that are needed, in the order of their names, where they are missing."""
        state, widths = seen.get(_STATE), self._widths
        if state is None or widths.keys() <= seen.keys() or len(state) != sum(widths.values()):
            return seen
        parts = np.split(state, np.cumsum(list(widths.values()))[:-1])
        return {**seen, **dict(zip(widths, parts, strict=True))}

    def act(self, action: NDArray[np.float32], seen: Mapping[str, Any]) -> NDArray[np.float32]:
        """The action as it is."""
        return action


@dataclass
class Robot:
    """One robot of a batch.

    Attributes:
        acting: chooses its actions.
        counts: what it did so far.
        patience_s: how long a first action is waited for [s].
        clock, period_s: a control period [s] passes with every action, where the clock is not the machine's.
        terms: of the environment.
        seen: the last observation that could be used.
        warned: causes of misses of which the log has said something.
    """

    acting: Acting
    counts: Mapping[str, int]
    patience_s: float
    clock: Clock
    period_s: float
    terms: Terms
    seen: Mapping[str, Any] | None = None
    warned: set[str] = field(default_factory=set)

    def act(self, seen: Mapping[str, Any]) -> NDArray[np.float32]:
        """The environment's action ``[A]``.

        Raises:
            ObservationError: if there is no usable observation before the first action of an episode.
            MissError: if the server gave no answer before it, and nobody said what makes the robot stand still.
        """
        try:
            observation = self.terms.observe(seen)
            action = self.acting.act(observation)
            if action is None and self.acting.wait(self.patience_s):
                action = self.acting.act(observation)
            self.seen = seen
        except ObservationError as error:
            action = self.acting.safety.hold(error)
            self._warn(error.cause, f"an observation cannot be used: {error}")
        cause = _missed(self.acting)
        if cause is not None:
            self._warn(cause, f"the server gave no usable answer ({cause})")
        if isinstance(self.clock, VirtualClock):
            self.clock.sleep(self.period_s)
        if action is None or self.seen is None:
            raise MissError(
                f"the server gave no usable answer to the first request of the episode ({cause}), so that there is no "
                "action; see whether it runs, give a longer --policy.deadline_ms, or --policy.stop_action, what makes "
                "this robot stand still",
                cause or "deadline",
            )
        return self.terms.act(action, self.seen)

    def _warn(self, cause: str, what: str) -> None:
        if cause not in self.warned:
            self.warned.add(cause)
            _logger.warning("%s; the fallback acts, and further misses like it are only counted", what)


def _missed(acting: Acting) -> str | None:
    """Why the last inference came to nothing, or None."""
    if isinstance(acting, ChunkRunner):
        answer = None if acting.ended is None else acting.ended.answer
        return answer.cause if isinstance(answer, Miss) else None
    return None if acting.record is None else acting.record.miss


class Robots:
    """As many robots as a batch has rows. Whatever is wrong is found when the first is made.

    Args:
        config: the options.

    Raises:
        SpecactError: if the options cannot be used, or the server cannot be reached.
    """

    def __init__(self, config: SpecactConfig) -> None:
        self._stack, self._robots, self._episode = ExitStack(), list[Robot](), 0
        # LeRobot does not say when a policy is not needed any more.
        weakref.finalize(self, _end, self._stack, self._robots)
        self._make, self._pool = _maker(config, self._stack), ThreadPoolExecutor(_MOST_THREADS, "specact robot")
        self._add(1)

    def reset(self) -> None:
        """Starts an episode of every robot."""
        _tell(self._robots)
        self._episode += 1
        for robot in self._robots:
            robot.acting.reset(self._episode)

    def act(self, seen: Sequence[Mapping[str, Any]]) -> NDArray[np.float32]:
        """An action for each robot, ``[B, A]``; they wait for the server together."""
        self._add(len(seen))
        acts = [robot.act for robot in self._robots[: len(seen)]]
        # One alone needs no thread.
        found = [acts[0](seen[0])] if len(seen) == 1 else list(self._pool.map(lambda act, row: act(row), acts, seen))
        return np.stack(found)

    def _add(self, count: int) -> None:
        while len(self._robots) < count:
            robot = self._make(len(self._robots))
            robot.acting.reset(self._episode)
            self._robots.append(robot)


def _end(stack: ExitStack, robots: list[Robot]) -> None:
    _tell(robots)
    stack.close()


def _tell(robots: list[Robot]) -> None:
    for number, robot in enumerate(robots):
        if robot.counts:
            counted = ", ".join(f"{name} {count}" for name, count in robot.counts.items())
            stopped = "; it stopped" if robot.acting.safety.stopped else ""
            _logger.info("robot %d so far: %s%s", number, counted, stopped)


def _maker(config: SpecactConfig, stack: ExitStack) -> Callable[[int], Robot]:
    """What makes the robot of a row; the stack closes its connection.

    Raises:
        SpecactError: if the options cannot be used.
    """
    if config.deadline_ms is not None and not 0.0 < config.deadline_ms < math.inf:
        raise ConfigError(f"--policy.deadline_ms must be positive and finite, got {config.deadline_ms}")
    still = None if config.stop_action is None else tuple(config.stop_action)
    fallback = Fallback(config.fallback, config.max_consecutive_misses, still)  # type: ignore[arg-type]
    if config.bundle is not None:
        _refuse(config, "a bundle, which says it itself", ("n_action_steps", "accept_within"))
        loaded = load_pair(config.bundle, draft=config.draft)

        def of_bundle(row: int) -> Robot:
            return _with_draft(config, fallback, loaded, row, _client(config, stack, loaded, row))

        return of_bundle
    if config.server is None:
        raise ConfigError(
            "--policy.type=specact needs policies: --policy.bundle=NAME, a pair, with --policy.server=ws://HOST:PORT "
            "where its target is on a server; or --policy.server alone for any chunk policy on a server, with "
            "--policy.draft=lerobot:PATH@HZ in front of it or without one"
        )
    if config.draft is None:
        _refuse(config, "a policy on a server without a draft", ("gate", "rate", "hold", "accept_within"))
        return lambda row: _without_draft(config, stack, fallback, row)
    if load_gate(config.gate).calibrated and not config.hold:
        raise ConfigError(
            f"the gate {config.gate!r} needs a calibration, and policies that are named one by one have none; hold the "
            "rate online with --policy.hold=true, choose --policy.gate=always or random, or make a pair of them with "
            "specact pair, calibrate it, and give it as --policy.bundle"
        )
    small = load_policy(config.draft)
    try_out(small)

    def of_two(row: int) -> Robot:
        remote = _connect(config, stack, row)
        if small.units is None:
            raise ConfigError(
                f"{config.draft} does not say the range of its actions, in which distances are measured; choose a "
                "draft that does, such as a LeRobot policy with the statistics of its dataset"
            )
        most = min(small.policy.spec.chunk, remote.spec.chunk)
        execute = most if config.n_action_steps is None else config.n_action_steps
        spec = PairSpec(remote.spec, execute, config.accept_within)
        pair = ChunkParts(small.name, small.policy, small.units, spec, None).pair()
        return _with_draft(config, fallback, pair, row, remote.client)

    return of_two


def _refuse(config: SpecactConfig, what: str, names: Sequence[str]) -> None:
    """Refuses options that would change nothing."""
    usual = {option.name: option.default for option in fields(config)}
    for name in names:
        if getattr(config, name) != usual[name]:
            raise ConfigError(f"--policy.{name} is not for {what}; leave it out")


def _with_draft(config: SpecactConfig, fallback: Fallback, pair: Pair[Any], row: int, client: Client | None) -> Robot:
    """A robot with a draft and a gate; without a client the target runs here."""
    late = config.execution == "late"
    if not late and config.execution != "synchronous":
        raise ConfigError(f"a pair of policies runs synchronous or late, got --policy.execution={config.execution}")
    period_s = 1.0 / pair.rate_hz
    deadline_ms = 1e3 * period_s * (pair.execute if late else 1) if config.deadline_ms is None else config.deadline_ms
    policy = SpeculativePolicy(
        pair,
        deciding_gate(pair, config.gate, config.rate, RateBudget(config.rate) if config.hold else None),
        verifier=None if client is None else remote_verifier(client, pair, deadline_ms),
        fallback=fallback,
        verdicts=LateVerdicts(math.inf) if late else WAIT,
        seed=config.seed,
        robot=row,
    )
    if client is not None:
        client.report = policy.counts
    return Robot(policy, policy.counts, 0.0, Clock(), period_s, _terms(config, pair.observation))


def _without_draft(config: SpecactConfig, stack: ExitStack, fallback: Fallback, row: int) -> Robot:
    """A robot that asks for whole chunks."""
    if config.execution not in _ALONE:
        raise ConfigError(
            f"--policy.execution must be one of {', '.join(_ALONE)} for a policy on a server, got {config.execution!r}"
        )
    remote, waits = _connect(config, stack, row), config.execution == "synchronous"
    execute = remote.spec.chunk if config.n_action_steps is None else config.n_action_steps
    execution = Execution(config.execution, execute, 0 if waits else execute // 2)  # type: ignore[arg-type]
    inference = Inference(remote) if waits else stack.enter_context(InferenceThread(remote))
    # Where the robot waits for its chunks, a control step is a period, however long it takes.
    clock: Clock = VirtualClock() if waits else Clock()
    runner = ChunkRunner(inference, execution, fallback=fallback, seed=config.seed, robot=row, clock=clock)
    terms = _terms(config, remote.spec.observation)
    return Robot(runner, runner.counts, _patience_ms(config) / 1e3, clock, 1.0 / remote.spec.rate_hz, terms)


def _patience_ms(config: SpecactConfig) -> float:
    return _PATIENCE_MS if config.deadline_ms is None else config.deadline_ms


def _client(config: SpecactConfig, stack: ExitStack, pair: Pair[Any], row: int) -> Client | None:
    """A connection to the server of a pair's target, or None where there is none."""
    server, token = config.server, os.environ.get("SPECACT_TOKEN") or None
    if server is None:
        return None
    contract, tls = pair.exchange.contract, tls_context(None if config.ca is None else Path(config.ca))
    endpoint = target_endpoint(server, token, tls, contract)
    client = stack.enter_context(Client(endpoint, contract, _named(config, row), jpeg_quality=config.jpeg_quality))
    client.connect(_CONNECT_S)
    return client


def _connect(config: SpecactConfig, stack: ExitStack, row: int) -> RemotePolicy:
    """A connection to a server of any chunk policy, which says itself what it serves."""
    assert config.server is not None, "looked at before"
    found = connect(
        config.server, deadline_ms=_patience_ms(config), token=os.environ.get("SPECACT_TOKEN") or None, ca=config.ca,
        robot=_named(config, row), timeout=_CONNECT_S, jpeg_quality=config.jpeg_quality, seed=config.seed,
    )  # fmt: skip
    return stack.enter_context(found)


def _named(config: SpecactConfig, row: int) -> str:
    return f"{config.robot_name}-{row}"


def _terms(config: SpecactConfig, spec: ObservationSpec) -> Terms:
    if config.terms is None:
        return AsSeen(spec)
    found: Terms = make_object(_TERMS.get(config.terms, config.terms), "terms", ("observe", "act"))
    return found
