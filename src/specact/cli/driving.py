"""Drives a real or a simulated robot for ``specact run``, and prints a summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specact.cli.output import command_line, print_json, progress_bars, remarks, results
from specact.errors import MissingExtraError, ObservationError
from specact.interrupts import Interrupts
from specact.plugins import make_object

if TYPE_CHECKING:
    from specact.observation import ObservationSpec
    from specact.robot.loop import Acting, Journal, Robot, Tick
    from specact.robot.recording import Recorder


@dataclass(frozen=True)
class Plan:
    """The policies that drive a robot, and how.

    Attributes:
        env: name of the environment that the policies were trained for; empty if unknown.
        observation: spec of their observations.
        period_s: control period [s].
        stop_action: ``[A]``, or None.
        make: returns the source of actions for a robot.
        note: called with every tick.
        summarise: the summary, as plain values, from the journal of the control loop.
        about: metadata of the policies for a recording, as plain values.
    """

    env: str
    observation: ObservationSpec
    period_s: float
    stop_action: NDArray[np.float32] | None
    make: Callable[[Any], Acting]
    note: Callable[[Tick], None]
    summarise: Callable[[Journal], dict[str, Any]]
    about: dict[str, Any]


def drive(
    plan: Plan, interrupts: Interrupts, robot: str | None, env: str | None, *, live: bool, device_share: float | None,
    seconds: float, episodes: int, seed: int, record: Path | None, json: bool,
) -> None:  # fmt: skip
    """Runs the control loop and prints the summary, also after an error.

    Args:
        plan: the policies.
        interrupts: already entered.
        robot: ``MODULE:CLASS``, or None for a simulated one.
        env: of the simulated robot; the plan's own if None.
        live: whether the simulated world runs in real time.
        device_share: of one core, for all but the simulated world; None for no limit.
        seconds: how long a real robot runs [s].
        episodes: of a simulated one.
        seed: of its starts.
        record: the file to record to, or None.
        json: whether the summary is JSON.
    """
    from specact.clock import RealClock
    from specact.robot.loop import Journal, run_loop

    journal, outcomes, seen = Journal(plan.period_s), list[dict[str, Any]](), set[str]()
    acting: Acting | None = None

    def note(tick: Tick) -> None:
        journal.note(tick)
        if recorder is not None:
            recorder.note(tick)
        if tick.unusable is not None and tick.unusable.cause not in seen:
            seen.add(tick.unusable.cause)
            _warn(tick.unusable)
        plan.note(tick)

    def run(driven: Robot, acting: Acting, episode: int, proceed: Callable[[], bool]) -> None:
        if recorder is not None:
            driven = recorder.begin(driven, acting, episode)
        run_loop(driven, acting, plan.period_s, RealClock(), lambda: proceed() and not acting.safety.stopped, note)

    recorder = None if record is None else _recorder(record, plan, robot, env)
    real: Any = None
    try:
        if robot is not None:
            real = make_object(robot, "robot", ("observe", "act"))
            acting = _begin(plan, real, interrupts)
            until = time.monotonic() + seconds
            run(real, acting, 0, lambda: time.monotonic() < until)
        else:
            simulated, episode_seed, limited = _simulated(env, plan, live, device_share)
            with closing(simulated), limited, progress_bars() as update:
                acting = plan.make(simulated)
                for episode in range(episodes):
                    update("episodes", episode, episodes)
                    simulated.start(episode_seed(seed, episode, simulated.task))
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
            summary = plan.summarise(journal) | {
                "episodes": outcomes,
                "stopped": acting.safety.stopped,
                "stopped_by": None if real is None else _stopped_by(real, plan.stop_action),
                "recording": recording,
            }
            if summary["ticks"] and json:
                print_json(summary)
            elif summary["ticks"]:
                _print(summary, plan.period_s)


def _begin(plan: Plan, robot: Any, interrupts: Interrupts) -> Acting:
    """The source of actions for a real robot, which is stopped if there is none: once made, it may hold torque."""
    from specact.robot.loop import stop_after

    try:
        return plan.make(robot)
    except BaseException as error:
        interrupts.held = True
        # Not by the stop action, which may be what does not fit.
        stop_after(error, robot, None)
        raise


def _recorder(path: Path, plan: Plan, robot: str | None, env: str | None) -> Recorder:
    from specact import __version__
    from specact.robot.recording import Recorder

    about = {
        "specact": __version__, "command": command_line(), "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "robot": robot, "env": (env or plan.env) if robot is None else None, "rate_hz": round(1.0 / plan.period_s, 6),
    }  # fmt: skip
    return Recorder(path, plan.observation, about | plan.about)


def _stopped_by(robot: Any, stop_action: NDArray[np.float32] | None) -> str:
    """What stopped a real robot at the end."""
    return "stop()" if callable(getattr(robot, "stop", None)) else "nothing" if stop_action is None else "stop_action"


def _warn(error: ObservationError) -> None:
    remarks.print(
        f"an observation cannot be used: {error}; the fallback acts, and further ones like it are only counted",
        style="yellow", highlight=False, soft_wrap=True,
    )  # fmt: skip


def _print(summary: dict[str, Any], period_s: float) -> None:
    if summary["episodes"]:
        won = sum(outcome["success"] for outcome in summary["episodes"])
        results.print(f"{won} of {len(summary['episodes'])} episodes succeeded", highlight=False)
    inference = summary["inference_ms"]
    lines = {
        "control": f"{summary['ticks']} ticks of {1e3 * period_s:.0f} ms, {summary['overruns']} more lost, "
        f"longest lateness {summary['longest_lateness_ms']:.1f} ms, "
        f"observation {summary['longest_observation_ms']:.1f} ms, stall {summary['longest_stall_ms']:.1f} ms, "
        f"{summary['outdated']} with an action too old to be sent",
        "unusable": _format_counts(summary["unusable"]),
        "inference": ", ".join(f"{name} {value:.2f} ms" for name, value in inference.items() if value is not None),
        **(_chunk_lines(summary) if "chunks" in summary else _pair_lines(summary)),
        "missed": _format_counts(summary["misses"]),
    }
    if summary["line"] is not None:
        lines["line"] = _format_counts(summary["line"])
    if summary.get("cuts") is not None:
        lines["cuts"] = _format_counts(summary["cuts"])
    if summary.get("late") is not None:
        del lines["missed"]  # of the ticks; a late verdict's miss comes after its tick
        lines["late"] = _format_counts(summary["late"])
    if summary.get("true_skip") is not None:
        from specact.cli.gating import true_skip_text

        lines["true skip"] = true_skip_text(summary["true_skip"])
    recording = summary["recording"]
    if recording is not None:
        lines["recorded"] = f"{recording['steps']} control steps to {recording['file']}, {recording['dropped']} dropped"
    for name, text in lines.items():
        results.print(f"{name:10} {text}", highlight=False, soft_wrap=True)
    if recording is not None and recording["error"] is not None:
        results.print(recording["error"], style="yellow", highlight=False, soft_wrap=True)
    if summary["stopped"]:
        results.print("the robot stopped itself: too many misses", style="yellow")
    if summary["stopped_by"] == "nothing":
        results.print(
            "the robot was not told to stop: its last action stays in force; give --stop-action what makes it stand "
            "still, or the robot a method stop()",
            style="yellow",
            soft_wrap=True,
        )


def _pair_lines(summary: dict[str, Any]) -> dict[str, str]:
    return {
        "sent": f"{summary['transmission_rate'] or 0.0:.2f} of {summary['inferences']} inferences"
        + ("" if summary["held_rate"] is None else f"; {summary['held_rate']:.2f} wanted in the end")
    }


def _chunk_lines(summary: dict[str, Any]) -> dict[str, str]:
    age = summary["observation_age_ms"]
    return {
        "chunks": f"{summary['chunks']} played of {summary['inferences']} inferred, {summary['idle']} idle ticks"
        + ("" if age is None else f", observations {age:.0f} ms old when their first action was played")
    }


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _simulated(env: str | None, plan: Plan, live: bool, device_share: float | None) -> tuple[Any, Any, Any]:
    """The simulated robot, the seeds of its episodes, and a context that limits the device's share of a core."""
    try:
        from specact.lab import device
        from specact.lab.envs import env_of, load_task
        from specact.lab.envs.live import LiveRobot
        from specact.lab.envs.robot import SimulatedRobot
        from specact.lab.rollout.rollout import episode_seed
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "gymnasium", "sim") from error
    name = env or env_of(plan, None)
    # The live world's process is started first: the limit applies to the device alone.
    made = LiveRobot(name, plan.observation, plan.period_s) if live else None
    return made or SimulatedRobot(load_task(name, plan.observation)), episode_seed, device.device_share(device_share)
