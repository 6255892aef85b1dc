"""``specact run`` lets a robot, or a simulated one, act in real time against a server."""

from __future__ import annotations

import importlib
import math
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specact.cli.output import print_json, progress_bars, results
from specact.cli.serve import read_token
from specact.errors import ConfigError, MissingExtraError
from specact.fallback import Fallback, OnMiss

# What is told of verdicts that nobody waited for.
LATE = ("wanted", "transmitted", "in_time", "replaced", "missed")


def run(
    bundle: str,
    server: str = "ws://127.0.0.1:8600",
    robot: str | None = None,
    env: str | None = None,
    gate: Literal["deviation", "uncertainty", "learned", "learned_action", "always", "never"] = "deviation",
    rate: float = 0.6,
    hold: bool = False,
    latency_budget_ms: float | None = None,
    link_share_kbit: float | None = None,
    audit_rate: float = 0.0,
    deadline_ms: float | None = None,
    on_miss: OnMiss = "execute_draft",
    max_consecutive_misses: int | None = None,
    stop_action: tuple[float, ...] | None = None,
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
    """Drive a robot, or a simulated one, against a server in real time, at its control rate.

    Args:
        bundle: path or name of the bundle on this device; the server must serve the same one.
        server: ws:// or wss:// (WebSocket), http:// or https:// (JSON, as in the paper), host and port.
        robot: MODULE:CLASS of anything with observe() and act(action), made without arguments; a simulated one if not
            given.
        env: environment of the simulated robot; the bundle's own if not given.
        gate: which steps go to the server.
        rate: wanted share of inferences to transmit.
        hold: hold that rate online, whatever drifts; needs no calibration.
        latency_budget_ms: hold this mean time of an inference instead of a rate.
        link_share_kbit: hold this share of the link, in kbit/s of requests and replies, instead of a rate.
        audit_rate: share of the steps to skip that are verified all the same, to know what skipping costs; 0.02 is
            plenty.
        deadline_ms: how long a step waits for the target; one control period if not given, with --late all that a
            chunk of actions takes.
        on_miss: what is executed where the target cannot be had in time.
        max_consecutive_misses: after more than this the robot stops.
        stop_action: what makes this robot stand still; needed wherever it can stop.
        overlap: let requests leave ahead of the draft where the gate's forecast says so.
        late: never wait for the server: act on the draft at once, and let a verdict correct what is left of the chunk
            of actions when it arrives.
        sampling: on the device, or on the server as in the paper.
        rate_hz: control rate; the bundle's own if not given.
        episodes: of a simulated robot.
        seconds: how long a real robot is driven.
        token_file: file with the server's bearer token; the variable SPECACT_TOKEN if not given.
        ca: PEM file of the authority that signed the server's certificate, for wss and https.
        jpeg_quality: send camera frames as JPEG of this quality, 1 to 95; raw if not given.
        name: of this robot on the server's status page.
        seed: of everything random.
        json: print the summary as JSON.
    """
    from specact.agent import SpeculativePolicy
    from specact.cli.gating import deciding_gate, true_skip_of, wanted_budget, watch, watching_shadow
    from specact.clock import RealClock
    from specact.control import Journal, Tick, run_loop
    from specact.gates.forecast import Forecast
    from specact.policies.bundle import load_bundle
    from specact.remote.channel import Endpoint, trusting
    from specact.remote.line import Line
    from specact.remote.target import remote_verifier

    loaded = load_bundle(bundle)
    still = None if stop_action is None else np.array(stop_action, np.float32)
    period_s = 1.0 / (rate_hz or loaded.spec.rate_hz)
    if not period_s > 0.0:
        raise ConfigError(f"--rate-hz must be positive, got {rate_hz}")
    endpoint = Endpoint.parse(server, read_token(token_file), trusting(ca))
    if link_share_kbit is not None and (endpoint.scheme not in ("ws", "wss") or sampling != "device"):
        raise ConfigError("--link-share-kbit counts what ws:// carries; leave out http:// and --sampling server")
    if late and (sampling != "device" or audit_rate):
        raise ConfigError("--late goes without --sampling server, which cannot ask ahead, and without --audit-rate")
    inferences_hz = 1.0 / (period_s * loaded.spec.execute)
    budget = wanted_budget(hold, rate, latency_budget_ms, link_share_kbit, loaded, inferences_hz)
    decides = deciding_gate(loaded, gate, rate, budget)
    decides.audit_rate = audit_rate
    # A latency's rate is not known beforehand, and so neither is what skipping at it should cost.
    known_rate = None if latency_budget_ms else rate if budget is None else budget.rate
    shadow = watching_shadow(loaded, gate, known_rate) if audit_rate else None
    journal, outcomes = Journal(period_s), []

    def note(tick: Tick) -> None:
        journal.note(tick)
        if shadow is not None and tick.record is not None:
            watch(shadow, tick.record)

    with Line(endpoint, loaded, name, jpeg_quality=jpeg_quality) as line:
        line.connect(10.0)
        policy = SpeculativePolicy(
            loaded,
            decides,
            verifier=remote_verifier(
                line, loaded, deadline_ms or 1e3 * period_s * (loaded.spec.execute if late else 1), sampling
            ),
            fallback=Fallback(on_miss, max_consecutive_misses, still),
            forecast=Forecast(decides) if overlap and sampling == "device" and not late else None,
            late_for_s=math.inf if late else None,
            seed=seed,
        )
        line.report = policy.counts
        if robot is not None:
            until = time.monotonic() + seconds
            real = _make(robot)
            run_loop(
                real,
                policy,
                period_s,
                RealClock(),
                lambda: time.monotonic() < until and not policy.stopped,
                note,
            )
        else:
            simulated, start_of = _simulated(env or loaded.env)
            with progress_bars() as update:
                for episode in range(episodes):
                    update("episodes", episode, episodes)
                    simulated.start(start_of(seed, episode))
                    # The loop would wait for ever for an observation that another environment never gives.
                    policy.observe(simulated.observe())
                    policy.reset(episode)
                    run_loop(
                        simulated, policy, period_s, RealClock(), lambda: not simulated.done and not policy.stopped,
                        note,
                    )  # fmt: skip
                    outcomes.append({"success": simulated.success, "score": simulated.score, "stopped": policy.stopped})
                update("episodes", episodes, episodes)
            simulated.close()
        summary = journal.summary() | {
            "held_rate": None if budget is None else budget.rate,
            "true_skip": None if shadow is None else true_skip_of(shadow),
            "episodes": outcomes,
            "line": dict(line.counts),
            "late": {name: policy.counts[name] for name in LATE} if late else None,
            "stopped": policy.stopped,
        }
    if json:
        print_json(summary)
        return
    _say(summary, period_s)


def _say(summary: dict[str, Any], period_s: float) -> None:
    if summary["episodes"]:
        won = sum(outcome["success"] for outcome in summary["episodes"])
        results.print(f"{won} of {len(summary['episodes'])} episodes succeeded", highlight=False)
    inference = summary["inference_ms"]
    lines = {
        "control": f"{summary['ticks']} ticks of {1e3 * period_s:.0f} ms, {summary['overruns']} of them overrun, "
        f"{summary['unusable']} without a usable observation, longest stall {summary['longest_stall_ms']:.1f} ms",
        "inference": ", ".join(f"{name} {value:.2f} ms" for name, value in inference.items() if value is not None),
        "sent": f"{summary['transmission_rate'] or 0.0:.2f} of {summary['inferences']} inferences, "
        f"{summary['sent_ahead'] or 0.0:.2f} ahead of the draft"
        + ("" if summary["held_rate"] is None else f"; {summary['held_rate']:.2f} wanted in the end"),
        "missed": ", ".join(f"{cause} {count}" for cause, count in summary["misses"].items()) or "none",
        "line": ", ".join(f"{name} {count}" for name, count in summary["line"].items()),
    }
    if summary["late"] is not None:
        del lines["missed"]  # what the ticks know of misses; a late verdict's comes after its tick
        lines["late"] = ", ".join(f"{name} {count}" for name, count in summary["late"].items())
    if summary["true_skip"] is not None:
        from specact.cli.gating import in_words

        lines["true skip"] = in_words(summary["true_skip"])
    for name, text in lines.items():
        results.print(f"{name:10} {text}", highlight=False, soft_wrap=True)
    if summary["stopped"]:
        results.print("the robot stopped itself: too many misses", style="yellow")


def _make(path: str) -> Any:
    module, _, attribute = path.partition(":")
    # A robot's module usually lies where the command is given.
    sys.path.insert(0, str(Path.cwd()))
    try:
        kind = getattr(importlib.import_module(module), attribute or "")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--robot {path!r} is not MODULE:CLASS of something importable: {error}") from None
    try:
        made = kind()
    except TypeError as error:
        raise ConfigError(f"--robot {path!r} cannot be made without arguments: {error}") from None
    if not callable(getattr(made, "observe", None)) or not callable(getattr(made, "act", None)):
        raise ConfigError(f"--robot {path!r} has no observe() and act(action)")
    return made


def _simulated(env: str) -> tuple[Any, Any]:
    try:
        from specact.envs import load_task
        from specact.envs.robot import SimulatedRobot
        from specact.evaluation.rollout import start_of
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "gymnasium", "sim") from error
    return SimulatedRobot(load_task(env)), start_of
