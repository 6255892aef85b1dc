"""Where does asking pay? A value oracle that branches the simulator, and what a gate could gain at most.

Before a sampled inference the robot is copied, simulator and policy: half of the copies ask there, the others skip,
and all go on under the base gate (:mod:`experiments.value.branches`). The value of asking is the difference in success.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.grid import ROOT, Cell, Run, bundle_in, specact, trained
from experiments.value import heads, settings, tables
from experiments.value.branches import CONTINUATIONS, SCORES, Branchable, branched, differences, look, robots_of
from specact import Pair, load_pair
from specact.gates.calibration import threshold_for_rate
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import HYBRID
from specact.lab.rollout.rollout import EpisodeRange
from specact.rng import Role, stream

report = tables.report
RATES = (0.1, 0.2, 0.4, 0.6)
# Per pair the states branched in each of so many episodes per rate, on average.
PAIRS, EPISODES = {"ball": 10, "swarm": 10, "relocate": 10, "peg": 20}, 40
# Of gates in closed loop: episodes, in parts; those that a threshold is from; rates of pairs, and of further trainings.
GATED, JUDGED, PARTS, CALIBRATION = "swarm", 200, 4, 20
LOOPS = {"": RATES, "-1": (0.2,), "-2": (0.2,), "-ball": (0.2,)}
# Lessons of a further training's learned gate; what its bundle holds.
LESSONS, BUNDLE = 50_000, '[bundles]\nswarm = ["target", "draft"]\n'
# On episodes that no choice was made on: the chosen head and its rivals, and a distilled draft of the same size alone.
FRESH, DISTILLED, RIVALS = range(100, 300), "swarm-distilled", (tables.HEAD, "time head")
SEEDS = 3  # of a head
HEAD = heads.Head("what a device sees", heads.everything)  # of the states of every pair
# Of heads: the rates, episodes of a part that they are fitted on, and of each path parts, first episode, continuations.
HEADED, COLLECTED, PATHS = (0.1, 0.2), 25, {"greedy": (1, 1050, CONTINUATIONS), "base": (4, 1100, 2)}


def plan(run: Run) -> Iterator[Cell]:
    """The oracle, per pair and rate; its greedy gate in closed loop, in parts, and others at the rate that this had."""
    for name in PAIRS:
        for rate in RATES:
            yield Cell(f"oracle/{name}/{rate}", partial(oracle, name, rate))
    for loop, rates in LOOPS.items():
        if loop[1:].isdigit():
            yield Cell(f"gate{loop}/pair", partial(train, loop))
        for rate in rates:
            for part in range(PARTS):
                yield Cell(f"gate{loop}/{rate}/{tables.ORACLE}/{part}", partial(greedy, rate, part, loop))
            for gate in ("random", *SCORES):
                yield Cell(f"gate{loop}/{rate}/{gate}", partial(gated, rate, gate, 0, range(JUDGED), loop))
    for rate in HEADED:
        for path, (parts, *_) in PATHS.items():
            for part in range(parts):
                yield Cell(f"collect/{rate}/{path}/{part}", partial(collect, rate, path, part))
        yield Cell(f"heads/{rate}", partial(compared, rate))
        for name, episodes, gates, fitted in (
            ("gate", range(JUDGED), (tables.SCHEDULE, tables.PERIODIC), tables.HEADS),
            ("fresh", FRESH, ("random", "deviation", tables.PERIODIC, tables.DRAFT), RIVALS),
        ):
            for gate in gates:
                yield Cell(f"{name}/{rate}/{gate}", partial(gated, rate, gate, 0, episodes, ""))
            for gate in fitted:
                for seed in range(SEEDS):
                    yield Cell(f"{name}/{rate}/{gate}/{seed}", partial(gated, rate, gate, seed, episodes, ""))
    yield from settings.plan()


def oracle(name: str, rate: float, folder: Path, run: Run) -> dict[str, Any]:
    """Branches sampled inferences of gated episodes; the rows are kept in the folder."""
    family = rollout_of(pair := load_pair(name), HYBRID)
    robots = robots_of(pair, rate, run.seed, range(run.few(EPISODES)), family)
    rows = branched(robots, family, stream(run.seed, Role.DATA), run, PAIRS[name])
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "rows.npz", **rows)
    inferences = sum(robot.policy.counts["steps"] for robot in robots)
    cell = {"rate": rate, "success": won(robots).count("1"), "episodes": len(robots), "inferences": inferences}
    scores = dict(zip(SCORES, rows["scores"].T, strict=True)) | {tables.HEAD: HEAD.held_out(valued(rows))}
    return cell | tables.summary(rows["episode"], scores, differences(rows["ends"]), rate, inferences / len(robots))


def train(loop: str, folder: Path, run: Run) -> dict[str, Any]:
    """Draft, target and learned gate of one more training."""
    recipe = (ROOT / "recipes" / f"{GATED}.toml").read_text()
    path = trained(f"seed = {loop[1:]}\n{recipe.partition('[policies.target_sampled]')[0]}{BUNDLE}", folder, run)
    specact("calibrate", path, "--gate", "learned", "--rate", LOOPS[loop][0], "--lessons", run.few(LESSONS))
    return {}


def gated_pair(loop: str, run: Run) -> Pair[Any]:
    """The pair whose gates run in closed loop."""
    return load_pair(bundle_in(run.out / f"gate{loop}/pair") if loop[1:].isdigit() else loop[1:] or GATED)


def greedy(rate: float, part: int, loop: str, folder: Path, run: Run) -> dict[str, Any]:
    """Part of the episodes of the greedy gate: it asks where the oracle's estimate is largest, on its own path.

    The threshold is that of states of other episodes, those of the base gate.
    """
    pair = gated_pair(loop, run)
    family, count, rng = rollout_of(pair, HYBRID), run.few(JUDGED // PARTS), stream(run.seed, Role.DATA)
    others = robots_of(pair, rate, run.seed, calibrating(run, CALIBRATION), family)
    calibration = branched(others, family, rng, run, PAIRS[pair.name])
    cut = threshold_for_rate(differences(calibration["ends"]).mean(1), rate)
    robots = robots_of(pair, rate, run.seed, range(part * count, (part + 1) * count), family)
    rows = branched(robots, family, rng, run, cut=cut)
    return {"won": won(robots), "asked": int(rows["asked"].sum()), "inferences": len(rows["asked"]), "cut": cut}


def collect(rate: float, path: str, part: int, folder: Path, run: Run) -> dict[str, Any]:
    """States with their values, of episodes that no gate is judged on: of the greedy gate, or of the base gate."""
    pair, (_, first, continuations) = load_pair(GATED), PATHS[path]
    family, episodes = rollout_of(pair, HYBRID), range(first + COLLECTED * part, first + COLLECTED * (part + 1))
    numbers = [EpisodeRange.CALIBRATION + number for number in episodes[: run.few(COLLECTED)]]
    robots = robots_of(pair, rate, run.seed, numbers, family)
    for robot in robots:
        robot.gate.look = partial(look, robot, pair.units)
    cut = run.result(f"gate/{rate}/{tables.ORACLE}/0")["cut"] if path == "greedy" else None
    rng = stream(run.seed, Role.DATA, episode=episodes[0])
    rows = branched(robots, family, rng, run, cut=cut, continuations=continuations)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "rows.npz", **rows)
    return {"success": won(robots).count("1"), "episodes": len(robots), "states": len(rows["asked"]),
            "asked": int(rows["asked"].sum())}  # fmt: skip


def collected(rate: float, run: Run, paths: Sequence[str] = tuple(PATHS)) -> dict[str, Any]:
    """What was collected along some paths."""
    files = [run.out / f"collect/{rate}/{path}/{part}/rows.npz" for path in paths for part in range(PATHS[path][0])]
    parts = [valued(dict(np.load(file))) for file in files]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def valued(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Rows with the value of each by each half of the continuations, and by all, instead of their ends."""
    values = differences(rows["ends"])
    halves = np.stack([values[:, ::2].mean(1), values[:, 1::2].mean(1)], axis=1)
    return {name: rows[name] for name in rows if name not in ("ends", "score")} | {
        "halves": halves, "value": halves.mean(1)
    }  # fmt: skip


def wanted(rate: float, loop: str, run: Run) -> float:
    """The rate that the greedy gate had."""
    parts = [run.result(f"gate{loop}/{rate}/{tables.ORACLE}/{part}") for part in range(PARTS)]
    return float(sum(part["asked"] for part in parts) / sum(part["inferences"] for part in parts))


def compared(rate: float, folder: Path, run: Run) -> dict[str, Any]:
    """First-order gains of heads, each fitted on other episodes; the best candidate is chosen by them."""
    rows, share = collected(rate, run), wanted(rate, "", run)
    inferences = len(rows["value"]) / len(np.unique(rows["episode"]))

    def scores(head: heads.Head) -> NDArray[np.float64]:
        return np.stack([head.held_out(rows, seed) for seed in range(SEEDS)]).mean(0)  # type: ignore[no-any-return]

    candidates = {name: scores(head) for name, head in heads.CANDIDATES.items()}
    gains = {name: tables.gain(score, rows["value"], share, inferences) for name, score in candidates.items()}
    chosen = max(gains, key=lambda name: gains[name])
    every = {name: scores(head) for name, head in heads.all_of(chosen).items()}
    every |= dict(zip(SCORES, rows["scores"].T, strict=True))
    return {"chosen": chosen, "gains": gains, "episodes": len(np.unique(rows["episode"]))} | (
        tables.summary(rows["episode"], every, rows["halves"], share, inferences)
    )


def score_of(rate: float, gate: str, seed: int, run: Run) -> Callable[[Mapping[str, Any], np.random.Generator], float]:
    """A score of what is known about an inference: another gate's, a fitted head's, or those of mere schedules."""
    if gate in SCORES:
        at = list(SCORES).index(gate)
        return lambda known, rng: float(known["scores"][at])
    if gate == tables.PERIODIC:
        return lambda known, rng: float(known["past"][2])
    if gate == tables.SCHEDULE:
        shares = heads.schedule(collected(rate, run, ["greedy"]))
        return lambda known, rng: float(shares[min(int(known["past"][0]), len(shares) - 1)] - rng.random())
    head = heads.all_of(run.result(f"heads/{rate}")["chosen"])[gate]
    predict = head.fit(collected(rate, run), seed)
    return lambda known, rng: float(predict(head.inputs({name: values[None] for name, values in known.items()}))[0])


def gated(rate: float, gate: str, seed: int, episodes: range, loop: str, folder: Path, run: Run) -> dict[str, Any]:
    """Episodes under another gate, at the rate that the greedy one had; thresholds are of other episodes."""
    alone = gate == tables.DRAFT
    pair = load_pair(DISTILLED) if alone else gated_pair(loop, run)
    share = 0.0 if alone else wanted(rate, loop, run)
    family, by = rollout_of(pair, HYBRID), None if alone or gate == "random" else score_of(rate, gate, seed, run)

    def play(episodes: Sequence[int], cut: tuple[float, float] | None) -> tuple[str, dict[str, NDArray[Any]]]:
        robots = robots_of(pair, share, run.seed, episodes, family)
        for robot in robots:
            robot.gate.by, robot.gate.cut = by, cut
            if gate == tables.PRIVILEGED:
                robot.gate.look = partial(look, robot, pair.units)
        rows = branched(robots, family, stream(run.seed, Role.DATA), run, continuations=0)
        return won(robots), rows

    cut = None
    for _ in range(3 * (by is not None)):
        cut = threshold_for_rate(play(calibrating(run, 3 * CALIBRATION), cut)[1]["score"], share)
    letters, rows = play(episodes[: run.few(len(episodes) // PARTS) * PARTS], cut)
    return {"won": letters, "asked": int(rows["asked"].sum()), "inferences": len(rows["asked"]), "cut": cut}


def calibrating(run: Run, count: int) -> Sequence[int]:
    """Episodes that thresholds are from."""
    return EpisodeRange.CALIBRATION.episodes(run.few(count))


def won(robots: Sequence[Branchable]) -> str:
    """Who succeeded, as a letter 1 or 0 for each."""
    return "".join(str(int(robot.world.success)) for robot in robots)  # type: ignore[attr-defined]
