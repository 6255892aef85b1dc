"""Corrected execution in the study of delay: the corrector, A2C2's head, and what would make them unnecessary.

All of them are trained by ``recipes/corrector-ball-chase.toml``. Half of the rollouts that they learn from are played
by a ``first`` corrector; trainings with one seed learn from the same ones. A ``hidden`` corrector cannot see the goal.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from experiments.delay.worlds import BASE, DELAYS, INFERENCE_S, LIBERO, RECORDED, WORLDS, Trial, made, played
from experiments.grid import ROOT, Cell, Run, trained
from experiments.measure import interleaved, relative_costs
from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import read_manifest
from specact.gates.settings import GateSettings
from specact.lab.envs import BENCHMARK
from specact.lab.rollout.episode import Episode, Pairing, run_pair
from specact.lab.rollout.rollout import episode_seed
from specact.lab.rollout.steps import OBSERVATION
from specact.links.model import SteadyLink
from specact.load import load_pair
from specact.observation import Window
from specact.systems.corrector import NO_CHUNK, Corrector, CorrectorParts, Staleness, corrected
from specact.types import Proposal

RECIPE = ROOT / "recipes" / "corrector-ball-chase.toml"
PARTED = (4, 6)  # control steps, where the methods part
AGES = (1, 2, 4, 8)
CALIBRATED = 10  # episodes
# A link of no time at all: the delay is that of the inference.
_FREE = SteadyLink(rtt_ms=0.0, jitter_ms=0.0, up_mbit_s=1e12, down_mbit_s=1e12)


@dataclass(frozen=True)
class Corrected:
    """A corrector that asks every ``max(EVERY, d)`` steps, or a draft, which never does.

    Attributes:
        method: of the recipe; ``first`` learns from stale chunks alone, ``shuffled`` with observations of other steps.
        device: the name of what it sees, ``hidden`` without the goal; "" sees all numbers that the target sees.
        training: the seed of its training. ``scale``: a factor of its corrections.
        delays: the delays that it is measured at. ``world``: the world whose target it corrects.
    """

    about: str
    method: str
    device: str = ""
    training: int = 0
    delays: tuple[int, ...] = DELAYS
    world: str = "success"
    scale: float = 1.0

    @property
    def bundle(self) -> str:
        """The name of its bundle."""
        prefix = "" if self.world == "success" else f"{self.world}-"
        return f"{prefix}{self.method}-{self.device}{'-' * bool(self.device)}{self.training}"

    @property
    def needs(self) -> str:
        """The cell of its training."""
        return f"correctors/{self.bundle}"

    def folder(self, out: Path) -> Path:
        """The folder of its bundle, below that of the run."""
        return out / "correctors" / self.bundle / "run" / "bundles" / self.bundle

    def run(self, trial: Trial, gate: GateSettings | None = None) -> Episode:
        """The episode of a trial; its ``chunks`` are the requests sent, ``stall_s`` is the time without a chunk."""
        pair, world = _pair(self.folder(trial.out)), made(trial.world)
        if gate is None:
            gate = every(trial.cadence) if pair.corrects else GateSettings("never")
        # A bound must be positive; this one is below the last bit of every action.
        bound = tuple(tuple(max(self.scale * value, 1e-30) for value in row) for row in pair.parts.spec.bound)
        device = Watched(pair.parts.network.run, structs.replace(pair.parts.spec, bound=bound))
        target_s = INFERENCE_S if trial.place in RECORDED else trial.delay * world.period_s
        link = trial.recorded if trial.place in RECORDED else _FREE
        episode, counts = run_pair(
            world, replace(pair, drafter=lambda: device), Pairing(gate, link, 0.0, target_s, math.inf),
            start=episode_seed(trial.seed, trial.episode, world.task), seed=trial.seed, episode=trial.episode,
        )  # fmt: skip
        return replace(episode, chunks=counts["transmitted"], stall_s=device.without * world.period_s)


class Watched(Corrector):
    """A corrector that counts the steps ``without`` a chunk."""

    without = 0

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        proposal = super().propose(window, rng)
        self.without += proposal.evidence is NO_CHUNK
        return proposal


def every(steps: int) -> GateSettings:
    """A gate that asks every so many control steps."""
    return GateSettings("periodic", options=(("period", steps),))


HIDDEN, CAMERA = "hidden", "camera"


def _trained_again(name: str, method: Corrected, delays: tuple[int, ...]) -> dict[str, Corrected]:
    """Two more trainings of a method."""
    seeds = {1: "second training", 2: "third training"}
    return {
        f"{name}_{seed}": replace(method, about=about, training=seed, delays=delays) for seed, about in seeds.items()
    }


CORRECTED: dict[str, Corrected] = {
    "corrected": Corrected("every action of a chunk corrected by the newest observation", "corrector"),
    "a2c2": Corrected("as published: learned from demonstrations, without a bound, no draft", "a2c2"),
    "draft": Corrected("control: the same network without the chunk, which never asks", "draft"),
    "corrected_hidden": Corrected("corrected; the device does not see the goal", "corrector", HIDDEN),
    "draft_hidden": Corrected("control: the draft alone; the device does not see the goal", "draft", HIDDEN),
    "newest_hidden": Corrected("control: without what was seen when it asked", "newest", HIDDEN, 0, PARTED),
    "first_hidden": Corrected("control: learned from stale chunks alone", "first", HIDDEN, 0, PARTED),
    "shuffled_hidden": Corrected("control: learned with observations of other steps", "shuffled", HIDDEN, 0, PARTED),
}
CORRECTED |= _trained_again("corrected_hidden", CORRECTED["corrected_hidden"], PARTED)
UNCORRECTED = {
    f"uncorrected{device}": replace(
        CORRECTED[f"corrected{device}"], about="control: chunks as they are, or draft", scale=0.0
    )
    for device in ("", "_hidden")
}
_SHARES = {"uncorrected": UNCORRECTED["uncorrected"]} | {
    f"corrected_{share}": replace(CORRECTED["corrected"], about=f"control: a {share} of each correction", scale=scale)
    for share, scale in (("quarter", 0.25), ("half", 0.5))
}
PUSHED: dict[str, Corrected] = {
    **{
        name: replace(CORRECTED[name], world="pusht")
        for name in ("corrected", "draft", "corrected_hidden", "draft_hidden")
    },
    **{name: replace(method, world="pusht", delays=(0, 2)) for name, method in _SHARES.items()},
    **_trained_again("corrected", replace(CORRECTED["corrected"], world="pusht"), (2,)),
}  # fmt: skip
# The device sees proprioception alone: no camera, and no instruction.
ON_LIBERO: dict[str, Corrected] = {
    f"{name}_hidden": replace(method, world="libero", delays=delays)
    for name, method, delays in (
        ("corrected", CORRECTED["corrected"], (4, 8)), ("uncorrected", UNCORRECTED["uncorrected"], (4, 8)),
        ("draft", CORRECTED["draft"], (4,)),
    )
}  # fmt: skip
ON_LIBERO |= _trained_again("corrected_hidden", ON_LIBERO["corrected_hidden"], (4, 8))
# The device sees proprioception, or its hand camera, too.
ON_METAWORLD: dict[str, Corrected] = {
    f"{name}_{device}": replace((CORRECTED | UNCORRECTED)[name], device=device, world="metaworld", delays=(2, 4))
    for device in (HIDDEN, CAMERA)
    for name in ("corrected", "draft", "uncorrected")
}
for _name in (f"corrected_{HIDDEN}", f"corrected_{CAMERA}"):
    ON_METAWORLD |= _trained_again(_name, ON_METAWORLD[_name], (4,))
GATED, GATED_AT, CADENCES = CORRECTED["corrected_hidden"], 4, (6, 8, 12)
ERRORS = {
    "success": CORRECTED["corrected"], "pusht": PUSHED["corrected"], "metaworld": ON_METAWORLD["corrected_hidden_1"],
}  # fmt: skip


_pair = cache(load_pair)


def training_cells() -> Iterator[Cell]:
    """A cell for every bundle that the methods need, that of the rollouts' player before those that learn from them."""
    worlds = (CORRECTED, PUSHED, ON_METAWORLD, *((ON_LIBERO,) if find_spec(LIBERO) else ()))
    methods = [method for world in worlds for method in world.values()]
    players = [replace(method, method="first") for method in methods if method.method != "a2c2"]
    for method in {method.bundle: method for method in (*players, *methods)}.values():
        yield Cell(method.needs, partial(_train, method))


def _train(corrector: Corrected, folder: Path, run: Run) -> dict[str, Any]:
    method, rollouts = corrector.method, folder / "run" / "rollouts"
    if method in ("first", "shuffled"):
        method = "corrector"
    world, changes = WORLDS[corrector.world], f'method = "{method}"\nseed = {corrector.training}\n'
    if corrector.device in world.sees:
        changes += f"sees = {list(world.sees[corrector.device])}\n"
    if corrector.device or corrector.world != "success":
        changes += f'env = "{world.env.replace(BENCHMARK, "")}"\n'
    if corrector.method not in ("first", "a2c2"):
        changes += f'played_by = "{replace(corrector, method="first").folder(run.out).resolve()}"\n'
        recorded = replace(corrector, method="corrector").folder(run.out).parents[1] / "rollouts"
        if recorded.is_dir() and not rollouts.parent.exists():
            shutil.copytree(recorded, rollouts)
            if corrector.method == "shuffled":
                _shuffle(rollouts)
    text = RECIPE.read_text().replace('"ball-chase-corrector"', f'"{corrector.bundle}"').replace(BASE, world.base)
    text = text.replace("episodes = 200", f"episodes = {world.learned}")
    parts = load_pair(trained(text + changes, folder, run)).parts
    return {"fingerprint": parts.fingerprint, "bound": list(parts.spec.bound)}


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


def gated(name: str, steps: int, folder: Path, run: Run) -> dict[str, Any]:
    """A gate whose threshold, on other episodes, asks as often as the cadence does, on the judged ones."""
    run.result(GATED.needs)

    def at(gate: GateSettings, seed: int, count: int) -> dict[str, Any]:
        return played(partial(GATED.run, gate=gate), Trial(GATED_AT), run, seed, count)

    gate = every(steps)
    if name != "cadence":
        wanted, low, high = at(gate, run.seed + 1, CALIBRATED)["requests_hz"], 0.0, 2.0
        for _ in range(8):
            gate = GateSettings(GATES[name], (low + high) / 2)
            often = at(gate, run.seed + 1, CALIBRATED)["requests_hz"] > wanted
            low, high = (gate.threshold, high) if often else (low, gate.threshold)
    return {"threshold": gate.threshold, **at(gate, run.seed, Trial(GATED_AT).world.episodes)}


def errors(corrector: Corrected, folder: Path, run: Run) -> list[dict[str, Any]]:
    """How far the target's answer is, root mean square, from its chunk as that ages, corrected, and from another draw.

    On held-out rollouts, normalised, action by action; in these all answers of an episode have the same random numbers.
    The target can draw again where the device sees what it sees.
    """
    rows, rng, parts = list[dict[str, Any]](), np.random.default_rng(run.seed), _pair(corrector.folder(run.out)).parts
    table = load_file(max((run.out / corrector.needs / "run" / "rollouts").iterdir()))
    chunk = parts.pair().units.from_environment(table["chunk"])
    seen = {name: table[OBSERVATION + name] for name in parts.spec.observation.fields}
    draws = seen.keys() >= parts.spec.chunks.observation.fields.keys()
    for age in (age for age in AGES if age < chunk.shape[1]):
        differences: dict[str, list[NDArray[np.float32]]] = {"changed": [], "left": [], "drawn": []}
        for at in rng.choice(np.flatnonzero(table["step"] >= age), run.few(400)):
            then, now = ({name: values[row] for name, values in seen.items()} for row in (at - age, at))
            better, _ = corrected(parts.network.run, parts.spec, chunk[at - age], age, then, now)
            differences["changed"].append(chunk[at, 0] - chunk[at - age, age])
            differences["left"].append(chunk[at, 0] - better)
            if draws:
                drawn = [parts.pair().units.from_environment(parts.target.infer(Window(now), rng)[0]) for _ in range(2)]
                differences["drawn"].append(drawn[0] - drawn[1])
        rms = {name: float(np.sqrt(np.square(values).mean())) for name, values in differences.items() if values}
        rows.append({"on": WORLDS[corrector.world].name, "age": age, "drawn": None, **rms})
    return rows


def cost(folder: Path, run: Run) -> dict[str, Any]:
    """Time of a correction, of a draft and of a chunk, and the parameters of their networks."""
    bundles = {"corrector": GATED.folder(run.out), "draft": CORRECTED["draft_hidden"].folder(run.out)}
    parts: CorrectorParts = load_pair(bundles["corrector"]).parts
    spec, asks, target = parts.spec, parts.spec.chunks, parts.target
    seen, window = spec.observation.zeros(), asks.observation.zeros()
    chunk, rng = np.zeros((asks.chunk, asks.actions), np.float32), np.random.default_rng(0)
    draft = load_pair(bundles["draft"]).drafter()
    kinds: dict[str, Callable[[int], object]] = {
        "corrector": lambda age: corrected(parts.network.run, spec, chunk, age, seen.arrays, seen.arrays),
        "draft": lambda age: draft.propose(seen, rng),
        "target": lambda age: target.infer(window, rng),
    }
    seconds = interleaved(kinds, [number % asks.chunk for number in range(run.few(400))], rng)
    bundles["target"] = find_bundle(BASE)
    parameters = {name: sum(read_manifest(bundle).parameters.values()) for name, bundle in bundles.items()}
    return relative_costs(seconds, seconds["target"]) | {"parameters": parameters}
