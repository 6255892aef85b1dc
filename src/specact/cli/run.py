"""``specact run`` drives a robot with a pair, whose target is on a server."""

from __future__ import annotations

import math
import re
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from specact.cli.driving import Plan, Session, about
from specact.cli.options import ConfigFile, Flat, Maybe, Options, Parts, Rare
from specact.cli.output import remark, text_of
from specact.errors import ConfigError
from specact.execution.player import WAIT, LateVerdicts, check_late
from specact.gates import DriftAlarm
from specact.gates.audit import AuditEstimator, expected_true_skip
from specact.gates.calibration import RateCheck, deciding_gate, find_calibration
from specact.gates.controller import LatencyBudget, LinkBudget, RateBudget
from specact.gates.settings import UNRATED, load_gate
from specact.interrupts import Interrupts
from specact.pair import Pair, Verifier
from specact.policy import SpeculativePolicy
from specact.records import BelowOne, Share
from specact.remote.client import Client
from specact.remote.target import remote_verifier
from specact.robot.loop import Acting, Journal, Tick
from specact.systems.roboecc import SplitTarget, placed_target
from specact.systems.staged import load_stages, split_contract
from specact.wire.messages import Deadline, exchange_bytes

# Counters of late verdicts in the summary, by their names there.
_LATE_COUNTS = {"asked": "wanted", "requests": "transmitted", "in_time": "in_time", "replaced": "replaced",
                "missed": "missed"}  # fmt: skip
_PATIENT_MS = 10_000.0


@dataclass(frozen=True)
class Details(Options):
    """What few robots need."""

    gate_options: tuple[str, ...] = ()  # parameters of the gate, NAME=VALUE; those of its calibration if not given
    audit_rate: BelowOne = 0.0  # share of the skipped steps that are verified anyway, to measure the cost of skipping
    sampling: Literal["device", "server"] = "device"  # where codes are sampled; in the paper on the server
    # what specact split wrote of the target, which the server serves too: it runs the first stages, the device the
    # others; FOLDER@CUT says how many, otherwise what is fastest on the link
    split: Maybe[str] = None
    activations: Maybe[Literal["float16", "uint8", "float32"]] = None  # of a stage; float16, or exact float32


@dataclass(frozen=True)
class Run(Options):
    """Drive a robot with a pair: a draft acts, and a gate says when to ask the target. More: --help-all."""

    pair: Positional[str]  # path, name or MODULE:NAME of a pair, which the server must serve too
    server: str = "ws://127.0.0.1:8600"  # or openpi:ws://HOST:PORT#FILE.toml
    gate: str = "adahi"  # uncertainty, learned, random, always, never, MODULE:GATE
    rate: Maybe[Share] = None  # share of inferences that ask, as calibrated; 0.6 if not given
    hold: Maybe[str] = None  # uncalibrated: a share (0.4), mean time (30ms) or share of the link (100kbit)
    # verdicts come late, and correct a draft or are corrected
    execution: Literal["synchronous", "late", "corrected"] = "synchronous"
    # how long a step waits; a control period if not given, with late a chunk
    deadline_ms: Maybe[Deadline] = None
    session: Flat[Session] = field(default_factory=Session)
    config: ConfigFile = None  # file of options; what is typed goes first
    parts: Rare[Parts] = field(default_factory=Parts)
    details: Rare[Details] = field(default_factory=Details)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate is not None and (self.hold is not None or self.gate in UNRATED):
            other = f"--gate {self.gate}" if self.hold is None else "--hold"
            raise ConfigError(f"--rate does nothing beside {other}; leave one of the two out")
        if self.details.activations if self.details.split is None else self.details.sampling == "server":
            raise ConfigError("--activations is for a target in stages (--split), --sampling server for any other")

    def run(self) -> None:
        with Interrupts() as interrupts, ExitStack() as stack:
            self.session.drive(self._plan(stack), interrupts)

    def _plan(self, stack: ExitStack) -> Plan:
        """The policies, connected to the server; the stack closes the client."""
        pair, late = self.parts.load(self.pair), self.execution != "synchronous"
        if late and (self.execution == "corrected") != (pair.corrects > 0):
            raise ConfigError(
                "--execution corrected is for a corrector, which specact train makes with a recipe of kind = "
                f'"corrector", and late for any other pair; leave out --execution {self.execution}'
            )
        rate = 0.6 if self.rate is None else self.rate
        details, tuning = self.details, self.session.tuning
        if late and details.audit_rate:
            raise ConfigError("--audit-rate needs verdicts that are waited for, so leave out --execution")
        period_s = 1.0 / (tuning.rate_hz or pair.rate_hz)
        chunk_s = period_s * pair.execute
        of_use_s = period_s * max(pair.execute, pair.corrects)  # for so long a chunk is played
        deadline_ms = self.deadline_ms or 1e3 * (of_use_s if late else period_s)
        # With late verdicts the draft's actions are executed immediately.
        usual_age_s = chunk_s + (period_s if late else max(period_s, deadline_ms / 1e3))
        fallback = self.session.fallback_within(usual_age_s, pair.units)
        budget = None if self.hold is None else read_budget(self.hold, pair, 1.0 / chunk_s)
        gate = deciding_gate(pair, self.gate, rate, budget, details.gate_options)
        gate.audit_rate = details.audit_rate
        # A verdict in flight suppresses requests: late verdicts say nothing of the gate's own rate.
        watched = budget is None and not late and load_gate(self.gate).calibrated
        check = RateCheck(self.gate, rate, find_calibration(pair, self.gate, rate)) if watched else None
        if check is not None and check.warning:
            remark(check.warning, warn=True)
        audits = audits_of(pair, self.gate, rate, budget) if details.audit_rate else None
        # What a latency leaves room for is not known before.
        share = 1.0 if budget is None or isinstance(budget, LatencyBudget) else budget.rate
        verifier, client, placed = self._verifier(stack, pair, deadline_ms, share / chunk_s, period_s)
        policy = SpeculativePolicy(
            pair, gate, verifier=verifier, fallback=fallback,
            verdicts=LateVerdicts(math.inf) if late else WAIT, seed=tuning.seed,
        )  # fmt: skip
        client.report = policy.counts

        def note(tick: Tick) -> None:
            if check is not None and tick.record is not None and check.take(tick.record.decision):
                remark(check.warning, warn=True)
            if audits is not None and tick.record is not None and audits.take(tick.record) and audits.alarm is not None:
                remark(
                    f"the true skip ratio has left its calibrated level of {audits.alarm.level:.2f}: "
                    f"{text_of(true_skip(audits))}; check sensors and policies, or calibrate again",
                    warn=True,
                )

        def summarise(journal: Journal, acting: Acting) -> dict[str, Any]:
            return journal.summary() | {
                "held_rate": None if budget is None else budget.rate,
                "true_skip": None if audits is None else true_skip(audits),
                "late": {name: policy.counts[count] for name, count in _LATE_COUNTS.items()} if late else None,
                "cuts": None if placed is None else dict(placed.counts),
                "link": dict(client.counts),
            }

        described = about(pair.name, pair.fingerprint, pair.units, gate=self.gate)
        return Plan(pair.env, pair.observation, period_s, lambda robot: policy, summarise, described, note, client)

    def _verifier(
        self, stack: ExitStack, pair: Pair[Any], deadline_ms: float, rate_hz: float, period_s: float
    ) -> tuple[Verifier, Client, SplitTarget[Any] | None]:
        """The target on the server, its connected client, and the part of the target that is on the device."""
        tuning, details = self.session.tuning, self.details
        endpoint = self.session.access.endpoint(self.server, pair.exchange.contract)
        folder, _, cut = (details.split or "").rpartition("@")
        fixed = int(cut) if folder and cut.isdecimal() else None
        staged = None if details.split is None else load_stages(Path(details.split if fixed is None else folder))
        contract = pair.exchange.contract if staged is None else split_contract(staged.spec, staged.fingerprint)
        placed: SplitTarget[Any] | None = None
        late = self.execution != "synchronous" and self.gate != "never"

        def connected(**expected: float | None) -> Client:
            client = Client(endpoint, contract, tuning.name, tuning.jpeg_quality, **expected)
            stack.enter_context(client).connect(10.0)
            return client

        def verifier(client: Client, within_ms: float) -> Verifier:
            return (
                remote_verifier(client, pair, within_ms, details.sampling) if placed is None else pair.verifier(placed)
            )

        if late or staged is not None:
            # Over a connection of its own: what is tried is not counted in the run.
            with closing(connected()) as trial:
                if staged is not None:
                    precision = details.activations or "float16"
                    placed = placed_target(pair, staged, trial, _PATIENT_MS, cut=fixed, precision=precision)
                if late:
                    check_late(verifier(trial, _PATIENT_MS), pair, period_s)
        client = connected(rate_hz=rate_hz or None, deadline_ms=deadline_ms)
        placed = placed and placed.over(client, deadline_ms)
        return verifier(client, deadline_ms), client, placed


def read_budget(text: str, pair: Pair[Any], inferences_hz: float) -> RateBudget:
    """A share of inferences, ``0.4``, their mean time, ``30ms``, or a share of the link, ``100kbit`` per second.

    Anything else, and a number out of range, is a ConfigError.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(ms|kbit|)", text)
    if match is None:
        raise ConfigError(
            "--hold takes a share of inferences (0.4), their mean time (30ms) or a share of the link (100kbit), got "
            f"{text!r}"
        )
    amount = float(match[1])
    if match[2] == "ms":
        return LatencyBudget(amount / 1e3)
    if match[2] == "kbit":
        return LinkBudget(amount * 1e3 / 8.0, exchange_bytes(pair.exchange.contract), inferences_hz)
    return RateBudget(amount)


def audits_of(pair: Pair[Any], gate: str, rate: float, budget: RateBudget | None) -> AuditEstimator:
    """Audits of the skipped steps, with an alarm if the gate's calibration predicts the true skip ratio."""
    # The rate that holds a latency is unknown in advance, and with it the expected cost of skipping.
    rate = rate if budget is None else budget.rate
    calibration = None if isinstance(budget, LatencyBudget) else find_calibration(pair, gate, rate)
    # Calibrations of families without a rejection probability do not predict it.
    if calibration is None or "rejections" not in calibration.model:
        return AuditEstimator()
    free = calibration.held_out.get("free", 1.0)
    return AuditEstimator(DriftAlarm(expected_true_skip(calibration.model["rejections"], rate, free)))


def true_skip(audits: AuditEstimator) -> dict[str, Any]:
    """The estimate of the true skip ratio, as plain values."""
    estimate, alarm = audits.estimate(), audits.alarm
    known = {"expected": None, "alarm": None} if alarm is None else {"expected": alarm.level, "alarm": alarm.raised}
    counts = {"audits": estimate.count, "missed": audits.missed}
    return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high} | counts | known
