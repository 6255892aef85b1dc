"""Delay: chunks that can be played d control steps after their observation, while the goal moves on.

Every method asks as often: every four control steps, or d where a reply takes longer. Another method is one more entry
of :data:`METHODS`, whatever runs an :class:`~specact.lab.rollout.episode.Episode`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.delay import corrected
from experiments.delay.corrected import CORRECTED, GATES, ON_LIBERO, PUSHED, UNCORRECTED, Corrected
from experiments.delay.worlds import BASE, DELAYS, INFERENCE_S, LIBERO, RECORDED, WORLDS, Trial, made, played
from experiments.figures import add_series, points_of
from experiments.grid import ROOT, Cell, Results, Run, specact
from experiments.report import Picture, Report, Table, contrast_table, glossary, one_family
from specact.execution.schedule import Execution, Kind
from specact.families.chunks.flow import FlowPolicy, load_flow
from specact.lab.evaluation.executions import TABLE, WAYS
from specact.lab.rollout.episode import Episode, run_episode
from specact.lab.rollout.rollout import episode_seed
from specact.lab.rollout.statistics import contrast
from specact.lab.rollout.timed import Route

STEPS, CHUNK, TRAINED = 5, 16, "ball-chase-rtc"
RECIPE = ROOT / "recipes" / "flow-ball-chase-rtc.toml"


@dataclass(frozen=True)
class Alone:
    """A chunk policy alone, whose chunks are executed in this way; ``guided`` also if it was trained for delays.

    ``every``: control steps between two requests, in place of the trial's; ``steps``: of the flow.
    """

    about: str
    kind: Kind
    bundle: str = BASE
    guided: bool = False
    delays: tuple[int, ...] = DELAYS
    training: int = 0
    every: int = 0
    steps: int = STEPS

    @property
    def needs(self) -> str:
        """The cell of its training, if it is not a bundle of the package."""
        return {TRAINED: f"trainings/{self.training}" if self.training else "training"}.get(self.bundle, "")

    def run(self, trial: Trial) -> Episode:
        """The episode, which asks at the trial's cadence, but for a robot that waits."""
        policy, world = _policy(self, trial.out), made(trial.world)
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
KINDS: dict[str, Kind] = {"append": "append", "aligned": "aligned", "rtc": "rtc"}
METHODS: dict[str, Alone | Corrected] = {
    "synchronous": Alone("waits for every chunk, and so asks less often", "synchronous"),
    "append": Alone("the next chunk follows the current one", "append"),
    "aligned": Alone("every action is played at its time", "aligned"),
    "roll_forward": Alone("append, from the robot's state as it will be; without fine-tuning", "roll_forward"),
    "rtc": Alone("real-time chunking by guidance", "rtc"),
    "rtc_trained": Alone("training-time real-time chunking", "rtc", TRAINED),
    "aligned_trained": Alone("control: the same weights, aligned", "aligned", TRAINED),
    "guided_trained": Alone("control: the same weights, by guidance", "rtc", TRAINED, guided=True),
    "rtc_trained_1": Alone("training-time real-time chunking, second training", "rtc", TRAINED, False, (2, 4), 1),
    "rtc_trained_2": Alone("third training", "rtc", TRAINED, False, (2, 4), 2),
    "device": DEVICE,
    **CORRECTED,
}
_STILL = ("synchronous", *KINDS, "rtc_trained", "device", "corrected_hidden", "draft_hidden", "draft")
_PUSHED = {name: Alone("", kind, WORLDS["pusht"].base) for name, kind in KINDS.items()} | {
    "device": replace(DEVICE, bundle=WORLDS["pusht"].base)
}
_FLOW = WORLDS["libero"].base
_OFTEN = {
    "aligned_1": Alone("control: aligned, asks every step", "aligned", WORLDS["pusht"].base, delays=(0,), every=1)
}
_SLOWER = {"aligned_8": Alone("control: aligned, asks every eight steps", "aligned", _FLOW, delays=(4,), every=8)}
_LIBERO = {"synchronous": Alone("", "synchronous", _FLOW, delays=(0, 4, 8)), **_SLOWER} | {
    name: Alone("", kind, _FLOW, delays=(0, 4, 8) if name == "rtc" else (4, 8)) for name, kind in KINDS.items()
}
_ARM = WORLDS["metaworld"].base
_ON_ARM = {"synchronous": Alone("", "synchronous", _ARM, delays=(0, 2, 4)), "device": replace(DEVICE, bundle=_ARM)} | {
    name: Alone("", kind, _ARM, delays=(2, 4)) for name, kind in KINDS.items()
}
_LINKED = (*KINDS, "rtc_trained", "corrected_hidden", "draft_hidden", "corrected", "draft")
# By world and link.
PLAYED: dict[str, Mapping[str, Alone | Corrected]] = {
    "success": METHODS,
    "still": {name: METHODS[name] for name in _STILL},
    "pusht": {**_PUSHED, **_OFTEN, **PUSHED},
    "metaworld": {**_ON_ARM, **corrected.ON_METAWORLD},
    "libero": {**_LIBERO, **ON_LIBERO},
    **dict.fromkeys(RECORDED, {name: METHODS[name] for name in _LINKED} | UNCORRECTED),
}
# Control steps between two requests: the best of these was chosen on so many other episodes.
PACED, TRIED, CHOSEN = ("append", "aligned", "rtc", "rtc_trained", "corrected_hidden"), (2, 4, 6, 8, 12), 30
# Each against the simplest that repairs a delay; what was trained for delays also against its controls.
RIVALS = [(method, "aligned") for method in METHODS if method not in ("synchronous", "aligned")]
RIVALS += [("rtc_trained", other) for other in ("rtc", "aligned_trained", "guided_trained")]
RIVALS += [("corrected", other) for other in ("rtc_trained", "a2c2", "draft")]
RIVALS += [("corrected_hidden", f"{other}_hidden") for other in ("draft", "newest", "first", "shuffled", "uncorrected")]
RIVALS += [("corrected_camera", other) for other in ("aligned", "draft_camera", "uncorrected_camera")]
RIVALS += [("corrected_camera", "corrected_hidden")]
RIVALS += [(method, "aligned") for method in ("aligned_1", "aligned_8", "corrected_half", "corrected_1", "corrected_2")]
RIVALS += [("a2c2", "rtc"), ("corrected", "uncorrected"), ("staleness", "cadence"), ("staleness", "random")]
# By the method of other pictures in whose colour they are drawn.
SHOWN = {
    "random": "append", "hybrid": "aligned", "plain_random": "rtc", "learned_action": "rtc_trained",
    "draft": "corrected", "adahi": "corrected_hidden", "learned": "draft_hidden",
}  # fmt: skip


def plan(run: Run) -> Iterator[Cell]:
    """The trainings, and a cell for every place, method and delay; LIBERO's where it is installed, ``--workers 1``."""
    there = {place: of for place, of in PLAYED.items() if place != "libero" or find_spec(LIBERO)}
    yield Cell("training", partial(train, 0))
    yield from (Cell(f"trainings/{seed}", partial(train, seed)) for seed in (1, 2))
    yield from corrected.training_cells()
    for place, methods in there.items():
        for name, method in methods.items():
            for delay in RECORDED[place][1:] if place in RECORDED else method.delays:
                yield Cell(f"{place}/{name}/{delay}", partial(measure, method, Trial(delay, place)))
    for name in PACED:
        for delay in (2, 4, 6):
            yield Cell(f"cadence/{name}/{delay}", partial(choose, METHODS[name], Trial(delay)))
    for steps in corrected.CADENCES:
        yield from (Cell(f"gate/{name}/{steps}", partial(corrected.gated, name, steps)) for name in GATES)
    yield Cell("errors", corrected.errors)
    yield Cell("cost", corrected.cost)


def train(seed: int, folder: Path, run: Run) -> dict[str, Any]:
    """Trains the policy that continues actions under way."""
    recipe = folder / "recipe.toml"
    folder.mkdir(parents=True, exist_ok=True)
    recipe.write_text(f"{RECIPE.read_text()}seed = {seed}\n")
    specact("train", recipe.resolve(), "--out", (folder / "run").resolve(), "--jobs", run.pool.workers, folder=ROOT)
    bundle = load_flow(folder / "run" / "bundles" / TRAINED)
    return {"fingerprint": bundle.fingerprint, "training": bundle.manifest.training}


def measure(method: Alone | Corrected, of: Trial, folder: Path, run: Run) -> dict[str, Any]:
    """A method in trials like this one."""
    if method.needs:
        run.result(method.needs)
    return played(method.run, of, run, run.seed, of.world.episodes)


def choose(method: Alone | Corrected, of: Trial, folder: Path, run: Run) -> dict[str, Any]:
    """A method at its own best cadence, chosen on other episodes; a chunk must be long enough for it and the delay."""
    cadences = [replace(of, every=every) for every in TRIED if of.delay <= every <= CHUNK - of.delay]
    tried = {each.every: played(method.run, each, run, run.seed + 1, CHOSEN) for each in cadences}
    best = max(tried, key=lambda every: (tried[every]["success"]["mean"], tried[every]["score"]["mean"]))
    found = measure(method, replace(of, every=best), folder, run)
    return {"every": best, "tried": {every: of["won"] for every, of in tried.items()}, **found}


@cache
def _policy(method: Alone, out: Path) -> FlowPolicy:
    bundle = load_flow(out / method.needs / "run" / "bundles" / TRAINED if method.needs else method.bundle)
    delays = 0 if method.guided else bundle.delays
    return FlowPolicy(bundle.networks, bundle.units, bundle.spec, steps=method.steps, delays=delays)


def report(results: Results) -> Report:
    """Every method at every delay and on every link, its difference from its rivals, and what the gates buy."""
    ball = WORLDS["success"].name
    names = {p: WORLDS[p].name if p in WORLDS else f"{ball} over {p}" for p in PLAYED}
    groups = {p: _rows(results.get(p, {}), PLAYED[p], f"{names[p]}, d = ", p) for p in PLAYED} | {
        "own": _rows(results.get("cadence", {}), PACED, f"{ball} at its own cadence, d = ", "own"),
        "gates": _rows(results.get("gate", {}), GATES, f"{ball}, requests of every ", "success"),
    }
    rows = {
        (row["on"], row["method"]): row for name, group in groups.items() for row in group
        if row["at"] or name == "pusht"
    }  # fmt: skip
    won = {at: len(row["won"]) for at, row in rows.items()}
    pairs = [
        (rows[on, first], rows[on, second]) for on in dict.fromkeys(on for on, _ in rows) for first, second in RIVALS
        if 0 < won.get((on, first), 0) == won.get((on, second))
    ]  # fmt: skip
    # Where an arm acts every row also against waiting without a delay, its first row.
    for group in (groups["metaworld"], groups["libero"]):
        waits = [{**row, "method": "synchronous_0"} for row in group if row["method"] == "synchronous"][:1]
        pairs += [(row, first) for first in waits for row in group if row["at"]]
    # What a gate buys is a question of its own, with a family of its own.
    pairs.sort(key=lambda pair: pair[0]["method"] in GATES)
    tests = [
        {"on": first["on"], "measure": "success", "first": first["method"], "second": second["method"],
         **asdict(contrast(*(np.array([*map(float, row["won"])]) for row in (first, second))))}
        for first, second in pairs
    ]  # fmt: skip
    family, gates = (one_family(of for of in tests if (of["first"] in GATES) == part) for part in (False, True))
    facts = {row["fact"].format(row["method"]): row for group in groups.values() for row in group}
    for test, (first, second) in zip(family + gates, pairs, strict=True):
        facts[first["fact"].format(f"{first['method']}_{second['method']}")] = test
    groups["links"] = [{**row, "link": link} for link in RECORDED for row in groups[link]]
    counts = {name: "/".join(sorted({str(len(row["won"])) for row in group})) for name, group in groups.items()}
    # Of every table what a row is, its first columns, and what the page shows.
    abouts = {
        world: (
            f"{counts[world]} paired episodes of {of.name}; d: control steps of {1e3 / of.rate_hz:.0f} ms until a "
            "chunk can be played; 95 % intervals over episodes. In the file also jerk and the largest step at seams, "
            "requests, and the share of the time without a chunk, in which the robot holds still or its draft acts.",
            "method | d", "`{method}` | {at}", "`{method}` | d = {at} | {success:ci2}",
        ) for world, of in WORLDS.items()
    } | {
        "links": (
            f"{counts['links']} paired episodes of {ball} over recorded links; an inference takes "
            f"{1e3 * INFERENCE_S:.0f} ms.",
            "link | method", "{link} | `{method}`", "`{method}` | {link} | {success:ci2}",
        ),
        "own": (f"Each at its best of {CHOSEN} other episodes.", "method | d | every", "`{method}` | {at} | {every}",
                "`{method}` | d = {at} | {success:ci2}, every {every}"),
        "gates": (f"`corrected_hidden` at d = {corrected.GATED_AT}, asking as often as every so many steps would; of "
                  f"{corrected.CALIBRATED} other episodes are the thresholds.", "gate | every", "`{method}` | {at}",
                  "`{method}` | every {at} | {success:ci2}"),
    }  # fmt: skip
    heads = "without a chunk | success | score | largest step at a seam | jerk at seams | jerk | requests [1/s]"
    cells = (
        "{starved[mean]:.2f} | {success:ci2} | {score:ci2} | {seam_step[mean]:.2f} | {seam_jerk[mean]:.0f} "
        "| {jerk[mean]:.0f} | {requests_hz:.1f}"
    )
    tables = [
        Table(name, about, f"{first} | {heads}", f"{own} | {cells}", groups[name], across)
        for name, (about, first, own, across) in abouts.items() if groups[name]
    ]  # fmt: skip
    if results.get("errors"):
        about = "Root mean square of what the target says now, less its chunk of so many steps before; held out."
        cells = "{on} | {age} | {changed:.3f} | {left:.3f} | {drawn:.3f}"
        heads = "on | age | as it is | corrected | two answers to one observation"
        tables.append(Table("errors", about, heads, cells, results["errors"]))
    tables += [
        contrast_table(family),
        contrast_table(gates, "gate-contrasts"),
        glossary(METHODS | _OFTEN | _SLOWER | UNCORRECTED | PUSHED | corrected.ON_METAWORLD),
    ]
    drawn = {names[place]: groups[place] for place in ("success", "pusht") if groups[place]}
    picture = Picture("delay-success.svg", partial(draw_delays, drawn))
    return Report(
        tables,
        facts | {name: results.get(name) for name in ("cost", "errors")},
        [picture],
        also={TABLE: advised(groups)},
    )


def _rows(found: Results, methods: Iterable[str], on: str, start: str) -> list[dict[str, Any]]:
    """Of every method and number what was measured, under which condition, and the name of its fact."""
    return [
        {"method": name, "at": int(at), "on": f"{on}{at}", "fact": f"{start}_{{}}_{at}".removeprefix("success_"),
         "starved": {"mean": None}, **found[name][at]}
        for name in methods for at in sorted(found.get(name, {}), key=int)
    ]  # fmt: skip


def draw_delays(groups: Mapping[str, list[dict[str, Any]]]) -> Figure:
    """Success over delay, one world beside the other."""
    figure = Figure(figsize=(4.8 * len(groups), 3.6), layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True):
        shown = {s: {row["at"]: row["success"] for row in rows if row["method"] == m} for s, m in SHOWN.items()}
        series = {style: points_of(points) for style, points in shown.items() if points}
        add_series(axes, series, "delay d [control steps]", "success", name, SHOWN)
    return figure


def advised(groups: Mapping[str, list[dict[str, Any]]]) -> str:
    """The table of the package for ``specact doctor`` and ``specact advise``."""
    studies = []
    for world, shown in ((of, groups[place]) for place, of in WORLDS.items() if groups[place]):
        about = f"{len(shown[0]['won'])} episodes; the device sees what the target sees"
        rows = ",\n".join(
            json.dumps([row["method"], row["at"], *(round(value, 4) for value in row["success"].values())])
            for row in shown if row["method"] in WAYS
        )  # fmt: skip
        studies.append(f'"{world.name}": {{"about": "{about}", "rows": [\n{rows}\n]}}')
    return "{" + ",\n".join(studies) + "}\n"
