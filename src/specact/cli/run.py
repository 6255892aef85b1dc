"""``specact run`` drives a real or simulated robot in real time, with a pair and a server, or a chunk policy alone."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from specact.cli.driving import Plan, drive
from specact.cli.options import Flat
from specact.cli.serve import read_token
from specact.cli.unused import changed, refuse_unused
from specact.errors import ConfigError
from specact.execution.strategy import Execution, Kind
from specact.execution.verdicts import WAIT, LateVerdicts
from specact.fallback import Fallback, OnMiss
from specact.interrupts import Interrupts
from specact.plugins import load_maker
from specact.ranges import POSITIVE_SHARE, SEED
from specact.runtime.limits import RATES_HZ

if TYPE_CHECKING:
    from specact.families.staged.stages import StagedFolder
    from specact.remote_policy import RemotePolicy
    from specact.robot.chunks import ChunkRunner
    from specact.robot.inference import ChunkSource
    from specact.robot.loop import Journal, Tick
    from specact.units import ActionUnits

# Counters of late verdicts in the summary.
_LATE_COUNTS = ("wanted", "transmitted", "in_time", "replaced", "missed")
# Of an inference of a chunk policy alone, of a real robot's run, and of a simulated robot's.
_DEFAULT_DEADLINE_S, _DEFAULT_SECONDS, _DEFAULT_EPISODES = 1.0, 60.0, 5


@dataclass(frozen=True)
class PairOptions:
    """Only for a pair of policies (--bundle)."""

    server: str | None = None
    """Address of the target's server: ws:// or wss:// (WebSocket), http:// or https:// (JSON, as in the paper), host
    and port; ws://127.0.0.1:8600 if not given. openpi:ws://HOST:PORT#FILE.toml is a server of openpi's protocol, see
    docs/openpi.md."""
    draft: str | None = None
    """Draft of a pair of chunk policies, if the pair does not hold it: MODULE:NAME or a .toml file."""
    target: str | None = None
    """Target of FLASH's block, if the block drafts on the device and needs the target's encoder: lerobot:PATH@HZ."""
    decoding: str = ""
    """How chunks are drafted and verified: for a token policy such as specvla, kerv or heisd_fixed, see docs/tokens.md;
    for a flow policy such as flash, see docs/flash.md."""
    gate: str = "deviation"
    """Selects the steps sent to the server: deviation, uncertainty, learned, learned_action, random, always, never, or
    MODULE:GATE for one of your own."""
    gate_options: tuple[str, ...] = ()
    """Keyword arguments of MODULE:GATE, each as NAME=VALUE; those of its calibration if not given."""
    rate: float = 0.6
    """Target share of inferences to transmit."""
    hold: bool = False
    """Hold that rate online, also under drift; needs no calibration."""
    latency_budget_ms: float | None = None
    """Hold this mean time of an inference [ms] instead of a rate."""
    link_share_kbit: float | None = None
    """Hold this share of the link, in kbit/s of requests and replies, instead of a rate."""
    audit_rate: float = 0.0
    """Share of the skipped steps that are verified anyway, to measure the cost of skipping; 0.02 is sufficient."""
    sampling: Literal["device", "server"] = "device"
    """Where codes are sampled: on the device, or on the server as in the paper."""
    split: Path | None = None
    """Folder that specact split wrote of the pair's target, which the server serves: it runs the first stages of the
    target, and the device the others."""
    cut: int | None = None
    """With --split, how many stages the server runs; if not given, the number with the shortest predicted time on the
    link."""
    activations: Literal["float16", "uint8", "float32"] = "float16"
    """With --split, in what precision the server's last tensor is sent; float32 is exact."""


@dataclass(frozen=True)
class PolicyOptions:
    """Only for a chunk policy alone (--policy)."""

    execute_actions: int | None = None
    """Actions of a chunk that are played; half of them if not given."""
    overlap_actions: int | None = None
    """The next inference begins when as few are left to play; half of the executed ones if not given."""
    idle: Literal["hold_last", "stop_action", "nothing"] = "hold_last"
    """What is sent when the policy's actions have run out: the last action again, the stop action, or nothing, for a
    robot that holds by itself."""
    steps: int = 10
    """Euler steps of a flow policy."""


@dataclass(frozen=True)
class RunOptions:
    """Policies, robot, and handling of misses."""

    bundle: str | None = None
    """Path or name of a pair of policies on this device, or MODULE:NAME for one of your own; the server must serve the
    same one."""
    policy: str | None = None
    """Instead, a chunk policy alone: ws://, wss://, http:// or https:// with host and port of a server that serves one,
    or for inference on this device a flow bundle, BUNDLE#target, a .toml file that describes an ONNX file,
    lerobot:PATH@HZ, or MODULE:NAME; openpi:ws://HOST:PORT#FILE.toml is a policy on a server of openpi's protocol."""
    robot: str | None = None
    """MODULE:CLASS with observe() and act(action), optionally stop() and roll_forward(observation, actions), created
    without arguments; a simulated robot if not given."""
    env: str | None = None
    """Environment of the simulated robot, a name or MODULE:TASK; the policies' own if not given."""
    live: bool = False
    """The simulated world does not wait for actions: it advances at the control rate in its own process, and the robot
    holds while there is no action."""
    device_share: float | None = None
    """Share of one core for everything except the simulated world, as on a slower device; needs Linux and permission to
    create control groups."""
    deadline_ms: float | None = None
    """How long a step waits for the target; if not given, one control period, with --execution late the duration of a
    chunk of actions. Of a chunk policy alone: how long an inference may take; 1000 ms if not given."""
    on_miss: OnMiss = "execute_draft"
    """What is executed if the target does not reply in time. Without a usable observation there is no draft, and
    execute_draft holds the last action. With a chunk policy alone the rest of the chunk is played, unless it is
    stop."""
    max_consecutive_misses: int | None = None
    """After more consecutive misses than this the robot stops; steps without a usable observation count."""
    stop_action: tuple[float, ...] | None = None
    """Action that makes this robot stand still, in the environment's units; sent at the end, unless the robot has
    stop(). Required if a miss can stop the robot."""
    max_chunk_age_ms: float | None = None
    """The rest of a chunk whose observation is older than this is dropped and inferred again, as after a stall. If not
    given: the duration of a chunk plus the longer of deadline and control period."""
    max_stall_ms: float = 2000.0
    """The robot is stopped where its own code takes longer than this to observe or to act."""
    execution: Literal[Kind, "late"] = "synchronous"
    """How chunks of actions are played. A pair: synchronous waits for the server; late executes the draft immediately,
    and a verdict corrects the rest of the chunk when it arrives. A chunk policy alone: synchronous idles while it
    infers; naive plays the next chunk after this one; aligned plays each action at the time it is for; roll_forward
    shows the policy the robot as it will be; inpainting is aligned, and the new chunk continues the old one."""
    rate_hz: float | None = None
    """Control rate [Hz]; the policies' own if not given."""
    episodes: int | None = None
    """Number of episodes of a simulated robot; 5 if not given."""
    seconds: float | None = None
    """How long a real robot (--robot) runs [s]; 60 if not given."""
    token_file: Path | None = None
    """File with the server's bearer token; the variable SPECACT_TOKEN if not given."""
    ca: Path | None = None
    """PEM file of the authority that signed the server's certificate, for wss and https."""
    jpeg_quality: int | None = None
    """Send camera frames as JPEG of this quality, 1 to 95; raw if not given."""
    name: str = "robot"
    """Name of this robot on the server's status page."""
    seed: int = 0
    """Random seed."""
    record: Path | None = None
    """Record observations, actions, decisions and times to this file (MCAP), see docs/recordings.md."""
    json: bool = False
    """Print the summary as JSON."""
    pair: PairOptions = PairOptions()
    alone: PolicyOptions = PolicyOptions()


def run(options: Flat[RunOptions]) -> None:
    """Run a real or simulated robot in real time, at its control rate: a pair with a server, or a chunk policy alone.

    The robot is stopped at the end, with its stop() method if it has one, otherwise with the stop action. With neither,
    the last action stays in force. The exit status is 0 after the given time, 2 after an error (1 if the robot raised
    it), and 130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP. The summary is printed in each case, if the robot has
    acted.
    """
    for option in ("deadline_ms", "max_chunk_age_ms", "seconds", "episodes"):
        value = getattr(options, option)
        if value is not None and not 0.0 < value < math.inf:
            raise ConfigError(f"--{option.replace('_', '-')} must be positive and finite, got {value}")
    if options.rate_hz is not None and options.rate_hz not in RATES_HZ:
        raise ConfigError(f"--rate-hz must be {RATES_HZ}, got {options.rate_hz}")
    if options.seed not in SEED:
        raise ConfigError(f"--seed must be {SEED}, got {options.seed}")
    if (options.bundle is None) == (options.policy is None):
        raise ConfigError("give either --bundle, a pair of policies, or --policy, a chunk policy alone")
    _refuse_unfit(options)
    # Before a connection is made.
    if options.robot is not None:
        load_maker(options.robot, "robot")
    if options.device_share is not None and options.device_share not in POSITIVE_SHARE:
        raise ConfigError(f"--device-share must be {POSITIVE_SHARE}, got {options.device_share}")
    fallback = Fallback(
        options.on_miss, options.max_consecutive_misses, options.stop_action, options.max_chunk_age_ms,
        options.max_stall_ms,
    )  # fmt: skip
    with Interrupts() as interrupts, ExitStack() as stack:
        plan = (_plan_policy if options.bundle is None else _plan_pair)(stack, options, fallback)
        drive(
            plan, interrupts, options.robot, options.env, live=options.live, device_share=options.device_share,
            seconds=options.seconds or _DEFAULT_SECONDS, episodes=options.episodes or _DEFAULT_EPISODES,
            seed=options.seed, record=options.record, json=options.json,
        )  # fmt: skip


def _refuse_unfit(options: RunOptions) -> None:
    """Refuses options that do not apply to this kind of robot or of policies."""
    if options.robot is None:
        refuse_unused(
            changed(options, ["seconds"]), "is for a real robot (--robot); for a simulated one use --episodes"
        )
    else:
        refuse_unused(changed(options, ["episodes"]), "is for a simulated robot; with --robot use --seconds")
        refuse_unused(
            changed(options, ["env", "live", "device_share"]), "is for a simulated robot; leave it out with --robot"
        )
    if options.policy is None:
        refuse_unused(changed(options.alone), "is for a chunk policy alone, and --bundle names a pair; leave it out")
        _refuse_unused_rate(options.pair)
        if options.execution not in ("synchronous", "late"):
            raise ConfigError(
                f"--execution {options.execution} is for a chunk policy alone (--policy); a pair runs synchronous or "
                "late"
            )
    else:
        for name, given in changed(options.pair).items():
            instead = "; for a policy on a server: --policy ws://HOST:PORT" if name == "server" else ""
            refuse_unused(
                {name: given}, f"is for a pair of policies, and --policy names one alone; leave it out{instead}"
            )
        _refuse_unfit_policy(options, options.policy)


def _refuse_unused_rate(pair: PairOptions) -> None:
    """Refuses a rate where something else determines it."""
    budgets = changed(pair, ["latency_budget_ms", "link_share_kbit"])
    fixed = [f"--{name.replace('_', '-')}" for name, given in budgets.items() if given]
    fixed += [f"--gate {pair.gate}"] * (pair.gate in ("always", "never"))
    if fixed:
        refuse_unused(changed(pair, ["rate"]), f"has no effect with {fixed[0]}; leave one of them out")


def _refuse_unfit_policy(options: RunOptions, policy: str) -> None:
    """Refuses options that do not apply to a chunk policy alone, on a server or on this device."""
    if options.execution == "late":
        raise ConfigError(
            "--execution late is for a pair of policies (--bundle), whose draft acts at once; a chunk policy alone "
            f"runs {', '.join(get_args(Kind))}"
        )
    if options.on_miss == "hold_last":
        raise ConfigError(
            "--on-miss hold_last is for a pair of policies (--bundle); a policy alone plays the rest of its chunk and "
            "then idles (--idle hold_last), or stops (--on-miss stop)"
        )
    if "://" in policy:
        refuse_unused(
            changed(options.alone, ["steps"]), "is for inference on this device; a server has its own: specact serve"
        )
    else:
        refuse_unused(
            changed(options, ["token_file", "ca", "jpeg_quality", "name"]),
            f"is for a server, and {policy} runs on this device; leave it out",
        )


def _plan_pair(stack: ExitStack, options: RunOptions, fallback: Fallback) -> Plan:
    """A pair whose target is on a server; the stack closes the client."""
    from specact.cli.gating import audit_estimator, budget_of, record_audit, true_skip_of
    from specact.families.chunks.openpi import target_endpoint
    from specact.families.load import load_pair
    from specact.families.staged.wire import split_dialect
    from specact.gates.calibration import deciding_gate
    from specact.placement.target import SplitTarget, placed_target
    from specact.policy import SpeculativePolicy
    from specact.remote.client import Client
    from specact.remote.target import positive_deadline, remote_verifier
    from specact.remote.transport import tls_context

    pair, late, deadline_ms = options.pair, options.execution == "late", options.deadline_ms
    assert options.bundle is not None, "checked in run"
    loaded = load_pair(options.bundle, draft=pair.draft, target=pair.target, decoding=pair.decoding)
    period_s = 1.0 / (options.rate_hz or loaded.rate_hz)
    chunk_s = period_s * loaded.execute
    deadline_s = positive_deadline(1e3 * (chunk_s if late else period_s) if deadline_ms is None else deadline_ms) / 1e3
    # With late verdicts the draft's actions are executed immediately.
    fallback = _aged(fallback, chunk_s + (period_s if late else max(period_s, deadline_s)))
    _check_stop_action(fallback, loaded.units)
    endpoint = target_endpoint(
        pair.server or "ws://127.0.0.1:8600", read_token(options.token_file), tls_context(options.ca),
        loaded.codec.dialect,
    )  # fmt: skip
    if pair.link_share_kbit is not None and (endpoint.scheme not in ("ws", "wss") or pair.sampling != "device"):
        raise ConfigError(
            "--link-share-kbit needs ws:// or wss:// and sampling on the device; leave out http:// and "
            "--sampling server"
        )
    if late and pair.audit_rate:
        raise ConfigError("--execution late cannot be combined with --audit-rate; leave one of them out")
    budget = budget_of(pair.hold, pair.rate, pair.latency_budget_ms, pair.link_share_kbit, loaded, 1.0 / chunk_s)
    gate = deciding_gate(loaded, pair.gate, pair.rate, budget, pair.gate_options)
    gate.audit_rate = pair.audit_rate
    # The rate that holds a latency is unknown in advance, and with it the expected cost of skipping.
    known_rate = None if pair.latency_budget_ms else pair.rate if budget is None else budget.rate
    audits = audit_estimator(loaded, pair.gate, known_rate) if pair.audit_rate else None
    staged = _stages(pair)
    dialect = loaded.codec.dialect if staged is None else split_dialect(staged.spec, staged.fingerprint)
    client = stack.enter_context(Client(endpoint, dialect, options.name, jpeg_quality=options.jpeg_quality))
    client.connect(10.0)
    placed: SplitTarget[Any] | None = None
    if staged is None:
        verifier = remote_verifier(client, loaded, 1e3 * deadline_s, pair.sampling)
    else:
        placed = placed_target(loaded, staged, client, 1e3 * deadline_s, cut=pair.cut, precision=pair.activations)
        verifier = loaded.verifier(placed)
    policy = SpeculativePolicy(
        loaded,
        gate,
        verifier=verifier,
        fallback=fallback,
        verdicts=LateVerdicts(math.inf) if late else WAIT,
        seed=options.seed,
    )
    client.report = policy.counts

    def note(tick: Tick) -> None:
        if audits is not None and tick.record is not None:
            record_audit(audits, tick.record)

    def summarise(journal: Journal) -> dict[str, Any]:
        return journal.summary() | {
            "held_rate": None if budget is None else budget.rate,
            "true_skip": None if audits is None else true_skip_of(audits),
            "late": {name: policy.counts[name] for name in _LATE_COUNTS} if late else None,
            "cuts": None if placed is None else dict(placed.counts),
            "line": dict(client.counts),
        }

    about = {
        "policy": loaded.name, "fingerprint": loaded.fingerprint, "units": _describe_units(loaded.units),
        "gate": pair.gate,
    }  # fmt: skip
    return Plan(loaded.env, loaded.observation, period_s, fallback.still, lambda robot: policy, note, summarise, about)


def _stages(pair: PairOptions) -> StagedFolder | None:
    """The target's stages, or None if it is not split."""
    from specact.families.staged.stages import load_staged

    if pair.split is None:
        if pair.cut is not None or pair.activations != "float16":
            raise ConfigError(
                "--cut and --activations are for a target in stages; add --split FOLDER or leave them out"
            )
        return None
    if pair.sampling != "device" or pair.link_share_kbit is not None:
        raise ConfigError("--split cannot be combined with --sampling server or --link-share-kbit; leave these out")
    return load_staged(pair.split)


def _plan_policy(stack: ExitStack, options: RunOptions, fallback: Fallback) -> Plan:
    """A chunk policy alone, in this process or on a server; the stack closes the client, and ends the inferences."""
    from specact.families.chunks.flow import FlowPolicy
    from specact.families.chunks.sources import load_policy, try_out
    from specact.remote_policy import connect
    from specact.robot.chunks import ChunkRunner
    from specact.robot.inference import InferenceThread, LocalSource

    alone, source, kind = options.alone, options.policy, options.execution
    assert source is not None and kind != "late", "checked in run"
    deadline_s, env = _DEFAULT_DEADLINE_S if options.deadline_ms is None else options.deadline_ms / 1e3, ""
    remote: RemotePolicy | None = None
    chunk_source: ChunkSource
    if "://" in source:
        remote = connect(
            source, deadline_ms=1e3 * deadline_s, token=read_token(options.token_file), ca=options.ca,
            robot=options.name, timeout=10.0, jpeg_quality=options.jpeg_quality, seed=options.seed,
        )  # fmt: skip
        chunk_source = stack.enter_context(remote)
        served = remote.client.welcome
        assert served is not None, "it has connected"
        about: dict[str, Any] = {"policy": served.bundle, "fingerprint": served.target, "units": None}
    else:
        loaded = load_policy(source, steps=alone.steps)
        if not isinstance(loaded.policy, FlowPolicy):
            refuse_unused(changed(alone, ["steps"]), f"is for a flow policy, and {source} is none; leave it out")
        try_out(loaded)
        chunk_source, env = LocalSource(loaded.policy), loaded.env
        _check_stop_action(fallback, loaded.units)
        about = {"policy": loaded.name, "fingerprint": loaded.fingerprint, "units": _describe_units(loaded.units)}
    spec = chunk_source.spec
    execute = max(1, spec.chunk // 2) if alone.execute_actions is None else alone.execute_actions
    overlap = (0 if kind == "synchronous" else execute // 2) if alone.overlap_actions is None else alone.overlap_actions
    execution = Execution(kind, execute, overlap)
    period_s = 1.0 / (options.rate_hz or spec.rate_hz)
    fallback = _aged(fallback, max(deadline_s, overlap * period_s) + (execute + 1) * period_s)
    inference = stack.enter_context(InferenceThread(chunk_source))
    runners: list[ChunkRunner] = []

    def make(robot: Any) -> ChunkRunner:
        runner = ChunkRunner(
            inference,
            execution,
            period_s=period_s,
            roll_forward=getattr(robot, "roll_forward", None),
            idle=alone.idle,
            fallback=fallback,
            # The client itself enforces the deadline of a server.
            deadline_s=math.inf if remote is not None else deadline_s,
            seed=options.seed,
        )
        runners.append(runner)
        return runner

    def summarise(journal: Journal) -> dict[str, Any]:
        return (
            journal.control() | runners[0].summary() | {"line": None if remote is None else dict(remote.client.counts)}
        )

    return Plan(env, spec.observation, period_s, fallback.still, make, lambda tick: None, summarise, about)


def _describe_units(units: ActionUnits | None) -> dict[str, Any] | None:
    """Units as plain values."""
    return None if units is None else {"centre": units.centre.tolist(), "scale": units.scale.tolist()}


def _check_stop_action(fallback: Fallback, units: ActionUnits | None) -> None:
    """Refuses a stop action that is not a valid action of the robot."""
    if fallback.still is not None and units is not None:
        try:
            units.normalise(fallback.still)
        except ConfigError as error:
            raise ConfigError(f"--stop-action: {error}") from None


def _aged(fallback: Fallback, usual_s: float) -> Fallback:
    """The fallback with a maximum age of a chunk's observation."""
    return replace(fallback, max_chunk_age_ms=1e3 * usual_s) if fallback.max_chunk_age_ms is None else fallback
