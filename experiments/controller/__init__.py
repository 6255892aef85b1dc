"""Controllers of rate or latency under drift, and drift alarms, against a calibrated threshold.

Each robot runs 10,000 inferences, in successive episodes in virtual time on link wifi-paper; after half of them
something changes: noise on the observations, the draft (to the under-trained one), the set point of the rate, or the
link (to 5g). Steps that a controlled gate would skip are audited with probability 0.1. Robot k has seed k for its
episodes, seed 0 for its policy, and seed 1 for its noise. False alarms and delays are from resampled audits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.grid import Cell, Results, Run
from experiments.measure import seconds_of
from experiments.report import Report, Table, named, span
from specact import Pair, SpeculativePolicy, calibrated_gate, load_pair
from specact.families.codes.policy import CodeDrafter, CodePolicy, CodeVerifier
from specact.families.codes.sampling import CodeDistribution, rejection_probability
from specact.gates import Gate, Random
from specact.gates.audit import AuditEstimator, DriftAlarm, expected_true_skip
from specact.gates.calibration import find_calibration
from specact.gates.controller import Controller, LatencyBudget, RateBudget
from specact.gates.settings import gate_settings
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.rollout import episode_seed
from specact.links.link import load_link
from specact.links.model import round_trip
from specact.observation import Window
from specact.pair import Answer, Pending
from specact.rng import Role, StepAddress, stream
from specact.types import OffloadTimes, StageTimes, StepRecord, VirtualClock

END, WINDOW = 10_000, 200
RATE, NEW_RATE, AUDIT_RATE = 0.6, 0.4, 0.1
NOISE = {"ball": 0.1, "swarm": 0.1}  # standard deviation, in the observation's own units
BUDGET_S, DRAFT_S, TARGET_S = 0.010, 0.001, 0.003
DRIFTS = ("noise", "draft", "set point", "link")
Rows = dict[str, np.ndarray]


@dataclass(frozen=True)
class Life:
    """One robot's run: the drift after half of it, and whether its gate has a controller or a calibrated threshold."""

    env: str
    drift: str
    held: bool
    robot: int

    @property
    def cell(self) -> str:
        return f"{self.env}/{self.drift.replace(' ', '-')}/{'held' if self.held else 'fixed'}-{self.robot}"


# A calibrated threshold has no set point, so that drift does not apply to it.
LIVES = [
    Life(env, drift, held, robot)
    for env in NOISE
    for drift in DRIFTS
    for held, robots in ((True, 2), (False, 1))
    for robot in range(robots)
    if held or drift != "set point"
]


def plan(run: Run) -> Iterator[Cell]:
    """Every robot; the alarms on what they met; the time of a decision."""
    for life in LIVES:
        yield Cell(life.cell, partial(live, life))
    for env in NOISE:
        yield Cell(f"alarms/{env}", partial(alarms, env))
    yield Cell("decision", decision_us)


class Slow(CodePolicy):
    """A draft with an accounted time; it can be replaced."""

    def __init__(self, policy: CodePolicy, clock: VirtualClock) -> None:
        self.policy, self._clock = policy, clock

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        self._clock.sleep(DRAFT_S * len(windows))
        return self.policy.infer_batch(windows)


class Remote:
    """A target behind a link; the link can be replaced."""

    def __init__(self, bundle: Pair[Any], clock: VirtualClock, robot: int) -> None:
        self.link = load_link("wifi-paper")
        self._target, self._clock, self._rng = bundle.parts.target, clock, stream(0, Role.LINK, robot=robot)
        spec = bundle.parts.spec
        self._sizes = spec.target.nbytes, 4 * spec.codebooks * spec.codes * (1 + spec.chunk * spec.actions)

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[CodeDistribution]]:
        return Pending(lambda: self._answer(window))

    def _answer(self, window: Window) -> Answer[CodeDistribution]:
        network = round_trip(self.link, *self._sizes, self._clock.now(), self._rng)
        self._clock.sleep(network + TARGET_S)
        return Answer(self._target.infer(window), OffloadTimes(network=network, target=TARGET_S))


def live(life: Life, folder: Path, run: Run) -> dict[str, Any]:
    """Runs one robot; its inferences are kept in the folder for the alarms."""
    rows = inferences(life, 400 if run.quick else END)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "rows.npz", **rows)  # type: ignore[arg-type]
    return vars(life) | summarise(life, rows)


def inferences(life: Life, end: int) -> Rows:
    """One entry per inference: whether it was sent, would have been skipped, its acceptance, time, estimate, alarm."""
    bundle, task, clock = load_pair(life.env), load_task(life.env), VirtualClock()
    draft, remote, rate = Slow(bundle.parts.draft, clock), Remote(bundle, clock, life.robot), RateBudget(RATE)
    gate: Any = calibrated_gate(bundle, "adahi", RATE)
    if life.held:
        inner = gate_settings("adahi", bundle).build(bundle)
        inner.audit_rate = AUDIT_RATE
        gate = Controller(inner, LatencyBudget(BUDGET_S) if life.drift == "link" else rate)
    policy = SpeculativePolicy(
        bundle, gate, drafter=CodeDrafter(draft, bundle.parts.tokenizer), robot=life.robot, clock=clock,
        verifier=CodeVerifier(remote, bundle.parts.tokenizer),
    )  # fmt: skip
    audits = AuditEstimator(DriftAlarm(level_of(bundle)))
    robot, noise, sigma, episode = SimulatedRobot(task), stream(1, Role.DATA, robot=life.robot), 0.0, 0
    rows: list[tuple[Any, ...]] = []
    while len(rows) < end:
        policy.reset(episode)
        robot.start(episode_seed(life.robot, episode, task))
        while not robot.done:
            if len(rows) >= end // 2:
                sigma = drifted(life, bundle, draft, remote, rate)
            observation, wanted = robot.observe(), policy.wants_inference
            state = observation["state"] + sigma * noise.standard_normal(observation["state"].shape)
            robot.act(policy.act(observation | {"state": state.astype(np.float32)}))
            if wanted and policy.record is not None:
                rows.append(row_of(policy.record, bundle, audits))
        episode += 1
    names = ("sent", "would_skip", "kept", "took", "estimate", "alarm")
    return {name: np.array(column[:end], float) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def level_of(bundle: Pair[Any]) -> float:
    """The true skip ratio that the calibration promises."""
    calibration = find_calibration(bundle, "adahi", RATE)
    assert calibration is not None
    return expected_true_skip(calibration.model["rejections"], RATE)


def drifted(life: Life, bundle: Pair[Any], draft: Slow, remote: Remote, rate: RateBudget) -> float:
    """Applies the drift; returns the standard deviation of the noise."""
    if life.drift == "draft" and draft.policy is bundle.parts.draft:
        draft.policy = load_pair(f"{life.env}-undertrained").parts.draft
    elif life.drift == "set point":
        rate.rate = NEW_RATE
    elif life.drift == "link":
        remote.link = load_link("5g")
    return NOISE[life.env] if life.drift == "noise" else 0.0


def row_of(record: StepRecord, bundle: Pair[Any], audits: AuditEstimator) -> tuple[Any, ...]:
    """One inference of :func:`inferences`."""
    proposal, decision = record.proposal, record.decision
    known = None if record.outcome is None else record.outcome.evidence.target
    target = known or bundle.parts.target.infer(proposal.window)
    kept = np.prod(1.0 - rejection_probability(target.probs, proposal.evidence.draft.probs, proposal.evidence.codes))
    alarm, interval = audits.take(record), audits.estimate()
    skips = not decision.transmit or decision.reason == "audit"
    estimate = (np.nan if interval.mean is None else interval.mean, interval.low, interval.high)
    return decision.transmit, skips, kept, record.times.total, estimate, alarm


def summarise(life: Life, rows: Rows) -> dict[str, Any]:
    """The summary of one run.

    The set point is reached where the mean of the next WINDOW inferences is within 0.05, or 1 ms, of it.
    """
    half = len(rows["sent"]) // 2
    halves = slice(0, half), slice(half, None)
    skip, alarms = rows["would_skip"] > 0, np.flatnonzero(rows["alarm"])
    watched, set_point, tolerance = rows["sent"], NEW_RATE if life.drift == "set point" else RATE, 0.05
    if life.drift == "link":
        watched, set_point, tolerance = 1e3 * rows["took"], 1e3 * BUDGET_S, 1.0
    window = min(WINDOW, (len(watched) - half) // 2)
    off = np.abs(np.convolve(watched[half:], np.full(window, 1.0 / window), "valid") - set_point)
    close = np.flatnonzero(off <= tolerance)
    return {
        "rates": [float(rows["sent"][part].mean()) for part in halves],
        "mean_ms": [float(1e3 * rows["took"][part].mean()) for part in halves],
        "true_skip": [float(rows["kept"][part][skip[part]].mean()) for part in halves],
        "true_skip_of_life": float(rows["kept"][skip].mean()),
        "estimate": [float(value) for value in rows["estimate"][-1]],
        "alarm_after": int(alarms[0]) + 1 if len(alarms) else None,
        "reached_after": int(close[0]) if len(close) else None,
        "farthest": float(off.max()),
    }


def alarms(env: str, folder: Path, run: Run) -> dict[str, Any]:
    """False alarms and delays, from the controlled runs with their audits resampled 100 times.

    Without drift: the first halves of all runs, concatenated. The steps keep their order, and so their
    autocorrelation. With drift: the first half of a run, then its second half repeatedly until the alarm is raised.
    """
    level, rng = level_of(load_pair(env)), np.random.default_rng(0)
    held = {}
    for life in LIVES:
        if life.env == env and life.held and life.drift != "link":
            rows = dict(np.load(run.out / life.cell / "rows.npz"))
            kept, skip, half = rows["kept"], rows["would_skip"] > 0, len(rows["kept"]) // 2
            held[life.drift, life.robot] = kept[:half][skip[:half]], kept[half:][skip[half:]]
    calm = np.concatenate([before for before, _ in held.values()])
    false, audits, samples = 0, 0, 5 if run.quick else 100
    for _ in range(samples):
        alarm, values = DriftAlarm(level), audited(calm, rng)
        false += any(alarm.take(value) for value in values)
        audits += len(values)
    summary: dict[str, Any] = {
        "level": level, "true_skip": float(calm.mean()), "false_alarms": false, "audits": audits / samples,
        "promised_at_most": audits / samples / alarm.run_length,
    }  # fmt: skip
    for drift in ("noise", "draft"):
        before, after = held[drift, 0]
        delays = [delay(before, after, level, rng) for _ in range(samples)]
        summary[f"{drift}_delay"] = [float(value) for value in np.quantile(delays, (0.5, 0.9))]
    return summary


def audited(values: np.ndarray, rng: np.random.Generator) -> list[float]:
    """The values of the steps that an audit happens to verify."""
    return list(values[rng.random(len(values)) < AUDIT_RATE].tolist())


def delay(before: np.ndarray, after: np.ndarray, level: float, rng: np.random.Generator, most: int = 100_000) -> int:
    """Number of audits from the change to the alarm."""
    alarm, count = DriftAlarm(level), 0
    for value in audited(before, rng):
        alarm.take(value)
    while not alarm.raised and count < most:
        for value in audited(after, rng):
            count += not alarm.raised
            alarm.take(value)
    return count


def decision_us(folder: Path, run: Run) -> dict[str, float]:
    """Time of a decision with the controller's update, without the inner gate's score [microseconds]."""
    rng, address, spent = np.random.default_rng(0), StepAddress(0, 0, 0, 0), {}
    times = StageTimes(0.0, 0.0, OffloadTimes(), 0.0)
    for name, gate in {"gate": Random(0.5), "controller": Controller(Random(0.5), RateBudget(0.6))}.items():

        def decide(gate: Gate = gate) -> None:
            for _ in range(4000):
                decision = gate.decide(None, rng)  # type: ignore[arg-type]
                gate.on_inference(StepRecord(address, None, decision, None, None, None, times))  # type: ignore[arg-type]

        spent[name] = 1e6 * seconds_of(decide, 5) / 4000
    return spent


def report(results: Results) -> Report:
    """Every robot, what a change did to a fixed and to a held gate, the alarms, and the cost of a decision."""
    alarms, decision, changes, lives = results["alarms"], results["decision"], list[dict[str, Any]](), list[Any]()
    for env in NOISE:
        for of_drift in results[env].values():
            robots = list(of_drift.values())
            rates, ms = ([life[kind][1] for life in robots if life["held"]] for kind in ("rates", "mean_ms"))
            fixed = next((life for life in robots if not life["held"]), {"rates": [None] * 2, "mean_ms": [None] * 2})
            changes.append({
                "pair": env, "change": robots[0]["drift"], "fixed": fixed["rates"][1], "fixed_ms": fixed["mean_ms"][1],
                "alarms": sum(life["held"] and life["alarm_after"] is not None for life in robots),
                "robots": len(rates), "low": min(rates), "high": max(rates), "low_ms": min(ms), "high_ms": max(ms),
            })  # fmt: skip
            lives += robots
    held = [life for life in lives if life["held"]]
    aimed = {"set point": NEW_RATE}
    drifts = [row for row in changes if row["change"] in ("noise", "draft")]
    facts = {
        **{f"{row['pair']}_{row['change']}": row for row in changes}, **alarms, "took": decision,
        "error": max(
            abs(life["rates"][1] - aimed.get(life["drift"], RATE)) for life in held if life["drift"] != "link"
        ),
        "late": span(life["mean_ms"][1] for life in held if life["drift"] == "link"), "budget": 1e3 * BUDGET_S,
        "found": sum(row["alarms"] for row in drifts), "could": sum(row["robots"] for row in drifts),
        "false": sum(row["false_alarms"] for row in alarms.values()), "rate": RATE, "audited": AUDIT_RATE,
        "calm": sum(row["alarms"] for row in changes if row not in drifts), "held": len(held),
        "covered": sum(life["estimate"][1] <= life["true_skip_of_life"] <= life["estimate"][2] for life in held),
    }  # fmt: skip
    tables = [
        Table("changes", "Means of the inferences after the change: one robot with a fixed threshold, two with a "
              "controller, and how many of these raised an alarm.",
              "pair | change | gate fixed: asks | held: asks | fixed, ms | held, ms | alarms",
              "{pair} | {change} | {fixed:.3f} | {low:.3f} to {high:.3f} | {fixed_ms:.2f} "
              "| {low_ms:.2f} to {high_ms:.2f} | {alarms} of {robots}", changes),
        Table("alarms", "Audits resampled 100 times over the lives above: false alarms without drift, what is promised "
              "at most, and the median of audits until an alarm.",
              "pair | audits of a life | false alarms in 100 lives | promised at most | noise | a worse draft",
              "{name} | {audits:.0f} | {false_alarms} | {promised_at_most:.3f} | {noise_delay[0]:.0f} "
              "| {draft_delay[0]:.0f}", named(alarms)),
        Table("lives", "Every robot; values before and after the change.", rows=lives),
    ]  # fmt: skip
    return Report(tables, facts)
