"""``specact run`` lets a robot, or a simulated one, act in real time against a server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specact.cli.output import print_json, progress_bars, remarks, results
from specact.cli.serve import read_token
from specact.errors import ConfigError, MissingExtraError, ObservationError
from specact.execution.verdicts import WAIT, LateVerdicts
from specact.fallback import Fallback, OnMiss
from specact.interrupts import Interrupts
from specact.plugins import make_object
from specact.runtime.limits import RATES_HZ

# What is told of verdicts that nobody waited for.
LATE = ("wanted", "transmitted", "in_time", "replaced", "missed")


def run(
    bundle: str,
    server: str = "ws://127.0.0.1:8600",
    draft: str | None = None,
    robot: str | None = None,
    env: str | None = None,
    gate: str = "deviation",
    rate: float = 0.6,
    hold: bool = False,
    latency_budget_ms: float | None = None,
    link_share_kbit: float | None = None,
    audit_rate: float = 0.0,
    deadline_ms: float | None = None,
    on_miss: OnMiss = "execute_draft",
    max_consecutive_misses: int | None = None,
    stop_action: tuple[float, ...] | None = None,
    max_chunk_age_ms: float | None = None,
    overlap: bool = True,
    late: bool = False,
    sampling: Literal["device", "server"] = "device",
    rate_hz: float | None = None,
    episodes: int = 5,
    seconds: float = 60.0,
    token_file: Path | None = None,
    ca: Path | None = None,
    jpeg_quality: int | None = None,
    name: str = "robot",
    seed: int = 0,
    json: bool = False,
) -> None:
    """Run a real or simulated robot with a server in real time, at its control rate.

    The robot is stopped at the end, with its stop() method if it has one, otherwise with the stop action. With neither,
    the last action stays in force. The exit status is 0 after the given time, 2 after an error (1 if the robot raised
    it), and 130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP. The summary is printed in each case, if the robot has
    acted.

    Args:
        bundle: path or name of the bundle on this device; the server must serve the same one.
        server: ws:// or wss:// (WebSocket), http:// or https:// (JSON, as in the paper), host and port.
        draft: of a pair of chunk policies, where the pair does not hold it: MODULE:NAME.
        robot: MODULE:CLASS with observe() and act(action), optionally stop(), created without arguments; a
            simulated robot if not given.
        env: environment of the simulated robot, a name or MODULE:TASK; the bundle's own if not given.
        gate: selects the steps sent to the server: deviation, uncertainty, learned, learned_action, random, always,
            never, or MODULE:GATE for one of your own.
        rate: wanted share of inferences to transmit.
        hold: hold that rate online, also under drift; needs no calibration.
        latency_budget_ms: hold this mean time of an inference instead of a rate.
        link_share_kbit: hold this share of the link, in kbit/s of requests and replies, instead of a rate.
        audit_rate: share of the skipped steps that are verified anyway, to measure the cost of skipping; 0.02 is
            sufficient.
        deadline_ms: how long a step waits for the target; if not given, one control period, with --late the
            duration of a chunk of actions.
        on_miss: what is executed if the target does not reply in time. Without a usable observation there is no draft,
            and execute_draft holds the last action.
        max_consecutive_misses: after more than this the robot stops; steps without a usable observation count.
        stop_action: action that makes this robot stand still; it is sent at the end, unless the robot has stop().
            Required if a miss can stop the robot.
        max_chunk_age_ms: the rest of a chunk whose observation is older than this is dropped and inferred again, as
            after a stall. If not given: the duration of a chunk plus the longer of deadline and control period.
        overlap: send a request before its draft is computed if the gate is predicted to transmit.
        late: never wait for the server: execute the draft immediately; a verdict corrects the rest of the chunk of
            actions when it arrives.
        sampling: where codes are sampled: on the device, or on the server as in the paper.
        rate_hz: control rate; the bundle's own if not given.
        episodes: number of episodes of a simulated robot.
        seconds: how long a real robot runs [s].
        token_file: file with the server's bearer token; the variable SPECACT_TOKEN if not given.
        ca: PEM file of the authority that signed the server's certificate, for wss and https.
        jpeg_quality: send camera frames as JPEG of this quality, 1 to 95; raw if not given.
        name: name of this robot on the server's status page.
        seed: random seed.
        json: print the summary as JSON.
    """
    from specact.cli.gating import deciding_gate, true_skip_of, wanted_budget, watch, watching_shadow
    from specact.clock import RealClock
    from specact.families.load import load_pair
    from specact.gates.prefetch import Forecast
    from specact.policy import SpeculativePolicy
    from specact.remote.client import Line
    from specact.remote.target import positive_deadline, remote_verifier
    from specact.remote.transport import Endpoint, trusting
    from specact.robot.loop import Journal, Robot, Tick, run_loop

    for option, value in (
        ("deadline-ms", deadline_ms), ("max-chunk-age-ms", max_chunk_age_ms),
        ("seconds", seconds), ("episodes", episodes),
    ):  # fmt: skip
        if value is not None and not 0.0 < value < math.inf:
            raise ConfigError(f"--{option} must be positive and finite, got {value}")
    if rate_hz is not None and rate_hz not in RATES_HZ:
        raise ConfigError(f"--rate-hz must be {RATES_HZ}, got {rate_hz}")
    loaded = load_pair(bundle, draft=draft)
    still = None if stop_action is None else np.array(stop_action, np.float32)
    if still is not None:
        try:
            loaded.units.normalise(still)
        except ConfigError as error:
            raise ConfigError(f"--stop-action: {error}") from None
    fallback = Fallback(on_miss, max_consecutive_misses, still)
    period_s = 1.0 / (loaded.rate_hz if rate_hz is None else rate_hz)
    chunk_s = period_s * loaded.execute
    deadline_s = positive_deadline(1e3 * (chunk_s if late else period_s) if deadline_ms is None else deadline_ms) / 1e3
    # With --late the draft's actions run at once.
    age_s = chunk_s + (period_s if late else max(period_s, deadline_s))
    if max_chunk_age_ms is not None:
        age_s = max_chunk_age_ms / 1e3
    endpoint = Endpoint.parse(server, read_token(token_file), trusting(ca))
    if link_share_kbit is not None and (endpoint.scheme not in ("ws", "wss") or sampling != "device"):
        raise ConfigError(
            "--link-share-kbit needs ws:// or wss:// and sampling on the device; leave out http:// and "
            "--sampling server"
        )
    if late and (sampling != "device" or audit_rate):
        raise ConfigError("--late cannot be combined with --sampling server or --audit-rate; leave these options out")
    inferences_hz = 1.0 / chunk_s
    budget = wanted_budget(hold, rate, latency_budget_ms, link_share_kbit, loaded, inferences_hz)
    decides = deciding_gate(loaded, gate, rate, budget)
    decides.audit_rate = audit_rate
    # A latency's rate is not known beforehand, and so neither is what skipping at it should cost.
    known_rate = None if latency_budget_ms else rate if budget is None else budget.rate
    shadow = watching_shadow(loaded, gate, known_rate) if audit_rate else None
    journal, outcomes, seen = Journal(period_s), list[dict[str, Any]](), set[str]()

    def note(tick: Tick) -> None:
        journal.note(tick)
        if tick.unusable is not None and tick.unusable.cause not in seen:
            seen.add(tick.unusable.cause)
            _warn(tick.unusable)
        if shadow is not None and tick.record is not None:
            watch(shadow, tick.record)

    with Interrupts() as interrupts, Line(endpoint, loaded.codec.dialect, name, jpeg_quality=jpeg_quality) as line:
        line.connect(10.0)
        policy = SpeculativePolicy(
            loaded,
            decides,
            verifier=remote_verifier(line, loaded, 1e3 * deadline_s, sampling),
            fallback=fallback,
            forecast=Forecast(decides) if overlap and sampling == "device" and not late else None,
            verdicts=LateVerdicts(math.inf) if late else WAIT,
            max_chunk_age_s=age_s,
            seed=seed,
        )
        line.report = policy.counts
        real = None if robot is None else make_object(robot, "robot", ("observe", "act"))

        def drive(driven: Robot, proceed: Callable[[], bool]) -> None:
            run_loop(driven, policy, period_s, RealClock(), lambda: proceed() and not policy.stopped, note)

        try:
            if real is not None:
                until = time.monotonic() + seconds
                drive(real, lambda: time.monotonic() < until)
            else:
                simulated, start_of = _simulated(env, loaded)
                with progress_bars() as update:
                    for episode in range(episodes):
                        update("episodes", episode, episodes)
                        simulated.start(start_of(seed, episode))
                        policy.reset(episode)
                        drive(simulated, lambda: not simulated.done)
                        outcome = {"success": simulated.success, "score": simulated.score, "stopped": policy.stopped}
                        outcomes.append(outcome)
                    update("episodes", episodes, episodes)
                simulated.close()
        finally:
            # The robot stands still. Whoever asks once more to end does not lose the summary.
            interrupts.held = True
            summary = journal.summary() | {
                "held_rate": None if budget is None else budget.rate,
                "true_skip": None if shadow is None else true_skip_of(shadow),
                "episodes": outcomes,
                "line": dict(line.counts),
                "late": {name: policy.counts[name] for name in LATE} if late else None,
                "stopped": policy.stopped,
                "stopped_by": None if real is None else _stopped_by(real, still),
            }
            if summary["ticks"] and json:
                print_json(summary)
            elif summary["ticks"]:
                _say(summary, period_s)


def _stopped_by(robot: Any, still: Any) -> str:
    return "stop()" if callable(getattr(robot, "stop", None)) else "nothing" if still is None else "stop_action"


def _warn(error: ObservationError) -> None:
    remarks.print(
        f"an observation cannot be used: {error}; the fallback acts, and further ones like it are only counted",
        style="yellow", highlight=False, soft_wrap=True,
    )  # fmt: skip


def _say(summary: dict[str, Any], period_s: float) -> None:
    if summary["episodes"]:
        won = sum(outcome["success"] for outcome in summary["episodes"])
        results.print(f"{won} of {len(summary['episodes'])} episodes succeeded", highlight=False)
    inference = summary["inference_ms"]
    lines = {
        "control": f"{summary['ticks']} ticks of {1e3 * period_s:.0f} ms, {summary['overruns']} more lost, "
        f"longest lateness {summary['longest_lateness_ms']:.1f} ms, "
        f"longest stall {summary['longest_stall_ms']:.1f} ms, {summary['outdated']} with an action too old to be sent",
        "unusable": _counted(summary["unusable"]),
        "inference": ", ".join(f"{name} {value:.2f} ms" for name, value in inference.items() if value is not None),
        "sent": f"{summary['transmission_rate'] or 0.0:.2f} of {summary['inferences']} inferences, "
        f"{summary['sent_ahead'] or 0.0:.2f} ahead of the draft"
        + ("" if summary["held_rate"] is None else f"; {summary['held_rate']:.2f} wanted in the end"),
        "missed": _counted(summary["misses"]),
        "line": _counted(summary["line"]),
    }
    if summary["late"] is not None:
        del lines["missed"]  # what the ticks know of misses; a late verdict's comes after its tick
        lines["late"] = _counted(summary["late"])
    if summary["true_skip"] is not None:
        from specact.cli.gating import in_words

        lines["true skip"] = in_words(summary["true_skip"])
    for name, text in lines.items():
        results.print(f"{name:10} {text}", highlight=False, soft_wrap=True)
    if summary["stopped"]:
        results.print("the robot stopped itself: too many misses", style="yellow")
    if summary["stopped_by"] == "nothing":
        results.print(
            "the robot was not told to stop: its last action stays in force; give --stop-action what makes it stand "
            "still, or the robot a method stop()",
            style="yellow",
            soft_wrap=True,
        )


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _simulated(env: str | None, bundle: Any) -> tuple[Any, Any]:
    try:
        from specact.lab.envs import env_of, load_task
        from specact.lab.envs.robot import SimulatedRobot
        from specact.lab.rollout.rollout import start_of
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "gymnasium", "sim") from error
    return SimulatedRobot(load_task(env or env_of(bundle, None))), start_of
