"""Delay: chunks that can be played d control steps after their observation, while the goal moves on.

Every method asks as often: every four control steps, or d where a reply takes longer. Another method is one more entry
of :data:`METHODS`, whatever runs an :class:`~specact.lab.rollout.episode.Episode`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.delay.corrected import (
    BASE,
    CADENCES,
    CALIBRATED,
    CORRECTED,
    DELAYS,
    EVERY,
    GATED_AT,
    GATES,
    PACE,
    Corrected,
    cost,
    gate_cells,
    training_cells,
)
from experiments.figures import draw_series, points_of
from experiments.grid import ROOT, Cell, Results, Run, specact
from experiments.report import Picture, Report, Table, contrast_table, glossary, one_family
from specact.execution.schedule import Execution, Kind
from specact.families.chunks.flow import FlowPolicy, load_flow
from specact.lab.envs import load_task
from specact.lab.envs.robot import MovingWorld
from specact.lab.evaluation.executions import TABLE, WAYS
from specact.lab.rollout.episode import Episode, run_episode
from specact.lab.rollout.rollout import episode_seed
from specact.lab.rollout.statistics import bootstrap_interval, contrast, wilson

TASK, EPISODES, STEPS = "ball-chase", 100, 5
TRAINED = "ball-chase-rtc"
RECIPE = ROOT / "recipes" / "flow-ball-chase-rtc.toml"
# Of every episode.
MEASURES = ("score", "task_s", "jerk", "seam_step", "seam_jerk")


@dataclass(frozen=True)
class Trial:
    """An episode at a delay of so many control steps; ``out`` is the run's folder, with what was trained."""

    delay: int
    episode: int
    seed: int
    out: Path


@dataclass(frozen=True)
class Alone:
    """A chunk policy alone, whose chunks are executed in this way; ``guided`` also if it was trained for delays."""

    about: str
    kind: Kind
    bundle: str = BASE
    guided: bool = False
    delays = DELAYS

    def execution(self, delay: int, chunk: int) -> Execution:
        """Which asks every ``max(EVERY, delay)`` control steps, but for a robot that waits."""
        every = max(EVERY, delay)
        if self.kind in ("aligned", "rtc"):
            return Execution(self.kind, chunk, chunk - every)
        return Execution(self.kind, every, 0 if self.kind == "synchronous" else min(delay, every))

    def run(self, trial: Trial) -> Episode:
        """The episode."""
        policy, world = _policy(self, trial.out), _world()
        execution = self.execution(trial.delay, policy.spec.chunk)
        start = episode_seed(trial.seed, trial.episode, world.task)
        address = {"seed": trial.seed, "episode": trial.episode}
        return run_episode(world, policy, execution, trial.delay * world.period_s, start=start, **address)


METHODS: dict[str, Alone | Corrected] = {
    "synchronous": Alone("waits for every chunk, and so asks less often", "synchronous"),
    "append": Alone("the next chunk follows the current one", "append"),
    "aligned": Alone("every action is played at its time", "aligned"),
    "roll_forward": Alone("append, from the robot's state as it will be; without fine-tuning", "roll_forward"),
    "rtc": Alone("real-time chunking by guidance", "rtc"),
    "rtc_trained": Alone("training-time real-time chunking", "rtc", TRAINED),
    "aligned_trained": Alone("control: the same weights, aligned", "aligned", TRAINED),
    "guided_trained": Alone("control: the same weights, by guidance", "rtc", TRAINED, guided=True),
    **CORRECTED,
}
# Each against the simplest that repairs a delay; what was trained for delays also against its controls.
RIVALS = [(method, "aligned") for method in METHODS if method not in ("synchronous", "aligned")]
RIVALS += [("rtc_trained", other) for other in ("rtc", "aligned_trained", "guided_trained")]
RIVALS += [("corrected", other) for other in ("rtc_trained", "a2c2", "draft")]
RIVALS += [("corrected_hidden", f"{other}_hidden") for other in ("draft", "newest", "first", "shuffled")]
SHOWN = ("append", "aligned", "rtc", "rtc_trained", "corrected", "corrected_hidden", "draft_hidden")


def plan(run: Run) -> Iterator[Cell]:
    """The trainings, and a cell for every method and delay."""
    yield Cell("training", train)
    yield from training_cells()
    for name, method in METHODS.items():
        for delay in method.delays:
            yield Cell(f"success/{name}/{delay}", partial(measure, name, delay))
    yield from gate_cells(gated_trials, summary_of)
    yield Cell("cost", cost)


def gated_trials(run: Run, seed: int, count: int) -> list[Trial]:
    """Episodes of the gates."""
    return [Trial(GATED_AT, episode, seed, run.out) for episode in range(count)]


def train(folder: Path, run: Run) -> dict[str, Any]:
    """Trains the policy that continues actions under way."""
    specact("train", RECIPE, "--out", (folder / "run").resolve())
    bundle = load_flow(folder / "run" / "bundles" / TRAINED)
    return {"fingerprint": bundle.fingerprint, "training": bundle.manifest.training}


def measure(method: str, delay: int, folder: Path, run: Run) -> dict[str, Any]:
    """The episodes of a method, the outcome of each as text."""
    bundle = METHODS[method].bundle
    if bundle != BASE:
        run.result("training" if bundle == TRAINED else f"correctors/{bundle}")
    trials = [Trial(delay, episode, run.seed, run.out) for episode in range(run.few(EPISODES))]
    found = {trial.episode: episode for trial, episode in run.pool.each(METHODS[method].run, trials)}
    return summary_of([found[number] for number in sorted(found)])


def summary_of(episodes: list[Episode]) -> dict[str, Any]:
    """Success, the mean of every measure, and requests a second."""
    rows = [asdict(episode) for episode in episodes]
    won = [row["success"] for row in rows]
    means = {name: np.array([row[name] for row in rows]) for name in MEASURES}
    return {
        "won": "".join(str(int(each)) for each in won), "success": asdict(wilson(sum(won), len(won))),
        **{name: asdict(bootstrap_interval(values)) for name, values in means.items()},
        "requests_hz": sum(row["chunks"] for row in rows) / sum(row["task_s"] for row in rows),
        "scores": [round(row["score"], 4) for row in rows],
    }  # fmt: skip


@cache
def _policy(method: Alone, out: Path) -> FlowPolicy:
    bundle = load_flow(out / "training" / "run" / "bundles" / TRAINED if method.bundle == TRAINED else method.bundle)
    delays = 0 if method.guided else bundle.delays
    return FlowPolicy(bundle.networks, bundle.units, bundle.spec, steps=STEPS, delays=delays)


@cache
def _world() -> MovingWorld:
    return MovingWorld(load_task(TASK), pace=PACE)


def report(results: Results) -> Report:
    """Every method at every delay, its difference from its rivals, success over delay, and what the gates buy."""
    found = {name: {int(delay): row for delay, row in rows.items()} for name, rows in results["success"].items()}
    cells = [(method, delay, found[method][delay]) for method in METHODS for delay in sorted(found.get(method, {}))]
    rows = [
        {"method": method, "delay": delay, **{key: row[key] for key in ("success", *MEASURES, "requests_hz")}}
        for method, delay, row in cells
    ]  # fmt: skip
    gates = [
        {"gate": name, "every": steps, **results["gate"][name][str(steps)]}
        for steps in CADENCES for name in GATES if str(steps) in results.get("gate", {}).get(name, {})
    ]  # fmt: skip
    won = {(method, f"{TASK}, d = {delay}"): row["won"] for method, delay, row in cells}
    won |= {(row["gate"], _gated_on(row["every"])): row["won"] for row in gates}
    contrasts = [(f"{TASK}, d = {delay}", *pair) for delay in DELAYS[1:] for pair in RIVALS]
    contrasts += [(_gated_on(steps), "staleness", rival) for steps in CADENCES for rival in ("cadence", "random")]
    family = one_family(
        {"on": on, "measure": "success", "first": first, "second": second, **asdict(contrast(
            *(np.array([*map(float, won[method, on])]) for method in (first, second))))}
        for on, first, second in contrasts if 0 < len(won.get((first, on), "")) == len(won.get((second, on), ""))
    )  # fmt: skip
    table = Table(
        "success", f"{EPISODES} paired episodes of {TASK} at pace {PACE:g}; d: control steps of 50 ms "
        "until a chunk can be played; 95 % intervals over episodes. Steps and jerk at seams are of the actions.",
        "method | d | success | score | largest step at a seam | jerk at seams | jerk of the ball | requests [1/s]",
        "`{method}` | {delay} | {success:ci2} | {score:ci2} | {seam_step[mean]:.2f} | {seam_jerk[mean]:.0f} "
        "| {jerk[mean]:.0f} | {requests_hz:.1f}", rows,
    )  # fmt: skip
    gate = Table(
        "gates", f"`corrected_hidden` at d = {GATED_AT}, asking as often as every so many steps would. The thresholds "
        f"are of {CALIBRATED} other episodes.",
        "gate | every | success | score | jerk of the ball | requests [1/s]",
        "`{gate}` | {every} | {success:ci2} | {score:ci2} | {jerk[mean]:.0f} | {requests_hz:.1f}", gates,
    )  # fmt: skip
    facts: dict[str, Any] = {f"{row['method']}_{row['delay']}": row for row in rows} | {"cost": results.get("cost")}
    facts |= {f"{row['gate']}_{row['every']}": row for row in gates}
    facts |= {f"{test['first']}_{test['second']}_{test['on'].rpartition(' ')[2]}": test for test in family}
    shown = [method for method in SHOWN if method in found]
    series = {m: points_of({row["delay"]: row["success"] for row in rows if row["method"] == m}) for m in shown}
    draw = partial(draw_series, series, "delay d [control steps]", "success")
    tables = [table, *[gate] * bool(gates), contrast_table(family), glossary(METHODS)]
    picture = Picture("delay-success.svg", draw)
    return Report(tables, facts, [picture], also={TABLE: advised(rows)})


def _gated_on(steps: int) -> str:
    return f"{TASK}, requests of every {steps}"


def advised(rows: list[dict[str, Any]]) -> str:
    """The table of the package for ``specact doctor`` and ``specact advise``."""
    about = f"{EPISODES} episodes at pace {PACE:g}, control steps of 50 ms; the device sees what the target sees"
    success = [[row["method"], row["delay"], *(round(value, 4) for value in row["success"].values())] for row in rows]
    kept = [json.dumps(row) for row in success if row[0] in WAYS]
    return f'{{"{TASK}": {{"about": "{about}", "rows": [\n' + ",\n".join(kept) + "\n]}}\n"
