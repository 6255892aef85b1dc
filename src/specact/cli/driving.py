"""Drives a real or a simulated robot for ``specact run`` and ``specact play``, and prints a summary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from specact import __version__
from specact.cli.options import Access, Flat, Maybe, Options, Rare
from specact.cli.output import command_line, lines_of, print_result, progress_bars, progress_lines, remark
from specact.errors import ConfigError
from specact.imports import load_object, make_object
from specact.interrupts import Interrupts
from specact.observation import ObservationSpec
from specact.records import Count, Positive, PositiveShare, RateHz, Seed
from specact.remote.client import Client
from specact.robot.loop import Acting, Journal, Robot, Tick, run_loop, stop_after
from specact.safety import Fallback
from specact.types import ActionUnits, Clock

# Exit status of a run that was stopped by misses.
STOPPED = 3


@dataclass(frozen=True)
class Plan:
    """The policies that drive a robot, and how.

    Attributes:
        env: the environment that they were trained for; empty if unknown.
        make: returns the source of actions for a robot.
        summarise: from the journal of the control loop and the source of actions, as plain values.
        about: metadata for a recording.
        note: called with every tick.
        client: of the server, if there is one.
    """

    env: str
    observation: ObservationSpec
    period_s: float
    make: Callable[[Any], Acting]
    summarise: Callable[[Journal, Any], dict[str, Any]]
    about: dict[str, Any]
    note: Callable[[Tick], None] = lambda tick: None
    client: Client | None = None


@dataclass(frozen=True)
class Tuning(Options):
    """What few robots need."""

    rate_hz: Maybe[RateHz] = None  # control rate [Hz]; the policies' own if not given
    live: bool = False  # the simulated world does not wait for actions, as a real one does not: it has its own process
    # share of one core for everything except the simulated world, as on a slower device; needs Linux and permission to
    # create control groups
    device_share: Maybe[PositiveShare] = None
    seed: Seed = 0  # random seed
    name: str = "robot"  # name of this robot on the server's status page
    jpeg_quality: Maybe[Annotated[int, Meta(ge=1, le=95)]] = None  # of camera frames as JPEG; raw if not given


@dataclass(frozen=True)
class Session(Options):
    """The robot, and for how long it is driven."""

    robot: Maybe[str] = None  # MODULE:CLASS with observe(), act(action) and maybe stop(); or simulated
    seconds: Maybe[Positive] = None  # how long a real robot runs [s]; 60 if not given
    env: Maybe[str] = None  # of a simulated robot; the policies' own if not given
    episodes: Maybe[Count] = None  # of a simulated robot; 5 if not given
    record: Maybe[Path] = None  # MCAP file for observations, actions and decisions
    json: bool = False  # print the summary as JSON
    fallback: Flat[Fallback] = field(default_factory=Fallback)
    tuning: Rare[Tuning] = field(default_factory=Tuning)
    access: Rare[Access] = field(default_factory=Access)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seconds",) if self.robot is None else ("env", "episodes"):
            if getattr(self, name) is not None:
                raise ConfigError(f"--{name} does nothing {'without' if self.robot is None else 'with'} --robot")
        if self.robot is not None:
            if self.tuning.live or self.tuning.device_share is not None:
                raise ConfigError("--live and --device-share are for a simulated robot; leave them out with --robot")
            load_object(self.robot, "class that makes a robot without arguments", callable)  # before connecting

    def fallback_within(self, usual_age_s: float, units: ActionUnits | None) -> Fallback:
        """The rule for misses, with a usual maximum age of a chunk's observation [s].

        ConfigError for a stop action that is no action of the robot, where its units are known.
        """
        try:
            if self.fallback.stop_action is not None and units is not None:
                units.normalise(np.array(self.fallback.stop_action, np.float32))
        except ConfigError as error:
            raise ConfigError(f"--stop-action: {error}") from None
        return replace(self.fallback, max_chunk_age_ms=self.fallback.max_chunk_age_ms or 1e3 * usual_age_s)

    def drive(self, plan: Plan, interrupts: Interrupts) -> None:
        """Runs the control loop and prints the summary, also after an error; exits if misses stopped a real robot."""
        journal, outcomes, causes = Journal(plan.period_s), list[dict[str, Any]](), set[str]()
        recorder = None if self.record is None else self._recorder(self.record, plan)
        acting: Acting | None = None
        real: Any = None
        lines, seconds, until = progress_lines(), self.seconds or 60.0, math.inf

        def warn_once(cause: str, why: str) -> None:
            if cause not in causes:
                causes.add(cause)
                remark(f"{why}; the fallback acts, and further ones like it are only counted", warn=True)

        def note(tick: Tick) -> None:
            journal.note(tick)
            if recorder is not None:
                recorder.note(tick)
            if tick.unusable is not None:
                warn_once(tick.unusable.cause, f"an observation cannot be used: {tick.unusable}")
            if plan.client is not None and plan.client.failure is not None:
                warn_once("failure", f"a request failed on the server: {plan.client.failure}")
            if real is not None:
                lines("seconds", int(seconds - until + time.monotonic()), math.ceil(seconds))
            plan.note(tick)

        def run(driven: Robot, acting: Acting, episode: int, proceed: Callable[[], bool]) -> None:
            journal.begin()
            if recorder is not None:
                driven = recorder.begin(driven, acting, episode)
            run_loop(driven, acting, plan.period_s, Clock(), lambda: proceed() and not acting.safety.stopped, note)

        try:
            if self.robot is not None:
                real = make_object(self.robot, "robot", ("observe", "act"))
                acting = _begin(plan, real, interrupts)
                if self._stopped_by(real) == "nothing":
                    remark(
                        "the robot cannot be told to stop: at the end its last action stays in force; give "
                        "--stop-action what makes it stand still, or the robot a method stop()",
                        warn=True,
                    )
                until = time.monotonic() + seconds
                run(real, acting, 0, lambda: time.monotonic() < until)
            else:
                simulated, episode_seed, limited = self._simulated(plan)
                with closing(simulated), limited, progress_bars() as update:
                    acting = plan.make(simulated)
                    episodes = self.episodes or 5
                    for episode in range(episodes):
                        update("episodes", episode, episodes)
                        simulated.start(episode_seed(self.tuning.seed, episode, simulated.task))
                        acting.reset(episode)
                        run(simulated, acting, episode, lambda: not simulated.done)
                        outcomes.append(simulated.outcome | {"stopped": acting.safety.stopped})
                        if recorder is not None:
                            recorder.end(simulated.outcome)
                    update("episodes", episodes, episodes)
        finally:
            # The robot has stopped. A second signal must not suppress the summary.
            interrupts.held = True
            recording = None if recorder is None else recorder.close()
            if acting is not None:
                summary = plan.summarise(journal, acting) | {
                    "episodes": outcomes, "outages": acting.safety.outages, "stopped": acting.safety.stopped,
                    "stopped_by": self._stopped_by(real),
                    "recording": recording,
                }  # fmt: skip
                if summary["periods"]:
                    print_result(self.json, summary, _lines(summary))
        if real is not None and acting.safety.stopped:
            raise SystemExit(STOPPED)

    def _recorder(self, path: Path, plan: Plan) -> Any:
        from specact.robot.recording import Recorder

        about = {
            "specact": __version__, "command": command_line(), "robot": self.robot,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "env": (self.env or plan.env) if self.robot is None else None, "rate_hz": round(1.0 / plan.period_s, 6),
        }  # fmt: skip
        return Recorder(path, plan.observation, about | plan.about)

    def _simulated(self, plan: Plan) -> tuple[Any, Any, Any]:
        """The simulated robot, the seeds of its episodes, and a context that limits the device's share of a core."""
        from specact.lab.envs import env_of, load_task
        from specact.lab.envs.live import LiveRobot
        from specact.lab.envs.robot import SimulatedRobot
        from specact.lab.rollout.processes import device_share
        from specact.lab.rollout.rollout import episode_seed

        name = self.env or env_of(plan.env)
        # The live world's process is started first: the limit applies to the device alone.
        live = LiveRobot(name, plan.observation, plan.period_s) if self.tuning.live else None
        robot = live or SimulatedRobot(load_task(name, plan.observation))
        return robot, episode_seed, device_share(self.tuning.device_share)

    def _stopped_by(self, robot: Any) -> str | None:
        """What stopped a real robot at the end."""
        if robot is None:
            return None
        otherwise = "nothing" if self.fallback.stop_action is None else "stop_action"
        return "stop()" if callable(getattr(robot, "stop", None)) else otherwise


def _begin(plan: Plan, robot: Any, interrupts: Interrupts) -> Acting:
    """The source of actions for a real robot, which is stopped if there is none: once made, it may hold torque."""
    try:
        return plan.make(robot)
    except BaseException as error:
        interrupts.held = True
        # Not by the stop action, which may be what does not fit.
        stop_after(error, robot, None)
        raise


def _lines(summary: dict[str, Any]) -> Iterator[str]:
    if summary["episodes"]:
        won = sum(outcome["success"] for outcome in summary["episodes"])
        yield f"{won} of {len(summary['episodes'])} episodes succeeded"
    yield from lines_of({name: value for name, value in summary.items() if name not in ("episodes", "stopped")})
    if summary["stopped"]:
        yield "the robot stopped itself: too many misses"


def about(policy: str, fingerprint: str, units: ActionUnits | None, **more: Any) -> dict[str, Any]:
    """Metadata of policies for a recording, as plain values."""
    plain = None if units is None else {"centre": units.centre.tolist(), "scale": units.scale.tolist()}
    return {"policy": policy, "fingerprint": fingerprint, "units": plain, **more}
