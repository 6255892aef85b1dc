"""``specact run`` lets a robot, or a simulated one, act in real time: a pair with a server, or a chunk policy alone."""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from specact.cli.driving import drive
from specact.cli.plans import plan_pair, plan_policy
from specact.cli.serve import read_token
from specact.errors import ConfigError
from specact.execution.strategy import Kind
from specact.fallback import Fallback, OnMiss
from specact.interrupts import Interrupts
from specact.runtime.limits import RATES_HZ

# Options that only a pair of policies has, and those that only a policy alone has.
_OF_PAIRS = (
    "server", "draft", "gate", "gate_options", "rate", "hold", "latency_budget_ms", "link_share_kbit", "audit_rate",
    "overlap", "sampling",
)  # fmt: skip
_OF_POLICIES = ("steps", "execute_actions", "overlap_actions", "idle")


def run(
    bundle: str | None = None,
    policy: str | None = None,
    server: str | None = None,
    draft: str | None = None,
    robot: str | None = None,
    env: str | None = None,
    gate: str = "deviation",
    gate_options: tuple[str, ...] = (),
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
    sampling: Literal["device", "server"] = "device",
    execution: Literal[Kind, "late"] = "synchronous",
    execute_actions: int | None = None,
    overlap_actions: int | None = None,
    idle: Literal["hold_last", "stop_action"] = "hold_last",
    steps: int = 10,
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
    """Run a real or simulated robot in real time, at its control rate: a pair with a server, or a chunk policy alone.

    The robot is stopped at the end, with its stop() method if it has one, otherwise with the stop action. With neither,
    the last action stays in force. The exit status is 0 after the given time, 2 after an error (1 if the robot raised
    it), and 130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP. The summary is printed in each case, if the robot has
    acted.

    Args:
        bundle: path or name of a pair of policies on this device, or MODULE:NAME for one of your own; the server must
            serve the same one.
        policy: instead, a chunk policy alone: ws://, wss://, http:// or https:// with host and port of a server that
            serves one, or for inference on this device a flow bundle, BUNDLE#target, a .toml file that describes an
            ONNX file, or MODULE:NAME.
        server: of the pair's target: ws:// or wss:// (WebSocket), http:// or https:// (JSON, as in the paper), host and
            port; ws://127.0.0.1:8600 if not given.
        draft: of a pair of chunk policies, where the pair does not hold it: MODULE:NAME or a .toml file.
        robot: MODULE:CLASS with observe() and act(action), optionally stop() and
            roll_forward(observation, actions), created without arguments; a simulated robot if not given.
        env: environment of the simulated robot, a name or MODULE:TASK; the bundle's own if not given.
        gate: selects the steps sent to the server: deviation, uncertainty, learned, learned_action, random, always,
            never, or MODULE:GATE for one of your own.
        gate_options: of MODULE:GATE, keywords of its constructor, each as NAME=VALUE; a calibration has its own.
        rate: wanted share of inferences to transmit.
        hold: hold that rate online, also under drift; needs no calibration.
        latency_budget_ms: hold this mean time of an inference instead of a rate.
        link_share_kbit: hold this share of the link, in kbit/s of requests and replies, instead of a rate.
        audit_rate: share of the skipped steps that are verified anyway, to measure the cost of skipping; 0.02 is
            sufficient.
        deadline_ms: how long a step waits for the target; if not given, one control period, with --execution late the
            duration of a chunk of actions. Of a chunk policy alone: how long an inference may take; 1000 ms if not
            given.
        on_miss: what is executed if the target does not reply in time. Without a usable observation there is no draft,
            and execute_draft holds the last action. With a chunk policy alone the rest of the chunk is played, unless
            it is stop.
        max_consecutive_misses: after more than this the robot stops; steps without a usable observation count.
        stop_action: action that makes this robot stand still; it is sent at the end, unless the robot has stop().
            Required if a miss can stop the robot.
        max_chunk_age_ms: the rest of a chunk whose observation is older than this is dropped and inferred again, as
            after a stall. If not given: the duration of a chunk plus the longer of deadline and control period.
        overlap: send a request before its draft is computed if the gate is predicted to transmit.
        sampling: where codes are sampled: on the device, or on the server as in the paper.
        execution: how chunks of actions are played. A pair: synchronous waits for the server; late executes the draft
            immediately, and a verdict corrects the rest of the chunk when it arrives. A chunk policy alone: synchronous
            idles while it infers; naive plays the next chunk after this one; aligned plays each action at the time it
            is for; roll_forward shows the policy the robot as it will be; inpainting is aligned, and the new chunk
            continues the old one.
        execute_actions: actions of a chunk that are played, of a chunk policy alone; half of them if not given.
        overlap_actions: the next inference begins when as few are left to play; half of the executed ones if not given.
        idle: what is sent when a chunk policy's actions have run out: the last action again, or the stop action.
        steps: Euler steps of a flow policy.
        rate_hz: control rate; the policies' own if not given.
        episodes: number of episodes of a simulated robot.
        seconds: how long a real robot runs [s].
        token_file: file with the server's bearer token; the variable SPECACT_TOKEN if not given.
        ca: PEM file of the authority that signed the server's certificate, for wss and https.
        jpeg_quality: send camera frames as JPEG of this quality, 1 to 95; raw if not given.
        name: name of this robot on the server's status page.
        seed: random seed.
        json: print the summary as JSON.
    """
    options = dict(locals())
    for option in ("deadline_ms", "max_chunk_age_ms", "seconds", "episodes"):
        value = options[option]
        if value is not None and not 0.0 < value < math.inf:
            raise ConfigError(f"--{option.replace('_', '-')} must be positive and finite, got {value}")
    if rate_hz is not None and rate_hz not in RATES_HZ:
        raise ConfigError(f"--rate-hz must be {RATES_HZ}, got {rate_hz}")
    if (bundle is None) == (policy is None):
        raise ConfigError("give either --bundle, a pair of policies, or --policy, a chunk policy alone")
    _refuse_unfit(options, execution, of_pair=policy is None)
    still = None if stop_action is None else np.array(stop_action, np.float32)
    fallback = Fallback(on_miss, max_consecutive_misses, still)
    age_s = None if max_chunk_age_ms is None else max_chunk_age_ms / 1e3
    with Interrupts() as interrupts, ExitStack() as stack:
        if bundle is not None:
            plan = plan_pair(
                stack, bundle, server or "ws://127.0.0.1:8600", draft=draft, gate=gate,
                gate_options=gate_options, rate=rate, hold=hold,
                latency_budget_ms=latency_budget_ms, link_share_kbit=link_share_kbit, audit_rate=audit_rate,
                deadline_ms=deadline_ms, fallback=fallback, age_s=age_s, overlap=overlap, late=execution == "late",
                sampling=sampling, rate_hz=rate_hz, token=read_token(token_file), ca=ca, jpeg_quality=jpeg_quality,
                name=name, seed=seed,
            )  # fmt: skip
        else:
            assert policy is not None and execution != "late", "looked at above"
            plan = plan_policy(
                stack, policy, execution, execute=execute_actions, overlap=overlap_actions, idle=idle, steps=steps,
                deadline_ms=deadline_ms, fallback=fallback, age_s=age_s, rate_hz=rate_hz,
                token=read_token(token_file), ca=ca, jpeg_quality=jpeg_quality, name=name, seed=seed,
            )  # fmt: skip
        drive(plan, interrupts, robot, env, seconds=seconds, episodes=episodes, seed=seed, json=json)


def _refuse_unfit(options: dict[str, Any], execution: str, *, of_pair: bool) -> None:
    """Refuses options that the kind of policies does not have."""
    parameters = inspect.signature(run).parameters
    given = [name for name, value in options.items() if value != parameters[name].default]
    unfit = [name for name in given if name in (_OF_POLICIES if of_pair else _OF_PAIRS)]
    if unfit:
        option = unfit[0].replace("_", "-")
        instead = "; for a policy on a server: --policy ws://HOST:PORT" if unfit[0] == "server" else ""
        raise ConfigError(
            f"--{option} is for a chunk policy alone, and --bundle names a pair; leave it out" if of_pair
            else f"--{option} is for a pair of policies, and --policy names one alone; leave it out{instead}"
        )  # fmt: skip
    if of_pair and execution not in ("synchronous", "late"):
        raise ConfigError(
            f"--execution {execution} is for a chunk policy alone (--policy); a pair runs synchronous or late"
        )
    if not of_pair and execution == "late":
        raise ConfigError(
            "--execution late is for a pair of policies (--bundle), whose draft acts at once; a chunk policy alone "
            f"runs {', '.join(get_args(Kind))}"
        )
