"""A target that is fed the scene of the simulator, before a draft that sees cameras: what a device never knows.

``--data`` is the folder of its demonstrations: ``specact data record --env metaworld --privileged --pixels 0 --noise
0.4 --episodes 150 --out DATA/metaworld-scene``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.grid import ROOT, Cell, Run, specact
from experiments.report import Table
from experiments.value.unknown import DEVICE, DRAFT, EPISODES, RATES, SUITE, TRAININGS, pair_of, taught
from specact.gates import Gate
from specact.lab.envs.metaworld import INSTRUCTIONS
from specact.lab.rollout.methods import Method
from specact.types import Proposal

BUNDLE = "metaworld-scene"
RECIPE = f"""kind = "regression"
bundle = "{BUNDLE}"
env = "{SUITE}"
data = ["{BUNDLE}"]
sees = ["state", "privileged.scene"]
instruction = true
skip_disturbed = true
window = 1
chunk = 8
layers = 3
width = 128
dropout = 0.0
batch = 128
steps = 5000
"""
# How often the draft alone fails, of tasks in which it does so in more than a tenth of 20 other episodes; of a pair
# with it: specact eval PAIR --env metaworld --methods draft --episodes 200 --seed 2.
FAILS = {
    "button-press-topdown-v3": 0.35, "peg-insert-side-v3": 0.95, "pick-place-v3": 1.0, "push-v3": 0.95,
    "reach-v3": 0.65, "window-open-v3": 0.15,
}  # fmt: skip


class Weak(Gate):
    """Control: asks at random, in the tasks in which the draft alone fails."""

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return float(failing(proposal) > 0.0) + rng.random()


class Weakest(Gate):
    """Control: asks in the tasks in which the draft alone fails most."""

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return failing(proposal) + 1e-3 * rng.random()


def failing(proposal: Proposal) -> float:
    """Of the draft alone, in the task of an inference."""
    return {INSTRUCTIONS[task]: share for task, share in FAILS.items()}.get(str(proposal.window.instruction), 0.0)


TASKS = tuple(Method(of.__name__.lower(), f"{__name__}:{of.__name__}", str(of.__doc__)) for of in (Weak, Weakest))
METHODS: tuple[str | Method, ...] = ("draft", DEVICE, "random", "adahi", "random_learned", "learned", *TASKS)


def table(rows: list[dict[str, Any]]) -> Table:
    """The table of the methods."""
    about = (
        f"{EPISODES} paired episodes of Meta-World by a draft of all ten tasks that sees cameras, before a target that "
        "is fed the scene; share of inferences that asked. `target_on_device` is the target alone, which no device can "
        "be. `weak` asks at random in tasks in which the draft fails, `weakest` where it fails most."
    )
    kept = [{key: row[key] for key in ("method", "success", "trainings", "sent")} for row in rows]
    cells = "`{method}` | {success:ci2} | {trainings} | {sent:.2f?}"
    return Table("scene", about, "method | success | by training | asked", cells, kept)


def plan() -> Iterator[Cell]:
    """The targets, and gates before them: at the first rate in every training, at the others in one."""
    yield from (Cell(f"scene/target{training}", partial(train, training)) for training in TRAININGS)
    for rate, training in [(RATES[0], training) for training in TRAININGS] + [(rate, "") for rate in RATES[1:]]:
        yield Cell(f"scene/{rate}{training}", partial(gates, rate, training))


def train(training: str, folder: Path, run: Run) -> dict[str, Any]:
    """Trains the target."""
    data, recipe = run.needed("demonstrations with their scenes").resolve(), folder.resolve() / "recipe.toml"
    folder.mkdir(parents=True, exist_ok=True)
    recipe.write_text(f"{RECIPE}seed = {training.removeprefix('-') or 0}\n")
    specact("train", recipe, "--data", data, "--out", recipe.with_name("run"), folder=ROOT)
    return {"sees": "scene"}


def gates(rate: float, training: str, folder: Path, run: Run) -> dict[str, Any]:
    """Gates before a target at a rate; at the first one also what no rate changes."""
    run.result(f"scene/target{training}")
    target = str(run.out / f"scene/target{training}/run/bundles" / BUNDLE)
    return taught(pair_of(DRAFT, target, folder, 10), METHODS[2 * (rate != RATES[0]) :], rate, folder, run)
