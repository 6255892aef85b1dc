"""``specact run`` lets a robot, or a simulated one, act in real time against a server."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from specact.cli.output import print_json, progress_bars, remarks, results
from specact.cli.serve import read_token
from specact.errors import ConfigError, MissingExtraError
from specact.fallback import Fallback, OnMiss

if TYPE_CHECKING:
    from specact.gates.controller import Budget
    from specact.gates.gate import Gate
    from specact.gates.shadow import Shadow
    from specact.policies.bundle import Bundle
    from specact.types import StepRecord


def run(
    bundle: str,
    server: str = "ws://127.0.0.1:8600",
    robot: str | None = None,
    env: str | None = None,
    gate: Literal["deviation", "uncertainty", "always", "never"] = "deviation",
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
        deadline_ms: how long a step waits for the target; one control period if not given.
        on_miss: what is executed where the target cannot be had in time.
        max_consecutive_misses: after more than this the robot stops.
        stop_action: what makes this robot stand still; needed wherever it can stop.
        overlap: let requests leave ahead of the draft where the gate's forecast says so.
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
    budget = _budget(hold, rate, latency_budget_ms, link_share_kbit, loaded, 1.0 / (period_s * loaded.spec.execute))
    decides = _gate(loaded, gate, rate, budget)
    decides.audit_rate = audit_rate
    # A latency's rate is not known beforehand, and so neither is what skipping at it should cost.
    known_rate = None if latency_budget_ms else rate if budget is None else budget.rate
    shadow = _shadow(loaded, gate, known_rate) if audit_rate else None
    journal, outcomes = Journal(period_s), []

    def note(tick: Tick) -> None:
        journal.note(tick)
        if shadow is not None and tick.record is not None:
            _watch(shadow, tick.record)

    with Line(endpoint, loaded, name, jpeg_quality=jpeg_quality) as line:
        line.connect(10.0)
        policy = SpeculativePolicy(
            loaded,
            decides,
            verifier=remote_verifier(line, loaded, deadline_ms or 1e3 * period_s, sampling),
            fallback=Fallback(on_miss, max_consecutive_misses, still),
            forecast=Forecast(decides) if overlap and sampling == "device" else None,
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
            "true_skip": None if shadow is None else _true_skip(shadow),
            "episodes": outcomes,
            "line": dict(line.counts),
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
    if summary["true_skip"] is not None:
        lines["true skip"] = _in_words(summary["true_skip"])
    for name, text in lines.items():
        results.print(f"{name:10} {text}", highlight=False, soft_wrap=True)
    if summary["stopped"]:
        results.print("the robot stopped itself: too many misses", style="yellow")


def _budget(
    hold: bool, rate: float, latency_ms: float | None, link_kbit: float | None, bundle: Bundle, inferences_hz: float
) -> Budget | None:
    from specact.gates.controller import LatencyBudget, LinkBudget, RateBudget

    if hold + (latency_ms is not None) + (link_kbit is not None) > 1:
        raise ConfigError("a gate holds one budget: give one of --hold, --latency-budget-ms and --link-share-kbit")
    if latency_ms is not None:
        return LatencyBudget(latency_ms / 1e3)
    if link_kbit is not None:
        return LinkBudget(link_kbit * 1e3 / 8.0, _exchange_bytes(bundle), inferences_hz)
    return RateBudget(rate) if hold else None


def _exchange_bytes(bundle: Bundle) -> int:
    """Bytes of a request and its reply; frames count as they are, uncompressed."""
    from specact.types import CodeDistribution, Window
    from specact.wire import msgpack
    from specact.wire.reply import DistributionReply, ServerTimes, reply_fields
    from specact.wire.request import InferRequest, request_fields

    spec = bundle.spec
    window = Window(
        np.zeros((spec.window, spec.state), np.float32),
        np.zeros(spec.goal, np.float32) if spec.goal else None,
        np.zeros((spec.window, *spec.image, 3), np.uint8) if spec.image else None,
    )
    answer = CodeDistribution(
        np.full((spec.codebooks, spec.codes), 1.0 / spec.codes),
        np.zeros((spec.codebooks, spec.codes, spec.chunk, spec.actions), np.float32),
        np.full((spec.codes, spec.codes), 1.0 / spec.codes) if spec.sequential else None,
    )
    request = request_fields(InferRequest(2**32, 1.0, window))
    reply = reply_fields(DistributionReply(2**32, answer, ServerTimes(1.0, 1.0, 1.0, 1)))
    return len(msgpack.encode(request)) + len(msgpack.encode(reply))


def _gate(bundle: Bundle, name: str, rate: float, budget: Budget | None) -> Gate:
    from specact.calibration import calibrated_gate
    from specact.gates import Always, Never
    from specact.gates.controller import Controller
    from specact.gates.settings import BUNDLES_OWN

    plain = {"always": Always, "never": Never}
    if budget is None:
        return plain[name]() if name in plain else calibrated_gate(bundle, name, rate)
    if name in plain:
        raise ConfigError(f"--gate {name} has no threshold that could hold a budget; choose another gate")
    return Controller(BUNDLES_OWN.settings(name, bundle).build(bundle), budget)


def _shadow(bundle: Bundle, gate: str, rate: float | None) -> Shadow:
    """With an alarm where a calibration says what is to be expected."""
    from specact.calibration import find_calibration
    from specact.gates.drift import DriftAlarm
    from specact.gates.shadow import Shadow, expected_true_skip

    calibration = None if rate is None else find_calibration(bundle, gate, rate)
    if rate is None or calibration is None:
        return Shadow()
    return Shadow(DriftAlarm(expected_true_skip(calibration.model["rejections"], rate)))


def _watch(shadow: Shadow, record: StepRecord) -> None:
    if shadow.take(record) and shadow.alarm is not None:
        remarks.print(
            f"the true skip ratio has left its calibrated level of {shadow.alarm.level:.2f}: "
            f"{_in_words(_true_skip(shadow))}; check sensors and policies, or calibrate again",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def _true_skip(shadow: Shadow) -> dict[str, Any]:
    found, alarm = shadow.estimate(), shadow.alarm
    return {
        "mean": found.mean,
        "low": found.low,
        "high": found.high,
        "audits": found.count,
        "missed": shadow.missed,
        "expected": None if alarm is None else alarm.level,
        "alarm": None if alarm is None else alarm.raised,
    }


def _in_words(true_skip: dict[str, Any]) -> str:
    if true_skip["mean"] is None:
        return f"unknown: no audit was answered, {true_skip['missed']} were missed"
    return (
        f"{true_skip['mean']:.2f} [{true_skip['low']:.2f}, {true_skip['high']:.2f}] of what is skipped, from "
        f"{true_skip['audits']} audits ({true_skip['missed']} missed); "
        + {None: "no alarm, for lack of a calibration", False: "no alarm", True: "ALARM"}[true_skip["alarm"]]
    )


def _make(path: str) -> Any:
    module, _, attribute = path.partition(":")
    # A robot's module usually lies where the command is given.
    sys.path.insert(0, str(Path.cwd()))
    try:
        kind = getattr(importlib.import_module(module), attribute or "")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--robot {path!r} is not MODULE:CLASS of something importable: {error}") from None
    made = kind()
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
