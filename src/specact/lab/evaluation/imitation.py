"""Open-loop evaluation: the error of a method's actions on held-out demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.families.codes.pair import CodeParts
from specact.gates.settings import GateSettings
from specact.lab.data.episodes import Episodes
from specact.lab.data.generate import demonstrations
from specact.lab.data.readers import format_of
from specact.lab.data.sources import Source
from specact.lab.envs import env_of, load_task
from specact.lab.rollout.families import decoded_by, rollout_of
from specact.lab.rollout.methods import Method
from specact.lab.rollout.rollout import Robot, run_together
from specact.lab.rollout.steps import Table
from specact.lab.statistics import mean_interval
from specact.load import load_pair
from specact.observation import Observation
from specact.pair import PairSource
from specact.policy import SpeculativePolicy
from specact.records import read_record
from specact.verification import LocalTarget


def demonstration_files(bundle: CodeParts, data: Path | None) -> list[Path]:
    """The files that the pair was trained on; none where its demonstrations come from a scripted expert.

    Args:
        bundle: made by ``specact train``.
        data: folder that the recipe's data paths are relative to.

    Raises:
        ConfigError: if the recipe names files and no folder is given.
        DataError: if a file is missing, or of unknown format.
    """
    names = bundle.manifest.recipe["data"]
    if names and data is None:
        raise ConfigError(
            f"the demonstrations of {bundle.name!r} are files ({', '.join(names)}); "
            "give their folder with --data FOLDER"
        )
    files = [(data or Path()) / name for name in names]
    for file in files:
        format_of(file)
    return files


def held_out_demonstrations(bundle: CodeParts, data: Path | None, env: str | None = None) -> Episodes:
    """The pair's held-out demonstrations; arguments as of :func:`demonstration_split`."""
    return demonstration_split(bundle, data, env)[1]


def demonstration_split(bundle: CodeParts, data: Path | None, env: str | None = None) -> tuple[Episodes, Episodes]:
    """The demonstrations that the pair was trained on, and the held-out ones, rebuilt from its manifest.

    Args:
        bundle: made by ``specact train``.
        data: folder that the recipe's data paths are relative to; None where they come from a scripted expert.
        env: the environment that the user named, see :func:`~specact.lab.envs.env_of`.

    Raises:
        ConfigError: if the recipe names files and no folder is given, or the bundle's environment is third-party code
            that the user did not name.
        DataError: if they cannot be read.
    """
    recipe = bundle.manifest.recipe
    episodes = demonstrations(
        load_task(env_of(bundle, env)) if bundle.env else None,
        demonstration_files(bundle, data),
        recipe["generate_episodes"],
        recipe["generate_noise"],
        recipe["seed"],
        sources=read_record(recipe.get("observations", {}), dict[str, Source], "observations"),
        rate_hz=recipe.get("rate_hz"),
    )
    return episodes.split(recipe["held_out"], recipe["seed"])


@dataclass(frozen=True)
class OpenLoopJob:
    """The open-loop evaluation of one method: a job for a worker process.

    Attributes:
        source: how the pair is loaded.
        episodes: the demonstrations.
        method: how the pair drafts and verifies.
        gate: its calibrated gate.
        seed: random seed.
        first: number of the first episode; part of the random streams' addresses.
    """

    source: PairSource
    episodes: Episodes
    method: Method
    gate: GateSettings
    seed: int
    first: int = 0


@dataclass(frozen=True)
class OpenLoopResult:
    """The result of an open-loop evaluation.

    Attributes:
        error: mean squared error of the actions in each episode, summed over the action's dimensions, normalised (each
            dimension's training range is [-1, 1]), ``[E]``.
        raw: the same in the environment's units.
        steps: one row per inference, as in :mod:`specact.lab.rollout.families`.
    """

    error: NDArray[np.float64]
    raw: NDArray[np.float64]
    steps: Table


def run_open_loop(job: OpenLoopJob) -> OpenLoopResult:
    """Runs a method open loop: it observes the demonstrated states, whatever its actions.

    Chunks are executed as on the robot.
    """
    method, episodes = job.method, job.episodes
    pair = decoded_by(method, load_pair(job.source))
    family = rollout_of(pair, method)
    verifier, drafter = family.verifier(LocalTarget(pair.target())), family.drafter(None)
    policy = SpeculativePolicy(pair, job.gate.build(pair), drafter=drafter, verifier=verifier, seed=job.seed)
    normalised, raw, audit = [], [], family.audit()
    # Unused frames are not read: that would cost time, and they may be missing.
    observations = {name: values for name, values in episodes.observation.items() if name in pair.observation.fields}
    for number, span in enumerate(episodes.slices(), job.first):
        policy.reset(number)
        replay = _Replay(observations, range(span.start, span.stop))
        run_together([Robot(policy, replay)], family, audit)
        error = np.stack(replay.acted) - episodes.action[span]
        raw.append(float(np.square(error).sum(axis=1).mean()))
        normalised.append(float(np.square(error / pair.units.scale).sum(axis=1).mean()))
    return OpenLoopResult(np.array(normalised), np.array(raw), audit.table())


class _Replay:
    """A demonstration as a world: its observations do not depend on the actions."""

    def __init__(self, seen: Mapping[str, Any], steps: range) -> None:
        self._seen, self._steps = seen, steps
        self.acted: list[NDArray[np.float32]] = []

    @property
    def done(self) -> bool:
        return len(self.acted) == len(self._steps)

    def observe(self) -> Observation:
        return {name: values[self._steps[len(self.acted)]] for name, values in self._seen.items()}

    def act(self, action: NDArray[np.float32]) -> None:
        self.acted.append(action)


def imitation_error(job: OpenLoopJob) -> dict[str, float]:
    """Mean squared error of a method's actions on demonstrations, summed over the action's dimensions.

    Returns:
        ``mean``, ``low``, ``high``: in normalised action units (each dimension's training range is [-1, 1]), with a
        95 % interval over episodes; ``raw``: in the environment's units; ``episodes``.
    """
    result = run_open_loop(job)
    return {**asdict(mean_interval(result.error)), "raw": float(result.raw.mean()), "episodes": len(result.raw)}
