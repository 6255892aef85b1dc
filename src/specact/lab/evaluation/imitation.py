"""How far a method's actions are from demonstrations it was not trained on, step by step along them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from specact.errors import ConfigError
from specact.families.codes.bundle import Bundle
from specact.families.load import load_pair
from specact.gates.settings import GateSettings
from specact.lab.data.episodes import Episodes
from specact.lab.data.generate import demonstrations
from specact.lab.data.readers import format_of
from specact.lab.data.sources import read_sources
from specact.lab.envs import load_task
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.statistics import mean_interval
from specact.policy import SpeculativePolicy
from specact.verification import LocalTarget


def demonstration_files(bundle: Bundle, data: Path | None) -> list[Path]:
    """The files that the pair was trained on; none where a scripted expert made its demonstrations.

    Args:
        bundle: made by ``specact train``.
        data: folder that the recipe's data paths are relative to.

    Raises:
        ConfigError: if the recipe names files and there is no folder to look in.
        DataError: if a file is not there, or of no known format.
    """
    names = bundle.manifest["recipe"]["data"]
    if names and data is None:
        raise ConfigError(
            f"the demonstrations of {bundle.name!r} are files ({', '.join(names)}); "
            "give their folder with --data FOLDER"
        )
    files = [(data or Path()) / name for name in names]
    for file in files:
        format_of(file)
    return files


def held_out_demonstrations(bundle: Bundle, data: Path | None) -> Episodes:
    """The demonstrations that were kept back when the pair was trained, rebuilt from its manifest.

    Args:
        bundle: made by ``specact train``.
        data: folder that the recipe's data paths are relative to; None where a scripted expert made them.

    Raises:
        ConfigError: if the recipe names files and there is no folder to look in.
        DataError: if they cannot be read.
    """
    recipe = bundle.manifest["recipe"]
    made = demonstrations(
        load_task(bundle.env) if bundle.env else None,
        demonstration_files(bundle, data),
        recipe["generate_episodes"],
        recipe["generate_noise"],
        recipe["seed"],
        sources=read_sources(recipe.get("observations", {})),
        rate_hz=recipe.get("rate_hz"),
    )
    return made.split(recipe["held_out"], recipe["seed"])[1]


@dataclass(frozen=True)
class Imitation:
    """One method along demonstrations: a piece of work for a process.

    Attributes:
        bundle: name or path of the pair.
        episodes: the demonstrations.
        method: see :data:`~specact.lab.rollout.methods.METHODS`.
        gate: its calibrated gate.
        seed: of everything random.
    """

    bundle: str
    episodes: Episodes
    method: str
    gate: GateSettings
    seed: int


def imitation_error(what: Imitation) -> dict[str, float]:
    """Mean squared error of a method's actions along demonstrations, summed over the action's dimensions.

    The policy sees the demonstrated observations, whatever it answers; chunks are executed as on the robot.

    Returns:
        ``mean``, ``low``, ``high``: in normalised action units (each dimension's training range is [-1, 1]), with a
        95 % interval over episodes; ``raw``: in the environment's units; ``episodes``.
    """
    pair, episodes = load_pair(what.bundle), what.episodes
    family = rollout_of(pair, load_method(what.method))
    verifier, drafter = family.verifier(LocalTarget(pair.target)), family.drafter(None)
    policy = SpeculativePolicy(pair, what.gate.build(pair), drafter=drafter, verifier=verifier, seed=what.seed)
    normalised, raw = [], []
    for number, span in enumerate(episodes.slices()):
        policy.reset(number)
        acted = np.stack(
            [
                policy.act({name: values[t] for name, values in episodes.observation.items()})
                for t in range(span.start, span.stop)
            ]
        )
        away = acted - episodes.action[span]
        raw.append(float(np.square(away).sum(axis=1).mean()))
        normalised.append(float(np.square(away / pair.units.scale).sum(axis=1).mean()))
    return {**asdict(mean_interval(np.array(normalised))), "raw": float(np.mean(raw)), "episodes": len(raw)}
