"""What drives a robot in ``specact run``: a pair of policies with a server, or a chunk policy alone."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specact.cli.driving import Plan
from specact.errors import ConfigError
from specact.execution.strategy import Execution, Kind
from specact.execution.verdicts import WAIT, LateVerdicts
from specact.fallback import Fallback

if TYPE_CHECKING:
    from specact.robot.chunks import Idle
    from specact.robot.loop import Journal, Tick

# What is told of verdicts that nobody waited for.
LATE = ("wanted", "transmitted", "in_time", "replaced", "missed")
_PATIENCE_S = 1.0


def plan_pair(
    stack: ExitStack,
    bundle: str,
    server: str,
    *,
    draft: str | None,
    gate: str,
    rate: float,
    hold: bool,
    latency_budget_ms: float | None,
    link_share_kbit: float | None,
    audit_rate: float,
    deadline_ms: float | None,
    fallback: Fallback,
    age_s: float | None,
    overlap: bool,
    late: bool,
    sampling: Literal["device", "server"],
    rate_hz: float | None,
    token: str | None,
    ca: Path | None,
    jpeg_quality: int | None,
    name: str,
    seed: int,
) -> Plan:
    """A pair whose target is on a server; see :func:`~specact.cli.run.run` for what is not said here.

    Args:
        stack: closes the client.
        fallback: what is executed for a miss.
        age_s: the most that a chunk's observation may be old [s].
        late: whether verdicts are executed late.
        token: the server's.
    """
    from specact.cli.gating import audit_estimator, deciding_gate, true_skip_of, wanted_budget, watch
    from specact.families.load import load_pair
    from specact.gates.prefetch import PrefetchPredictor
    from specact.policy import SpeculativePolicy
    from specact.remote.client import Client
    from specact.remote.target import positive_deadline, remote_verifier
    from specact.remote.transport import Endpoint, trusting

    loaded = load_pair(bundle, draft=draft)
    if fallback.stop_action is not None:
        try:
            loaded.units.normalise(fallback.stop_action)
        except ConfigError as error:
            raise ConfigError(f"--stop-action: {error}") from None
    period_s = 1.0 / (loaded.rate_hz if rate_hz is None else rate_hz)
    chunk_s = period_s * loaded.execute
    deadline_s = positive_deadline(1e3 * (chunk_s if late else period_s) if deadline_ms is None else deadline_ms) / 1e3
    if age_s is None:
        # Where verdicts are late the draft's actions run at once.
        age_s = chunk_s + (period_s if late else max(period_s, deadline_s))
    endpoint = Endpoint.parse(server, token, trusting(ca))
    if link_share_kbit is not None and (endpoint.scheme not in ("ws", "wss") or sampling != "device"):
        raise ConfigError(
            "--link-share-kbit needs ws:// or wss:// and sampling on the device; leave out http:// and "
            "--sampling server"
        )
    if late and (sampling != "device" or audit_rate):
        raise ConfigError(
            "--execution late cannot be combined with --sampling server or --audit-rate; leave these options out"
        )
    budget = wanted_budget(hold, rate, latency_budget_ms, link_share_kbit, loaded, 1.0 / chunk_s)
    decides = deciding_gate(loaded, gate, rate, budget)
    decides.audit_rate = audit_rate
    # A latency's rate is not known beforehand, and so neither is what skipping at it should cost.
    known_rate = None if latency_budget_ms else rate if budget is None else budget.rate
    audits = audit_estimator(loaded, gate, known_rate) if audit_rate else None
    client = stack.enter_context(Client(endpoint, loaded.codec.dialect, name, jpeg_quality=jpeg_quality))
    client.connect(10.0)
    policy = SpeculativePolicy(
        loaded,
        decides,
        verifier=remote_verifier(client, loaded, 1e3 * deadline_s, sampling),
        fallback=fallback,
        prefetch=PrefetchPredictor(decides) if overlap and sampling == "device" and not late else None,
        verdicts=LateVerdicts(math.inf) if late else WAIT,
        max_chunk_age_s=age_s,
        seed=seed,
    )
    client.report = policy.counts

    def note(tick: Tick) -> None:
        if audits is not None and tick.record is not None:
            watch(audits, tick.record)

    def told(journal: Journal) -> dict[str, Any]:
        return journal.summary() | {
            "held_rate": None if budget is None else budget.rate,
            "true_skip": None if audits is None else true_skip_of(audits),
            "late": {name: policy.counts[name] for name in LATE} if late else None,
            "line": dict(client.counts),
        }

    return Plan(loaded.env, period_s, fallback.stop_action, lambda robot: policy, note, told)


def plan_policy(
    stack: ExitStack,
    source: str,
    kind: Kind,
    *,
    execute: int | None,
    overlap: int | None,
    idle: Idle,
    steps: int,
    deadline_ms: float | None,
    fallback: Fallback,
    age_s: float | None,
    rate_hz: float | None,
    token: str | None,
    ca: Path | None,
    jpeg_quality: int | None,
    name: str,
    seed: int,
) -> Plan:
    """A chunk policy alone, in this process or on a server; see :func:`plan_pair`.

    Args:
        stack: closes the client, and ends the thread of the inferences.
        source: the server's URL, or a name for :func:`~specact.families.chunks.sources.load_policy`.
        kind, execute, overlap: see :class:`~specact.execution.strategy.Execution`.
        idle, fallback: see :class:`~specact.robot.chunks.ChunkRunner`.
    """
    from specact.families.chunks.sources import load_policy, try_out
    from specact.remote_policy import RemotePolicy, connect
    from specact.robot.chunks import ChunkRunner
    from specact.robot.inference import ChunkSource, InferenceThread, LocalSource

    deadline_s, env = _PATIENCE_S if deadline_ms is None else deadline_ms / 1e3, ""
    remote: RemotePolicy | None = None
    asked: ChunkSource
    if "://" in source:
        remote = connect(
            source, deadline_ms=1e3 * deadline_s, token=token, ca=ca, robot=name, timeout=10.0,
            jpeg_quality=jpeg_quality, seed=seed,
        )  # fmt: skip
        asked = stack.enter_context(remote)
    else:
        loaded = load_policy(source, steps=steps)
        try_out(loaded)
        asked, env = LocalSource(loaded.policy), loaded.env
        if fallback.stop_action is not None and loaded.units is not None:
            try:
                loaded.units.normalise(fallback.stop_action)
            except ConfigError as error:
                raise ConfigError(f"--stop-action: {error}") from None
    spec = asked.spec
    execute = max(1, spec.chunk // 2) if execute is None else execute
    overlap = (0 if kind == "synchronous" else execute // 2) if overlap is None else overlap
    execution = Execution(kind, execute, overlap)
    period_s = 1.0 / (spec.rate_hz if rate_hz is None else rate_hz)
    if age_s is None:
        age_s = max(deadline_s, overlap * period_s) + (execute + 1) * period_s
    inference = stack.enter_context(InferenceThread(asked))
    runners: list[ChunkRunner] = []

    def make(robot: Any) -> ChunkRunner:
        runner = ChunkRunner(
            inference,
            execution,
            period_s=period_s,
            roll_forward=getattr(robot, "roll_forward", None),
            idle=idle,
            fallback=fallback,
            # A server's answer has this deadline where it is waited for.
            deadline_s=math.inf if remote is not None else deadline_s,
            max_chunk_age_s=age_s,
            seed=seed,
        )
        runners.append(runner)
        return runner

    def told(journal: Journal) -> dict[str, Any]:
        return (
            journal.control() | runners[0].summary() | {"line": None if remote is None else dict(remote.client.counts)}
        )

    return Plan(env, period_s, fallback.stop_action, make, lambda tick: None, told)
