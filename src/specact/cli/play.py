"""``specact play`` drives a robot with one policy alone, here or on a server, while it infers the next chunk."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from specact.cli.driving import Plan, Session, about
from specact.cli.options import Access, ConfigFile, Flat, Maybe, Options
from specact.cli.output import remark
from specact.errors import ConfigError
from specact.execution.schedule import Execution, Kind
from specact.families.chunks.policy import ChunkSpec
from specact.interrupts import Interrupts
from specact.records import Count, Positive, WholeNumber
from specact.remote.client import Client
from specact.robot.chunks import ActionRange, ChunkRunner, ChunkSource, Inference, InferenceThread, LocalSource
from specact.robot.loop import Journal
from specact.types import ActionUnits

if TYPE_CHECKING:
    from specact.families.chunks.sources import LoadedPolicy


@dataclass(frozen=True)
class Play(Options):
    """Drive a robot with one policy alone, which infers the next chunk meanwhile. More: --help-all."""

    # a server (ws://, wss:// or openpi:ws://HOST:PORT#FILE.toml), a bundle, BUNDLE#target, a .toml file,
    # lerobot:PATH@HZ, MODULE:NAME
    policy: Positional[str]
    # synchronous idles meanwhile; append plays chunk after chunk; aligned by time;
    # roll_forward predicts the robot; rtc continues the chunk
    execution: Kind = "synchronous"
    execute_actions: Maybe[Count] = None  # actions of a chunk that are played; half if not given
    overlap_actions: Maybe[WholeNumber] = None  # as few are left when the next inference begins
    idle: Literal["hold_last", "stop_action", "nothing"] = "hold_last"  # between chunks, until an action is too old
    deadline_ms: Positive = 1000.0  # how long an inference may take
    steps: Maybe[Count] = None  # Euler steps of a flow policy here; 10 if not given
    session: Flat[Session] = field(default_factory=Session)
    config: ConfigFile = None  # file of options; what is typed goes first

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and "://" in self.policy:
            raise ConfigError("--steps is for a policy here; those of a server's policy are told specact serve")
        if "://" not in self.policy and (self.session.access != Access() or self.session.tuning.jpeg_quality):
            raise ConfigError(
                "--token-file, --ca and --jpeg-quality are for a server; leave them out for a policy here"
            )

    def run(self) -> None:
        with Interrupts() as interrupts, ExitStack() as stack:
            self.session.drive(self._plan(stack), interrupts)

    def _plan(self, stack: ExitStack) -> Plan:
        """The policy, in this process or on a server; the stack closes the client, and ends the inferences."""
        source, policy, client = self._source(stack)
        spec, units, tuning = source.spec, policy.units, self.session.tuning
        execution = self._execution(spec)
        period_s, deadline_s = 1.0 / (tuning.rate_hz or spec.rate_hz), self.deadline_ms / 1e3
        usual_age_s = max(deadline_s, execution.overlap * period_s) + (execution.execute + 1) * period_s
        fallback = self.session.fallback_within(usual_age_s, units)
        # A simulated world that stands still meanwhile would make a step of its own for each inference.
        waits = self.execution == "synchronous" and self.session.robot is None and not tuning.live
        inference = Inference(source) if waits else stack.enter_context(InferenceThread(source))

        def make(robot: Any) -> ChunkRunner:
            return ChunkRunner(
                inference, execution, period_s=period_s, roll_forward=getattr(robot, "roll_forward", None),
                action_range=_action_range(robot, units), idle=self.idle, fallback=fallback,
                # The client itself enforces the deadline of a server.
                deadline_s=deadline_s if client is None else math.inf, seed=tuning.seed,
            )  # fmt: skip

        def summarise(journal: Journal, runner: ChunkRunner) -> dict[str, Any]:
            link = None if client is None else dict(client.counts)
            return journal.summary() | runner.summary() | {"link": link}

        described = about(policy.name, policy.fingerprint, units)
        return Plan(policy.env, spec.observation, period_s, make, summarise, described, client=client)

    def _execution(self, spec: ChunkSpec) -> Execution:
        execute = self.execute_actions or max(1, spec.chunk // 2)
        usual = 0 if self.execution == "synchronous" else execute // 2
        return Execution(self.execution, execute, usual if self.overlap_actions is None else self.overlap_actions)

    def _requests_hz(self, spec: ChunkSpec) -> float:
        """How many requests a second are expected: what is left of a chunk is not played where the next replaces it."""
        execution, rate_hz = self._execution(spec), self.session.tuning.rate_hz or spec.rate_hz
        return rate_hz / max(1, execution.execute - (execution.overlap if execution.by_time else 0))

    def _source(self, stack: ExitStack) -> tuple[ChunkSource, LoadedPolicy, Client | None]:
        """The source of chunks, its policy, and the client if that is on a server."""
        from specact.families.chunks.flow import FlowPolicy
        from specact.families.chunks.remote import connect
        from specact.families.chunks.sources import LoadedPolicy, try_out
        from specact.load import load_policy

        if "://" not in self.policy:
            loaded = load_policy(self.policy, steps=self.steps or 10)
            if self.steps is not None and not isinstance(loaded.policy, FlowPolicy):
                raise ConfigError(f"{self.policy} is no flow policy and takes no steps; leave out --steps")
            try_out(loaded)
            return LocalSource(loaded.policy), loaded, None
        access, tuning = self.session.access, self.session.tuning
        remote = stack.enter_context(connect(
            self.policy, deadline_ms=self.deadline_ms, token=access.token, ca=access.ca, robot=tuning.name,
            timeout=10.0, jpeg_quality=tuning.jpeg_quality, seed=tuning.seed, rate_hz=self._requests_hz,
        ))  # fmt: skip
        return remote, LoadedPolicy(remote.name, remote, remote.units, remote.fingerprint), remote.client


def _action_range(robot: Any, units: ActionUnits | None) -> ActionRange | None:
    """What the robot and the policy allow; it is said where neither of them knows."""
    ranges = [] if units is None else [ActionRange(units.centre - units.scale, units.centre + units.scale)]
    if getattr(robot, "action_range", None) is not None:
        ranges.append(ActionRange(*robot.action_range))
    if not ranges:
        unknown = "actions are not limited, as their range is unknown"
        remark(f"{unknown}: give the robot action_range = (low, high)", warn=True)
        return None
    return ranges[0].narrowed(ranges[-1])
