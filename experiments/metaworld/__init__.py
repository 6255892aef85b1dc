"""Policies that see cameras, on Meta-World and PushT: what they cost, and how often they succeed.

``--data`` is a folder with the bundles that do not come with the package, by name. ``device/*`` runs in real time: on a
machine with nothing else to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from experiments.grid import Cell, Run, evaluated, made_pair, specact
from experiments.measure import outcomes, paired
from experiments.metaworld import device
from experiments.metaworld.tables import METHODS
from experiments.metaworld.tables import report as report
from specact.lab.envs import load_task
from specact.lab.evaluation.run import Evaluation
from specact.lab.rollout.statistics import contrast, seeds_interval

# Episodes of each of the ten tasks: none of the demonstrations and calibrations begins like one of them.
PER_TASK, BLANKED, RATE = 20, 5, 0.4
# Actions executed of a chunk, and the seed of the episodes that one of them is selected on.
EXECUTED, CHOSEN_SEED = (4, 2, 1), 2
TARGET = "target_on_device"
# Targets in a pair with the draft, by the name of the pair.
MADE = {"tokens": "metaworld-tokens", "flow": "metaworld-flow"}
POLICIES = ("tokens", "metaworld", "flow")
SEEDS = ("metaworld", "metaworld-1", "metaworld-2")
REPLANNING = ("metaworld-tokens", "metaworld-flow-96", "metaworld-draft-96", "metaworld-draft")
GATED = ("draft", "head_draft", "random", "adahi", "uncertainty", "random_learned", "learned", "hybrid")
GATE_CONTRASTS = (
    ("adahi", "random"), ("uncertainty", "random_learned"), ("learned", "random_learned"), ("learned", "adahi"),
    ("learned", "head_draft"), ("head_draft", "draft"), ("hybrid", "learned"),
)  # fmt: skip
# PushT: methods by pair, and contrasts in mean coverage.
CAMERAS = {"pusht": ("draft", "target"), "pusht-camera": ("draft", "target"), "pusht-camera-state": ("draft", "hybrid")}
CAMERA_CONTRASTS = (
    ("pusht-camera target", "pusht target"), ("pusht-camera-state hybrid", "pusht target"),
    ("pusht-camera draft", "pusht draft"),
)  # fmt: skip


class Blank(gym.ObservationWrapper[dict[str, Any], Any, dict[str, Any]]):
    """A world in which every camera shows black."""

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {name: np.zeros_like(seen) if name.startswith("image.") else seen for name, seen in observation.items()}


# The environment "experiments.metaworld:BLANK".
_TASK = load_task("metaworld")
BLANK = replace(_TASK, name="metaworld-blank", make=lambda **options: Blank(_TASK.make(**options)))


def plan(run: Run) -> Iterator[Cell]:
    """What needs the package alone first; then other bundles, and real time."""
    for name in POLICIES:
        yield Cell(f"policies/{name}", partial(policy, name))
    yield Cell("cameras", cameras)
    yield Cell("gates/metaworld", partial(gates, "metaworld"))
    for name in REPLANNING:
        yield Cell(f"replanning/{name}", partial(replanning, name))
    yield Cell("seeds", seeds)
    yield from device.plan(partial(source, calibrated=True))


def source(name: str, run: Run, *, calibrated: bool = False) -> str:
    """A bundle by name, in the folder of data or in the package; pairs with the draft are made."""
    if name in MADE:
        pair = made_pair(run.out / "pairs" / name, "metaworld-draft", MADE[name], execute=4, env="metaworld")
        if calibrated and not Path(pair, "calibration").exists():
            few = ("--episodes", 2, "--rounds", 1) if run.quick else ()
            specact("calibrate", pair, "--rate", RATE, *few)
        return pair
    bundle = (run.data or Path()) / name
    return str(bundle) if (bundle / "manifest.json").exists() else name


def evaluation(
    pair: str, methods: Sequence[str], per_task: int, folder: Path, run: Run, *, env: str | None = None, seed: int = 0
) -> dict[str, Any]:
    """What is kept of an evaluation on so many episodes of each task."""
    what = Evaluation(pair, env, tuple(methods), 10 * per_task, seed or run.seed, RATE)
    return evaluated(what, folder, run)


def policy(name: str, folder: Path, run: Run) -> dict[str, Any]:
    """The success of a pair's methods, and of two of them with every camera blank."""
    pair, blank = source(name, run), "experiments.metaworld:BLANK"
    return {
        "seen": evaluation(pair, METHODS, PER_TASK, folder / "seen", run),
        "blank": evaluation(pair, ("draft", "hybrid"), BLANKED, folder / "blank", run, env=blank),
    }


def gates(name: str, folder: Path, run: Run) -> dict[str, Any]:
    """Every gate of a pair with a learned gate's head at one rate; Holm's correction over its contrasts."""
    summary = evaluation(source(name, run), GATED, PER_TASK, folder / "run", run)
    won = {method: outcomes(folder / "run", method) for method in GATED}
    return {"episodes": summary["episodes"], "methods": summary["methods"], "contrasts": paired(won, GATE_CONTRASTS)}


def seeds(folder: Path, run: Run) -> dict[str, Any]:
    """Success by method and contrast: of each training seed, and of all, with an interval over seeds and episodes."""
    for name in SEEDS:
        evaluation(source(name, run), METHODS, PER_TASK, folder / name, run)
    success = {method: [outcomes(folder / name, method) for name in SEEDS] for method in METHODS}
    contrasts = {
        f"{first} - {second}": [a - b for a, b in zip(success[first], success[second], strict=True)]
        for first, second in (("adahi", "random"), ("hybrid", "adahi"), ("hybrid", "draft"))
    }
    rows = {
        name: {"each": [float(won.mean()) for won in values], "all": asdict(seeds_interval(values))}
        for name, values in (success | contrasts).items()
    }
    return {"pairs": list(SEEDS), "episodes": len(success["draft"][0]), "rows": rows}


def replanning(name: str, folder: Path, run: Run) -> dict[str, Any]:
    """A policy with fewer actions of a chunk executed; the number is selected on episodes of its own."""
    bundle = source(name, run)

    def success(number: int, kind: str, per_task: int, seed: int) -> dict[str, Any]:
        # The policy stands for both parts of the pair, which executes so many actions of a chunk.
        pair = made_pair(run.out / "pairs" / f"{name}-{number}", bundle, bundle, execute=number)
        summary = evaluation(pair, (TARGET,), per_task, folder / f"{kind}-{number}", run, seed=seed)
        return dict(summary["methods"][TARGET]["success"])

    chosen = {number: success(number, "chosen", PER_TASK // 2, CHOSEN_SEED) for number in EXECUTED}
    best = max(EXECUTED, key=lambda number: chosen[number]["rate"])
    judged = {number: success(number, "judged", PER_TASK, run.seed) for number in {EXECUTED[0], best}}
    won = {number: outcomes(folder / f"judged-{number}", TARGET) for number in judged}
    return {
        "policy": name, "tried": {str(number): success for number, success in chosen.items()}, "best": best,
        "judged": {str(number): {"success": interval} for number, interval in judged.items()},
        "gained": asdict(contrast(won[best], won[EXECUTED[0]])),
    }  # fmt: skip


def cameras(folder: Path, run: Run) -> dict[str, Any]:
    """PushT with a camera and PushT with its state: contrasts of the coverage on the same episodes."""
    scores = dict[str, np.ndarray]()
    for name, kinds in CAMERAS.items():
        evaluated(Evaluation(name, None, kinds, 100, run.seed), folder / name, run)
        scores |= {f"{name} {method}": outcomes(folder / name, method, "score") for method in kinds}
    return {"contrasts": paired(scores, CAMERA_CONTRASTS)}
