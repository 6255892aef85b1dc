"""Controllers of rate or latency under drift, and drift alarms, compared with a calibrated threshold.

Run: python benchmarks/controller.py

Each robot runs 10,000 inferences, in successive episodes in virtual time on link wifi-paper; after half of them
something changes: noise on the observations, the draft (to the under-trained one), the set point of the rate, or the
link (to 5g). Steps that a controlled gate would skip are audited with probability 0.1. Robot k has seed k for its
episodes, seed 0 for its policy, and seed 1 for its noise. Two figures are not from these runs: false alarms and delays
are counted with resampled audits (seed 0), and the time of a decision is measured. Writes
benchmarks/results/controller.json and docs/controller.png.
"""

from __future__ import annotations

import json
import os

os.environ["OMP_NUM_THREADS"] = "1"  # two processes share the machine's cores; before anything imports onnxruntime

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from specact import SpeculativePolicy, calibrated_gate, load_bundle
from specact.clock import VirtualClock
from specact.families.codes.bundle import Bundle
from specact.families.codes.sampling import rejection_probability
from specact.families.codes.spec import CodePolicy
from specact.families.codes.values import CodeDistribution
from specact.families.codes.verify import CodeDrafter, SpeculativeVerifier
from specact.gates.audit import AuditEstimator, DriftAlarm, expected_true_skip
from specact.gates.calibration import find_calibration
from specact.gates.controller import Controller, LatencyBudget, RateBudget
from specact.gates.gate import Gate
from specact.gates.settings import BUNDLE_DEFAULTS
from specact.lab.envs import load_task
from specact.lab.rollout.rollout import episode_seed
from specact.links.link import load_link, round_trip
from specact.observation import Window
from specact.rng import Role, StepAddress, stream
from specact.types import OffloadTimes
from specact.verification import Answer, Pending

ROOT = Path(__file__).parents[1]
CHANGE, END, WINDOW = 5_000, 10_000, 200
RATE, NEW_RATE, AUDIT_RATE = 0.6, 0.4, 0.1
NOISE = {"ball": 0.1, "swarm": 0.1}  # standard deviation, in the observation's own units
BUDGET_S, DRAFT_S, TARGET_S = 0.010, 0.001, 0.003
DRIFTS = ("noise", "draft", "set point", "link")


@dataclass(frozen=True)
class RobotRun:
    """One robot's run: the drift after half of it, and whether its gate has a controller or a calibrated threshold."""

    env: str
    drift: str
    held: bool
    robot: int


# A calibrated threshold has no set point, so that drift does not apply to it.
RUNS = [
    RobotRun(env, drift, held, robot)
    for env in NOISE
    for drift in DRIFTS
    for held, robots in ((True, 2), (False, 1))
    for robot in range(robots)
    if held or drift != "set point"
]


class SlowPolicy:
    """A policy with an accounted time; it can be replaced."""

    def __init__(self, policy: CodePolicy, clock: VirtualClock) -> None:
        self.policy, self._clock = policy, clock

    def infer(self, window: Window) -> CodeDistribution:
        self._clock.sleep(DRAFT_S)
        return self.policy.infer(window)

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        return [self.infer(window) for window in windows]


class RemoteTarget:
    """A target behind a link; the link can be replaced."""

    def __init__(self, bundle: Bundle, clock: VirtualClock, run: RobotRun) -> None:
        self.link = load_link("wifi-paper")
        self._target, self._clock = bundle.target, clock
        self._rng = stream(0, Role.LINK, robot=run.robot)
        spec = bundle.spec
        self._up, self._down = spec.target.nbytes, 4 * spec.codebooks * spec.codes * (1 + spec.chunk * spec.actions)

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[CodeDistribution]]:
        return Pending(lambda: self._answer(window))

    def _answer(self, window: Window) -> Answer[CodeDistribution]:
        network = round_trip(self.link, self._up, self._down, self._clock.now(), self._rng)
        self._clock.sleep(network + TARGET_S)
        return Answer(self._target.infer(window), OffloadTimes(network=network, target=TARGET_S))


def run_robot(run: RobotRun) -> dict[str, np.ndarray]:
    """Runs one robot; returns one entry per inference."""
    bundle, task, clock = load_bundle(run.env), load_task(run.env), VirtualClock()
    draft, remote = SlowPolicy(bundle.draft, clock), RemoteTarget(bundle, clock, run)
    rate = RateBudget(RATE)
    gate = make_gate(bundle, run, rate)
    audits = AuditEstimator(DriftAlarm(level_of(bundle)))
    verifier = SpeculativeVerifier(remote, bundle.tokenizer)
    drafter = CodeDrafter(draft, bundle.tokenizer)
    policy = SpeculativePolicy(bundle, gate, drafter=drafter, verifier=verifier, robot=run.robot, clock=clock)
    env, noise, sigma = task.make(), stream(1, Role.DATA, robot=run.robot), 0.0
    rows: dict[str, list[Any]] = {name: [] for name in ("sent", "would_skip", "kept", "took", "estimate", "alarm")}
    episode = 0
    while len(rows["sent"]) < END:
        policy.reset(episode)
        observation, _ = env.reset(seed=episode_seed(run.robot, episode, task))
        for _ in range(task.max_steps):
            if len(rows["sent"]) >= CHANGE:
                sigma = apply_drift(run, bundle, draft, remote, rate)
            state = observation["state"] + sigma * noise.standard_normal(observation["state"].shape)
            wanted = policy.wants_inference
            action = policy.act(observation | {"state": state.astype(np.float32)})
            if wanted:
                record_step(rows, policy, bundle, audits)
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                break
        episode += 1
    return {name: np.array(values[:END], dtype=float) for name, values in rows.items()}


def make_gate(bundle: Bundle, run: RobotRun, rate: RateBudget) -> Gate:
    if not run.held:
        return calibrated_gate(bundle, "deviation", RATE)
    inner = BUNDLE_DEFAULTS.settings("deviation", bundle).build(bundle)
    inner.audit_rate = AUDIT_RATE
    return Controller(inner, LatencyBudget(BUDGET_S) if run.drift == "link" else rate)


def level_of(bundle: Bundle) -> float:
    calibration = find_calibration(bundle, "deviation", RATE)
    assert calibration is not None
    return expected_true_skip(calibration.model["rejections"], RATE)


def apply_drift(run: RobotRun, bundle: Bundle, draft: SlowPolicy, remote: RemoteTarget, rate: RateBudget) -> float:
    """Applies the drift; returns the standard deviation of the noise."""
    if run.drift == "draft" and draft.policy is bundle.draft:
        draft.policy = load_bundle(f"{run.env}-undertrained").draft
    elif run.drift == "set point":
        rate.rate = NEW_RATE
    elif run.drift == "link":
        remote.link = load_link("5g")
    return NOISE[run.env] if run.drift == "noise" else 0.0


def record_step(rows: dict[str, list[Any]], policy: SpeculativePolicy, bundle: Bundle, audits: AuditEstimator) -> None:
    record = policy.record
    assert record is not None
    proposal = record.proposal
    known = None if record.outcome is None else record.outcome.evidence.target
    target = known or bundle.target.infer(proposal.window)
    kept = np.prod(1.0 - rejection_probability(target.probs, proposal.evidence.draft.probs, proposal.evidence.codes))
    alarm, found = audits.take(record), audits.estimate()
    rows["sent"].append(record.decision.transmit)
    rows["would_skip"].append(not record.decision.transmit or record.decision.reason == "audit")
    rows["kept"].append(kept)
    rows["took"].append(record.times.total)
    rows["estimate"].append((np.nan if found.mean is None else found.mean, found.low, found.high))
    rows["alarm"].append(alarm)


def main() -> None:
    started = time.perf_counter()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        finish(dict(zip(RUNS, pool.map(run_robot, RUNS), strict=True)))
    print(f"{time.perf_counter() - started:.0f} s")


def finish(rows: dict[RobotRun, dict[str, np.ndarray]]) -> None:
    results = {
        "change_after": CHANGE, "inferences": END, "window": WINDOW, "rate": RATE, "new_rate": NEW_RATE,
        "audit_rate": AUDIT_RATE, "noise": NOISE, "budget_s": BUDGET_S, "draft_s": DRAFT_S, "target_s": TARGET_S,
        "lives": [vars(run) | summarise(run, rows[run]) for run in RUNS],
        "alarms": {env: replayed(env, rows) for env in NOISE},
        "decision_us": decision_us(),
    }  # fmt: skip
    (ROOT / "benchmarks/results/controller.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(rows, ROOT / "docs/controller.png")
    report(results)


def summarise(run: RobotRun, row: dict[str, np.ndarray]) -> dict[str, Any]:
    """The summary of one run.

    The set point is reached where the mean of the next WINDOW inferences is within 0.05, or 1 ms, of it.
    """
    before, after = row["sent"][:CHANGE], row["sent"][CHANGE:]
    skip = row["would_skip"] > 0
    halves = (slice(0, CHANGE), slice(CHANGE, END))
    alarms = np.flatnonzero(row["alarm"])
    estimate = row["estimate"][-1]
    found: dict[str, Any] = {
        "rates": [float(before.mean()), float(after.mean())],
        "mean_ms": [float(1e3 * row["took"][half].mean()) for half in halves],
        "true_skip": [float(row["kept"][half][skip[half]].mean()) for half in halves],
        "true_skip_of_life": float(row["kept"][skip].mean()),
        "estimate": [float(value) for value in estimate],
        "alarm_after": int(alarms[0]) + 1 if len(alarms) else None,
    }
    set_point, tolerance = (NEW_RATE if run.drift == "set point" else RATE), 0.05
    if run.drift == "link":
        after, set_point, tolerance = 1e3 * row["took"][CHANGE:], 1e3 * BUDGET_S, 1.0
    off = np.abs(moving_average(after) - set_point)
    close = np.flatnonzero(off <= tolerance)
    return found | {"reached_after": int(close[0]) if len(close) else None, "farthest": float(off.max())}


def moving_average(values: np.ndarray) -> np.ndarray:
    """Moving averages over WINDOW values."""
    total = np.cumsum(np.concatenate([[0.0], values]))
    return np.asarray((total[WINDOW:] - total[:-WINDOW]) / WINDOW)


def replayed(env: str, rows: dict[RobotRun, dict[str, np.ndarray]]) -> dict[str, Any]:
    """False alarms and delays, from the controlled runs with their audits resampled 100 times.

    Without drift: the first halves of all runs, concatenated. The steps keep their order, and so their
    autocorrelation. With drift: the first half of a run, then its second half repeatedly until the alarm is raised.
    """
    level, rng = level_of(load_bundle(env)), np.random.default_rng(0)
    held = {run: row for run, row in rows.items() if run.env == env and run.held and run.drift != "link"}
    calm = np.concatenate([skipped(row, slice(0, CHANGE)) for row in held.values()])
    false, audits = 0, 0
    for _ in range(100):
        alarm = DriftAlarm(level)
        values = audited(calm, rng)
        false += any(alarm.take(value) for value in values)
        audits += len(values)
    found: dict[str, Any] = {
        "level": level, "true_skip": float(calm.mean()), "false_alarms": false, "audits": audits / 100,
        "promised_at_most": audits / 100 / alarm.run_length,
    }  # fmt: skip
    for drift in ("noise", "draft"):
        found[f"{drift}_delay"] = [
            float(q) for q in np.quantile([delay(held[RobotRun(env, drift, True, 0)], level, rng) for _ in range(100)],
                                          (0.5, 0.9))
        ]  # fmt: skip
    return found


def skipped(row: dict[str, np.ndarray], part: slice) -> np.ndarray:
    """1 - R(z) of the steps that the gate would skip."""
    return np.asarray(row["kept"][part][row["would_skip"][part] > 0])


def audited(values: np.ndarray, rng: np.random.Generator) -> list[float]:
    return list(values[rng.random(len(values)) < AUDIT_RATE].tolist())


def delay(row: dict[str, np.ndarray], level: float, rng: np.random.Generator) -> int:
    """Number of audits from the change to the alarm."""
    alarm, count = DriftAlarm(level), 0
    for value in audited(skipped(row, slice(0, CHANGE)), rng):
        alarm.take(value)
    while not alarm.raised:
        for value in audited(skipped(row, slice(CHANGE, END)), rng):
            count += not alarm.raised
            alarm.take(value)
    return count


def decision_us() -> dict[str, float]:
    """Time of a decision with the controller's update, without the inner gate's score [microseconds]."""
    from specact.gates import Random
    from specact.types import StageTimes, StepRecord

    rng, address, times = np.random.default_rng(0), StepAddress(0, 0, 0, 0), {}
    for name, gate in {"gate": Random(0.5), "controller": Controller(Random(0.5), RateBudget(0.6))}.items():
        best = np.inf
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(4000):
                decision = gate.decide(None, rng)  # type: ignore[arg-type]
                gate.on_inference(
                    StepRecord(address, None, decision, None, None, None,  # type: ignore[arg-type]
                               StageTimes(0.0, 0.0, OffloadTimes(), 0.0))
                )  # fmt: skip
            best = min(best, (time.perf_counter() - start) / 4000)
        times[name] = 1e6 * best
    return times


def report(results: dict[str, Any]) -> None:
    for row in results["lives"]:
        kind = f"{row['env']:6} {row['drift']:9} {'held' if row['held'] else 'fixed':5} {row['robot']}"
        line = (
            f"{kind}: rates {row['rates'][0]:.3f}, {row['rates'][1]:.3f}; ms {row['mean_ms'][0]:.2f}, "
            f"{row['mean_ms'][1]:.2f}; reached after {row['reached_after']}; farthest {row['farthest']:.3f}"
        )
        if row["held"]:
            mean, low, high = row["estimate"]
            line += (
                f"; true skip {row['true_skip'][0]:.3f}, {row['true_skip'][1]:.3f}, of life "
                f"{row['true_skip_of_life']:.3f}: {mean:.3f} [{low:.3f}, {high:.3f}]; alarm at {row['alarm_after']}"
            )
        print(line)
    for env, found in results["alarms"].items():
        noise, draft = found["noise_delay"], found["draft_delay"]
        print(
            f"{env}: {found['false_alarms']} false alarms in 100 lives of {found['audits']:.0f} audits without drift "
            f"(promised: in at most {found['promised_at_most']:.3f} of them); level {found['level']:.3f}, true skip "
            f"ratio {found['true_skip']:.3f}; audits until an alarm, median and 90 %: after noise {noise[0]:.0f} and "
            f"{noise[1]:.0f}, after a worse draft {draft[0]:.0f} and {draft[1]:.0f}"
        )
    print("a decision: " + ", ".join(f"{name} {us:.1f} us" for name, us in results["decision_us"].items()))


def draw(rows: dict[RobotRun, dict[str, np.ndarray]], path: Path) -> None:
    """Draws rates, latencies and the audits' estimate of the first robot of each kind."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5.6), layout="constrained")
    axes = figure.subplots(len(NOISE), 5)
    at = np.arange(WINDOW, END + 1)
    for line, env in zip(axes, NOISE, strict=True):
        for axis, drift in zip(line, DRIFTS, strict=False):
            for held, colour in ((False, "#30638e"), (True, "#d1495b")):
                if (row := rows.get(RobotRun(env, drift, held, 0))) is None:
                    continue
                values = 1e3 * row["took"] if drift == "link" else row["sent"]
                axis.plot(
                    at, moving_average(values), color=colour, lw=0.9, label="held" if held else "calibrated threshold"
                )
            later = {"set point": NEW_RATE, "link": 1e3 * BUDGET_S}.get(drift, RATE)
            earlier = later if drift == "link" else RATE
            axis.plot([0, CHANGE, CHANGE, END], [earlier, earlier, later, later], "k--", lw=0.8, label="wanted")
            axis.set_title(f"{env}: {drift} changes", fontsize=9)
            axis.set_ylabel(f"{'ms' if drift == 'link' else 'sent'}, mean of {WINDOW}", fontsize=8)
            axis.set_ylim(*((0.0, 30.0) if drift == "link" else (0.0, 1.0)))
        _draw_shadow(line[4], env, rows[RobotRun(env, "noise", True, 0)])
        for axis in line:
            axis.tick_params(labelsize=7)
    axes[0, 0].legend(fontsize=7)
    axes[0, 4].legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("inferences", fontsize=8)
    figure.savefig(path, dpi=110)


def _draw_shadow(axis: Any, env: str, row: dict[str, np.ndarray]) -> None:
    mean, low, high = row["estimate"].T
    skip = row["would_skip"]
    axis.fill_between(np.arange(END), low, high, color="#d1495b", alpha=0.25, lw=0, label="95 % at all times at once")
    axis.plot(mean, color="#d1495b", lw=0.9, label="estimate from audits")
    axis.plot(np.cumsum(skip * row["kept"]) / np.maximum(1.0, np.cumsum(skip)), "k", lw=0.8, label="truth")
    for alarm in np.flatnonzero(row["alarm"]):
        axis.axvline(alarm, color="#edae49", label="alarm")
    axis.axvline(CHANGE, color="k", ls=":", lw=0.8)
    axis.set_ylim(0.0, 1.0)
    axis.set_title(f"{env}: true skip ratio, noise changes", fontsize=9)


if __name__ == "__main__":
    main()
