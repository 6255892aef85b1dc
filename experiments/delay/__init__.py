"""Delay: chunks that can be played d control steps after their observation, while the goal moves on.

All methods ask equally often: every four control steps, or every d where a reply takes longer. To add a method, add an
entry to :data:`METHODS`; it is anything that runs an :class:`~specact.lab.rollout.episode.Episode`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.delay import corrected
from experiments.delay.corrected import CORRECTED, GATES, ON_LIBERO, PUSHED, UNCORRECTED, Corrected
from experiments.delay.worlds import DELAYS, INFERENCE_S, LIBERO, RECORDED, WORLDS, Trial, World, made, played
from experiments.figures import add_series, points_of
from experiments.grid import ROOT, Cell, Results, Run, bundle_in, trained
from experiments.measure import from_digits
from experiments.report import Picture, Report, Table, contrast_table, glossary, one_family
from specact.execution.schedule import Execution, Kind
from specact.families.chunks.flow import FlowPolicy, load_flow
from specact.lab.evaluation.executions import TABLE, WAYS
from specact.lab.rollout.episode import Episode, run_episode
from specact.lab.rollout.rollout import episode_seed
from specact.lab.rollout.statistics import contrast
from specact.lab.rollout.timed import Route

STEPS, CHUNK = 5, 16
_BALL = WORLDS["success"].name
Row = dict[str, Any]  # a cell, as the tables have it
RECIPE = ROOT / "recipes" / "flow-ball-chase-rtc.toml"


@dataclass(frozen=True)
class Alone:
    """A chunk policy alone, the world's or one that is trained for delays, whose chunks are executed in this way.

    Attributes:
        needs: the cell of its training, if it is not a bundle of the package.
        guided: whether it is guided although it was trained for delays.
        every: control steps between two requests, in place of the trial's.
        steps: of the flow.
    """

    about: str
    kind: Kind
    needs: str = ""
    guided: bool = False
    delays: tuple[int, ...] = DELAYS
    every: int = 0
    steps: int = STEPS

    def run(self, trial: Trial) -> Episode:
        """The episode, which asks at the trial's cadence, but for a robot that waits."""
        policy, world = _policy(self, trial.world, trial.out), made(trial.world)
        latency: Callable[[float], float] | float = trial.delay * world.period_s
        if trial.place in RECORDED:
            latency = Route(trial.recorded, 0, 0, np.random.default_rng(0)).latency(INFERENCE_S)
        every = self.every or trial.cadence
        ahead = 0 if self.kind == "synchronous" else min(trial.delay, every)
        by_time, chunk = self.kind in ("aligned", "rtc"), policy.spec.chunk
        return run_episode(
            world, policy, Execution(self.kind, *(chunk, chunk - every) if by_time else (every, ahead)), latency,
            start=episode_seed(trial.seed, trial.episode, world.task), seed=trial.seed, episode=trial.episode,
        )  # fmt: skip


DEVICE = Alone("control: the target on the device, in one step", "synchronous", delays=(0,), steps=1)
KINDS = ("append", "aligned", "rtc")
METHODS: dict[str, Alone | Corrected] = {
    "synchronous": Alone("waits for every chunk, and so asks less often", "synchronous"),
    "append": Alone("the next chunk follows the current one", "append"),
    "aligned": Alone("every action is played at its time", "aligned"),
    "roll_forward": Alone("append, from the robot's state as it will be; without fine-tuning", "roll_forward"),
    "rtc": Alone("real-time chunking by guidance", "rtc"),
    "rtc_trained": Alone("training-time real-time chunking", "rtc", "training"),
    "aligned_trained": Alone("control: the same weights, aligned", "aligned", "training"),
    "guided_trained": Alone("control: the same weights, by guidance", "rtc", "training", guided=True),
    "rtc_trained_1": Alone("training-time real-time chunking, second training", "rtc", "trainings/1", delays=(2, 4)),
    "rtc_trained_2": Alone("third training", "rtc", "trainings/2", delays=(2, 4)),
    "device": DEVICE,
    **CORRECTED,
}
_STILL = ("synchronous", *KINDS, "rtc_trained", "device", "corrected_hidden", "draft_hidden", "draft")
_OFTEN = {"aligned_1": Alone("control: aligned, asks every step", "aligned", delays=(0,), every=1)}
_SLOWER = {"aligned_8": Alone("control: aligned, asks every eight steps", "aligned", delays=(4,), every=8)}
_LINKED = (*KINDS, "rtc_trained", "corrected_hidden", "draft_hidden", "corrected", "draft")


def _at(delays: tuple[int, ...], *names: str) -> dict[str, Alone | Corrected]:
    """Some of the methods at these delays alone."""
    return {name: replace(METHODS[name], delays=delays) for name in names}


# The methods that are played at each place: a world, or a recorded link.
PLAYED: dict[str, Mapping[str, Alone | Corrected]] = {
    "success": METHODS,
    "still": {name: METHODS[name] for name in _STILL},
    "pusht": {name: METHODS[name] for name in (*KINDS, "device")} | _OFTEN | PUSHED,
    # A chunk of Meta-World has eight actions: eight steps late no action of it is left to align.
    "metaworld": {
        **_at((0, 1, 2, 4, 8), "synchronous"), "device": DEVICE, **_at((1, 2, 4, 8), "append"),
        **_at((1, 2, 4), "aligned", "rtc"), **corrected.ON_METAWORLD,
    },
    "libero": {
        **_at((0, 1, 2, 4, 8), "synchronous"), **_SLOWER, **_at((1, 2, 4, 8), "append", "aligned"),
        **_at((0, 4, 8), "rtc"), **ON_LIBERO,
    },
    **dict.fromkeys(RECORDED, {name: METHODS[name] for name in _LINKED} | UNCORRECTED),
}  # fmt: skip
# Methods whose own best cadence is found: of these control steps between two requests, on so many other episodes.
PACED, TRIED, CHOSEN = ("append", "aligned", "rtc", "rtc_trained", "corrected_hidden"), (2, 4, 6, 8, 12), 30
# Every method is compared to the simplest that repairs a delay; what was trained for delays also to its controls.
RIVALS = [(method, "aligned") for method in METHODS if method not in ("synchronous", "aligned")]
RIVALS += [("rtc_trained", other) for other in ("rtc", "aligned_trained", "guided_trained")]
RIVALS += [("corrected", other) for other in ("rtc_trained", "a2c2", "draft")]
RIVALS += [("corrected_hidden", f"{other}_hidden") for other in ("draft", "newest", "first", "shuffled", "uncorrected")]
RIVALS += [("corrected_camera", other) for other in ("aligned", "draft_camera", "uncorrected_camera")]
RIVALS += [("corrected_camera", "corrected_hidden")]
RIVALS += [(method, "aligned") for method in ("aligned_1", "aligned_8", "corrected_half", "corrected_1", "corrected_2")]
RIVALS += [("a2c2", "rtc"), ("corrected", "uncorrected"), ("staleness", "cadence"), ("staleness", "random")]
# Methods of the picture in each world, by the method of other pictures whose colour they have.
_SHOWN = {"random": "append", "hybrid": "aligned", "plain_random": "rtc", "adahi": "corrected_hidden"}
_GOAL = {**_SHOWN, "learned_action": "rtc_trained", "draft": "corrected", "learned": "draft_hidden"}
SHOWN = {
    "success": _GOAL, "pusht": _GOAL,
    "metaworld": {**_SHOWN, "target": "synchronous", "draft": "corrected_camera", "learned": "draft_camera"},
}  # fmt: skip


def plan(run: Run) -> Iterator[Cell]:
    """The trainings, and a cell for every place, method and delay; LIBERO's where it is installed, ``--workers 1``."""
    yield Cell("training", partial(train, 0))
    yield from (Cell(f"trainings/{seed}", partial(train, seed)) for seed in (1, 2))
    yield from corrected.training_cells()
    for place, methods in PLAYED.items():
        for name, method in methods.items() if place != "libero" or find_spec(LIBERO) else ():
            for delay in RECORDED[place][1:] if place in RECORDED else method.delays:
                yield Cell(f"{place}/{name}/{delay}", partial(measure, method, Trial(delay, place)))
    for name in PACED:
        for delay in (2, 4, 6):
            yield Cell(f"cadence/{name}/{delay}", partial(choose, METHODS[name], Trial(delay)))
    for steps in corrected.CADENCES:
        yield from (Cell(f"gate/{name}/{steps}", partial(corrected.gated, name, steps)) for name in GATES)
    for place, method in corrected.ERRORS.items():
        yield Cell(f"errors/{place}", partial(corrected.errors, method))
    yield Cell("cost", corrected.cost)


def train(seed: int, folder: Path, run: Run) -> dict[str, Any]:
    """Trains the policy that continues actions under way."""
    bundle = load_flow(trained(f"{RECIPE.read_text()}seed = {seed}\n", folder, run))
    return {"fingerprint": bundle.fingerprint, "training": bundle.manifest.training}


def measure(method: Alone | Corrected, trial: Trial, folder: Path, run: Run) -> dict[str, Any]:
    """A method in trials like this one."""
    if method.needs:
        run.result(method.needs)
    return played(method.run, trial, run, run.seed, trial.world.episodes)


def choose(method: Alone | Corrected, trial: Trial, folder: Path, run: Run) -> dict[str, Any]:
    """A method at its own best cadence, chosen on other episodes; a chunk must be long enough for it and the delay."""
    cadences = [every for every in TRIED if trial.delay <= every <= CHUNK - trial.delay]
    tried = {every: played(method.run, replace(trial, every=every), run, run.seed + 1, CHOSEN) for every in cadences}
    best = max(tried, key=lambda every: (tried[every]["success"]["mean"], tried[every]["score"]["mean"]))
    result = measure(method, replace(trial, every=best), folder, run)
    return {"every": best, "tried": {every: cell["won"] for every, cell in tried.items()}, **result}


@cache
def _policy(method: Alone, world: World, out: Path) -> FlowPolicy:
    bundle = load_flow(bundle_in(out / method.needs) if method.needs else world.base)
    delays = 0 if method.guided else bundle.delays
    return FlowPolicy(bundle.networks, bundle.units, bundle.spec, steps=method.steps, delays=delays)


def report(results: Results) -> Report:
    """Every method at every delay and on every link, its difference from its rivals, and what the gates buy."""
    names = {place: world.name for place, world in WORLDS.items()} | {link: f"{_BALL} over {link}" for link in RECORDED}
    groups = {
        place: _rows(results.get(place, {}), methods, f"{names[place]}, d = ", place)
        for place, methods in PLAYED.items()
    } | {
        "own": _rows(results.get("cadence", {}), PACED, f"{_BALL} at its own cadence, d = ", "own"),
        "gates": _rows(results.get("gate", {}), GATES, f"{_BALL}, requests of every ", "success"),
    }
    # What a gate buys is a question of its own, with a family of its own.
    pairs = sorted(rivals_of(groups), key=lambda pair: pair[0]["method"] in GATES)
    tests = [
        {"on": first["on"], "measure": "success", "first": first["method"], "second": second["method"],
         **asdict(contrast(from_digits(first["won"]), from_digits(second["won"])))}
        for first, second in pairs
    ]  # fmt: skip
    family = one_family(test for test in tests if test["first"] not in GATES)
    gates = one_family(test for test in tests if test["first"] in GATES)
    facts: dict[str, Any] = {row["fact"].format(row["method"]): row for group in groups.values() for row in group}
    for test, (first, second) in zip(family + gates, pairs, strict=True):
        facts[first["fact"].format(f"{first['method']}_{second['method']}")] = test
    tables = tables_of(groups | {"links": [{**row, "link": link} for link in RECORDED for row in groups[link]]})
    if results.get("errors"):
        about = "Root mean square of what the target says now, less its chunk of so many steps before; held out."
        cells = "{on} | {age} | {changed:.3f} | {left:.3f} | {drawn:.3f?}"
        heads = "on | age | as it is | corrected | two answers to one observation"
        tables.append(Table("errors", about, heads, cells, [*chain.from_iterable(results["errors"].values())]))
    tables += [contrast_table(family), contrast_table(gates, "gate-contrasts")]
    tables.append(glossary(_OFTEN | _SLOWER | UNCORRECTED | PUSHED | corrected.ON_METAWORLD | METHODS))
    facts |= {name: results.get(name) for name in ("cost", "errors")}
    picture = Picture("delay-success.svg", partial(draw_delays, groups))
    return Report(tables, facts, [picture], also={TABLE: advised(groups)})


def _rows(cells: Results, methods: Iterable[str], on: str, prefix: str) -> list[Row]:
    """A row for every cell: its method, the number that names it, its condition, and the name of its fact."""
    return [
        {"method": name, "at": int(at), "on": f"{on}{at}", "fact": f"{prefix}_{{}}_{at}".removeprefix("success_"),
         "starved": {"mean": None}, **cells[name][at]}
        for name in methods for at in sorted(cells.get(name, {}), key=int)
    ]  # fmt: skip


def rivals_of(groups: Mapping[str, list[Row]]) -> list[tuple[Row, Row]]:
    """The rows that are compared: of rivals in one condition, and of arms that act and the arm that waits."""
    rows = {
        (row["on"], row["method"]): row
        for place, group in groups.items() for row in group if row["at"] or place == "pusht"
    }  # fmt: skip
    pairs = [
        (rows[on, first], rows[on, second])
        for on in dict.fromkeys(on for on, _ in rows) for first, second in RIVALS
        if {(on, first), (on, second)} <= rows.keys() and len(rows[on, first]["won"]) == len(rows[on, second]["won"])
    ]  # fmt: skip
    # Where an arm acts every row also against waiting without a delay, its first row.
    for group in (groups["metaworld"], groups["libero"]):
        waiting = [{**row, "method": "synchronous_0"} for row in group if row["method"] == "synchronous"][:1]
        pairs += [(row, other) for other in waiting for row in group if row["at"]]
    return pairs


def tables_of(groups: Mapping[str, list[Row]]) -> list[Table]:
    """A table for every group that has rows."""
    counts = {name: "/".join(sorted({str(len(row["won"])) for row in group})) for name, group in groups.items()}

    def table(name: str, about: str, heads: str, cells: str, across: str) -> Table:
        """The first columns say what a row is; the others are the same in all tables."""
        heads += " | without a chunk | success | score | largest step at a seam | jerk at seams | jerk | requests [1/s]"
        cells += " | {starved[mean]:.2f} | {success:ci2} | {score:ci2} | {seam_step[mean]:.2f} | {seam_jerk[mean]:.0f} "
        cells += "| {jerk[mean]:.0f} | {requests_hz:.1f}"
        return Table(name, about, heads, cells, groups[name], across)

    tables = [
        table(
            place,
            f"{counts[place]} paired episodes of {world.name}; d: control steps of {1e3 / world.rate_hz:.0f} ms until "
            "a chunk can be played; 95 % intervals over episodes. In the file also jerk and the largest step at seams, "
            "requests (of a chunk policy alone: chunks that an action was played of), and the share of the time "
            "without a chunk, in which the robot holds still or its draft acts.",
            "method | d", "`{method}` | {at}", "`{method}` | d = {at} | {success:ci2}",
        ) for place, world in WORLDS.items()
    ]  # fmt: skip
    tables += [
        table("links", f"{counts['links']} paired episodes of {_BALL} over recorded links; an inference takes "
              f"{1e3 * INFERENCE_S:.0f} ms.", "link | method", "{link} | `{method}`",
              "`{method}` | {link} | {success:ci2}"),
        table("own", f"Each at its best of {CHOSEN} other episodes.", "method | d | every",
              "`{method}` | {at} | {every}", "`{method}` | d = {at} | {success:ci2}, every {every}"),
        table("gates", f"`corrected_hidden` at d = {corrected.GATED_AT}, asking as often as every so many steps would; "
              f"of {corrected.CALIBRATED} other episodes are the thresholds.", "gate | every", "`{method}` | {at}",
              "`{method}` | every {at} | {success:ci2}"),
    ]  # fmt: skip
    return [table for table in tables if table.rows]


def draw_delays(groups: Mapping[str, list[Row]]) -> Figure:
    """Success over delay, a panel for each world that has rows."""
    panels = {place: shown for place, shown in SHOWN.items() if groups[place]}
    figure = Figure(figsize=(4.8 * len(panels), 3.6), layout="constrained")
    for axes, (place, shown) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        series = {
            style: points_of({row["at"]: row["success"] for row in groups[place] if row["method"] == method})
            for style, method in shown.items()
        }
        add_series(axes, series, "delay d [control steps]", "success", WORLDS[place].name, shown)
    return figure


def advised(groups: Mapping[str, list[Row]]) -> str:
    """The table of the package for ``specact doctor`` and ``specact advise``."""
    studies = []
    for place, world in WORLDS.items():
        if groups[place]:
            about = f"{len(groups[place][0]['won'])} episodes; the device sees what the target sees"
            rows = ",\n".join(
                json.dumps([row["method"], row["at"], *(round(value, 4) for value in row["success"].values())])
                for row in groups[place] if row["method"] in WAYS
            )  # fmt: skip
            studies.append(f'"{world.name}": {{"about": "{about}", "rows": [\n{rows}\n]}}')
    return "{" + ",\n".join(studies) + "}\n"
