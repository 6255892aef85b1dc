"""Corrected execution in the study of delay: the corrector, A2C2's head, and what would make them unnecessary.

Every one is trained by ``recipes/corrector-ball-chase.toml`` with another ``method``; those of a seed learn from the
same rollouts. A ``hidden`` one sees the ball and the plate, and not the goal that the ball is to chase.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from experiments.grid import ROOT, Cell, Run, specact
from specact.gates.settings import GateSettings
from specact.lab.envs.ball import CHASE, BallEnv
from specact.lab.envs.robot import MovingWorld
from specact.lab.rollout.episode import Episode, Pairing, run_pair
from specact.lab.rollout.rollout import episode_seed
from specact.links.model import SteadyLink
from specact.load import load_pair
from specact.pair import Pair

RECIPE = ROOT / "recipes" / "corrector-ball-chase.toml"
PACE, EVERY = 0.1, 4
# A link of no time at all: the delay is that of the inference.
_FREE = SteadyLink(rtt_ms=0.0, jitter_ms=0.0, up_mbit_s=1e12, down_mbit_s=1e12)


class HiddenGoal(BallEnv):
    """Ball-chase that also shows ``ball [8]``, the state without the goal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        seen = self.observation_space
        assert isinstance(seen, spaces.Dict)
        self.observation_space = spaces.Dict({**seen.spaces, "ball": spaces.Box(-4.0, 4.0, (8,), np.float32)})

    def look(self) -> dict[str, NDArray[np.float32]]:
        seen = super().look()
        return {**seen, "ball": seen["state"][:8]}


TASK = replace(CHASE, make=partial(HiddenGoal, pace=None, goal_in_state=True, graded=True))
HIDDEN = f"{__name__}:TASK"


@dataclass(frozen=True)
class Corrected:
    """A trained ``method`` of the recipe, which asks every ``max(EVERY, d)`` steps, or never if it knows no chunk.

    Attributes:
        hidden: whether it does not see the goal.
        training: the seed of its training.
    """

    about: str
    method: str
    hidden: bool = False
    training: int = 0

    @property
    def bundle(self) -> str:
        """Its name."""
        return f"{self.method}-{'hidden-' * self.hidden}{self.training}"

    def run(self, trial: Any) -> Episode:
        """The episode of a trial; its ``chunks`` are the requests that were sent."""
        pair, world = _pair(trial.out / "correctors" / self.bundle / "run" / "bundles" / self.bundle), _world()
        every = GateSettings("periodic", options=(("period", max(EVERY, trial.delay)),))
        gate = every if pair.corrects else GateSettings("never")
        pairing = Pairing(gate, _FREE, 0.0, trial.delay * world.period_s, math.inf)
        start = episode_seed(trial.seed, trial.episode, world.task)
        episode, counts = run_pair(world, pair, pairing, start=start, seed=trial.seed, episode=trial.episode)
        return replace(episode, chunks=counts["transmitted"])


CORRECTED: dict[str, Corrected] = {
    "corrected": Corrected("every action of a chunk corrected by the newest observation", "corrector"),
    "a2c2": Corrected("as published: learned from demonstrations, without a bound, no draft", "a2c2"),
    "draft": Corrected("control: the same network without the chunk, which never asks", "draft"),
    "index": Corrected("control: the correction knows the index alone", "index"),
    "shuffled": Corrected("control: observations of other episodes in training", "shuffled"),
    "corrected_1": Corrected("second training", "corrector", training=1),
    "corrected_2": Corrected("third training", "corrector", training=2),
    "corrected_hidden": Corrected("corrected; the device does not see the goal", "corrector", hidden=True),
    "draft_hidden": Corrected("control: the draft alone; the device does not see the goal", "draft", hidden=True),
}


def training_cells() -> Iterator[Cell]:
    """A cell for every bundle that the methods need."""
    for each in {each.bundle: each for each in CORRECTED.values()}.values():
        yield Cell(f"correctors/{each.bundle}", partial(_train, each))


def _train(of: Corrected, folder: Path, run: Run) -> dict[str, Any]:
    sees = f'env = "{HIDDEN}"\nsees = ["ball"]\n' * of.hidden
    changes = f'method = "{of.method}"\nseed = {of.training}\n{sees}'
    recipe, out = folder / "recipe.toml", folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    recipe.write_text(RECIPE.read_text().replace('"ball-chase-corrector"', f'"{of.bundle}"') + changes)
    recorded = folder.with_name(replace(of, method="corrector").bundle) / "run" / "rollouts"
    if recorded.is_dir() and of.method != "a2c2" and not out.exists():
        shutil.copytree(recorded, out / "rollouts")
    specact("train", recipe.resolve(), "--out", out.resolve(), folder=ROOT)
    manifest = load_pair(out / "bundles" / of.bundle).parts
    return {"fingerprint": manifest.fingerprint, "bound": list(manifest.spec.bound)}


@cache
def _pair(bundle: Path) -> Pair[Any]:
    return load_pair(bundle)


@cache
def _world() -> MovingWorld:
    return MovingWorld(TASK, pace=PACE)
