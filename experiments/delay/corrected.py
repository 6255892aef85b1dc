"""Corrected execution in the study of delay: the corrector, A2C2's head, and what would make them unnecessary.

Every one is trained by ``recipes/corrector-ball-chase.toml``, from rollouts of which half are played by a ``first``
corrector; those of a seed learn from the same. A ``hidden`` one does not see the goal that the ball is to chase.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from experiments.grid import ROOT, Cell, Run, specact
from experiments.measure import interleaved, relative_costs
from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import read_manifest
from specact.gates.settings import GateSettings
from specact.lab.envs.ball import CHASE, BallEnv
from specact.lab.envs.robot import MovingWorld
from specact.lab.rollout.episode import Episode, Pairing, run_pair
from specact.lab.rollout.rollout import episode_seed
from specact.lab.rollout.steps import OBSERVATION
from specact.links.model import SteadyLink
from specact.load import load_pair
from specact.pair import Pair
from specact.systems.corrector import CorrectorParts, Staleness, corrected
from specact.types import Proposal

RECIPE = ROOT / "recipes" / "corrector-ball-chase.toml"
BASE, PACE, EVERY = "ball-chase-flow", 0.1, 4
# Control steps; the controls are measured where the methods part.
DELAYS, PARTED = (0, 1, 2, 4, 6, 8), (4, 6)
JUDGED, CALIBRATED = 100, 10  # episodes
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
    """A corrector that asks every ``max(EVERY, d)`` steps, or a draft, which never does.

    Attributes:
        method: of the recipe; or ``first``, from stale chunks alone, or ``shuffled``, with other steps' observations.
        hidden: whether it does not see the goal. ``training``: the seed of its training.
        delays: at which it is measured.
    """

    about: str
    method: str
    hidden: bool = False
    training: int = 0
    delays: tuple[int, ...] = DELAYS

    @property
    def bundle(self) -> str:
        """Its name."""
        return f"{self.method}-{'hidden-' * self.hidden}{self.training}"

    def folder(self, out: Path) -> Path:
        """Of its bundle, in that of the run."""
        return out / "correctors" / self.bundle / "run" / "bundles" / self.bundle

    def run(self, trial: Any, gate: GateSettings | None = None) -> Episode:
        """The episode of a trial, with another gate than the cadence; its ``chunks`` are the requests sent."""
        pair, world = _pair(self.folder(trial.out)), _world()
        if gate is None:
            gate = every(max(EVERY, trial.delay)) if pair.corrects else GateSettings("never")
        pairing = Pairing(gate, _FREE, 0.0, trial.delay * world.period_s, math.inf)
        start = episode_seed(trial.seed, trial.episode, world.task)
        episode, counts = run_pair(world, pair, pairing, start=start, seed=trial.seed, episode=trial.episode)
        return replace(episode, chunks=counts["transmitted"])


def every(steps: int) -> GateSettings:
    """Asks at this cadence."""
    return GateSettings("periodic", options=(("period", steps),))


CORRECTED: dict[str, Corrected] = {
    "corrected": Corrected("every action of a chunk corrected by the newest observation", "corrector"),
    "a2c2": Corrected("as published: learned from demonstrations, without a bound, no draft", "a2c2"),
    "draft": Corrected("control: the same network without the chunk, which never asks", "draft"),
    "corrected_hidden": Corrected("corrected; the device does not see the goal", "corrector", True),
    "draft_hidden": Corrected("control: the draft alone; the device does not see the goal", "draft", True),
    "newest_hidden": Corrected(
        "control: without what was seen when the chunk was asked for", "newest", True, 0, PARTED
    ),
    "first_hidden": Corrected(
        "control: learned from stale chunks alone, none of its own states", "first", True, 0, PARTED
    ),
    "shuffled_hidden": Corrected("control: learned with observations of other steps", "shuffled", True, 0, PARTED),
    "corrected_hidden_1": Corrected("second training", "corrector", True, 1, PARTED),
    "corrected_hidden_2": Corrected("third training", "corrector", True, 2, PARTED),
}
GATED, GATED_AT, CADENCES = CORRECTED["corrected_hidden"], 4, (6, 8, 12)


def training_cells() -> Iterator[Cell]:
    """A cell for every bundle that the methods need, that of the rollouts' player before those that learn from them."""
    first = [replace(each, method="first") for each in CORRECTED.values() if each.method != "a2c2"]
    for each in {each.bundle: each for each in (*first, *CORRECTED.values())}.values():
        yield Cell(f"correctors/{each.bundle}", partial(_train, each))


def _train(of: Corrected, folder: Path, run: Run) -> dict[str, Any]:
    recipe, out = folder / "recipe.toml", folder / "run"
    method = "corrector" if of.method in ("first", "shuffled") else of.method
    changes = f'method = "{method}"\n'
    changes += f"seed = {of.training}\n" + f'env = "{HIDDEN}"\nsees = ["ball"]\n' * of.hidden
    if of.method not in ("first", "a2c2"):
        changes += f'played_by = "{replace(of, method="first").folder(run.out).resolve()}"\n'
        recorded = replace(of, method="corrector").folder(run.out).parents[1] / "rollouts"
        if recorded.is_dir() and not out.exists():
            shutil.copytree(recorded, out / "rollouts")
            if of.method == "shuffled":
                _shuffle(out / "rollouts")
    folder.mkdir(parents=True, exist_ok=True)
    recipe.write_text(RECIPE.read_text().replace('"ball-chase-corrector"', f'"{of.bundle}"') + changes)
    specact("train", recipe.resolve(), "--out", out.resolve(), folder=ROOT)
    manifest = load_pair(out / "bundles" / of.bundle).parts
    return {"fingerprint": manifest.fingerprint, "bound": list(manifest.spec.bound)}


def _shuffle(rollouts: Path) -> None:
    """Gives every step the observation of another, most likely of another episode."""
    for number, file in enumerate(sorted(rollouts.iterdir())):
        table = load_file(file)
        other = np.random.default_rng(number).permutation(len(table["step"]))
        save_file(table | {name: table[name][other] for name in table if name.startswith(OBSERVATION)}, file)


class Chance(Staleness):
    """Control: asks at random, with the privilege of knowing that there is no chunk."""

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return 1.0 if math.isinf(proposal.evidence.age) else float(rng.random())


GATES = {"staleness": "staleness", "random": f"{__name__}:Chance", "cadence": "periodic"}


Trials = Callable[[Run, int, int], list[Any]]
Summary = Callable[[list[Episode]], dict[str, Any]]


def gate_cells(trials: Trials, summary: Summary) -> Iterator[Cell]:
    """A cell for every gate and cadence: as many requests, and what they buy."""
    for steps in CADENCES:
        for name in GATES:
            yield Cell(f"gate/{name}/{steps}", partial(_gated, name, steps, trials, summary))


def _gated(name: str, steps: int, trials: Trials, summary: Summary, folder: Path, run: Run) -> dict[str, Any]:
    """A gate whose threshold, on other episodes, asks as often as the cadence does, on the judged ones."""
    run.result(f"correctors/{GATED.bundle}")

    def played(gate: GateSettings, seed: int, count: int) -> dict[str, Any]:
        pool, episodes = run.pool, trials(run, seed, count)
        found = {trial.episode: episode for trial, episode in pool.each(partial(GATED.run, gate=gate), episodes)}
        return summary([found[number] for number in sorted(found)])

    gate, few = every(steps), run.few(CALIBRATED)
    if name != "cadence":
        wanted, low, high = played(gate, run.seed + 1, few)["requests_hz"], 0.0, 2.0
        for _ in range(8):
            gate = GateSettings(GATES[name], (low + high) / 2)
            often = played(gate, run.seed + 1, few)["requests_hz"] > wanted
            low, high = (gate.threshold, high) if often else (low, gate.threshold)
    return {"threshold": gate.threshold, **played(gate, run.seed, run.few(JUDGED))}


def cost(folder: Path, run: Run) -> dict[str, Any]:
    """Time of a correction and of a chunk, and the parameters of their networks."""
    parts: CorrectorParts = load_pair(GATED.folder(run.out)).parts
    spec, asks, target = parts.spec, parts.spec.chunks, parts.target
    seen, window = spec.observation.zeros().arrays, asks.observation.zeros()
    chunk, rng = np.zeros((asks.chunk, asks.actions), np.float32), np.random.default_rng(0)
    kinds: dict[str, Callable[[int], object]] = {
        "corrector": lambda age: corrected(parts.network.run, spec, chunk, age, seen, seen),
        "target": lambda age: target.infer(window, rng),
    }
    seconds = interleaved(kinds, [number % asks.chunk for number in range(run.few(400))], rng)
    bundles = {"corrector": GATED.folder(run.out), "target": find_bundle(BASE)}
    sizes = {name: read_manifest(folder).parameters for name, folder in bundles.items()}
    return {
        **relative_costs(seconds, seconds["target"]),
        "parameters": {name: sum(parts.values()) for name, parts in sizes.items()},
    }


@cache
def _pair(bundle: Path) -> Pair[Any]:
    return load_pair(bundle)


@cache
def _world() -> MovingWorld:
    return MovingWorld(TASK, pace=PACE)
