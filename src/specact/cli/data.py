"""``specact data`` describes demonstrations, and makes some with a scripted expert or of recordings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional

from specact.cli.options import Maybe, Options
from specact.cli.output import lines_of, print_result, progress_bars, remark
from specact.errors import ConfigError
from specact.files import check_folder
from specact.records import Count, NotNegative, Seed, WholeNumber

if TYPE_CHECKING:
    from specact.lab.data.episodes import Episodes
    from specact.observation import ObservationSpec


@dataclass(frozen=True)
class Info(Options):
    """Describe demonstrations and warn of problems for training."""

    path: Positional[Path]  # npz file, zarr replay buffer, LeRobot dataset folder (v2.1, v3.0), or robomimic HDF5 file
    # recipe: show the data as it reads them, in its environment's terms, and what each of its policies sees
    recipe: Maybe[Path] = None
    json: bool = False  # print the description as JSON

    def run(self) -> None:
        from specact.lab.data.checks import describe
        from specact.lab.data.readers import read

        episodes, seen = (read(self.path), {}) if self.recipe is None else _as_read(self.recipe, self.path)
        description = describe(episodes, self.path)
        policies = {} if self.recipe is None else {"policies": {who: spec.describe() for who, spec in seen.items()}}
        summary = {name: value for name, value in description.items() if name != "warnings"}
        summary |= {f"policy {who} sees": spec.describe()["fields"] for who, spec in seen.items()}
        print_result(self.json, description | policies, lines_of(summary))
        for warning in [] if self.json else description["warnings"]:
            remark(f"warning: {warning}", warn=True)


@dataclass(frozen=True, kw_only=True)
class Record(Options):
    """Record a scripted expert's demonstrations as a LeRobot dataset (v3.0), on several processes; resumes."""

    # task with an expert: ball, ball-chase, swarm, peg, metaworld, libero-spatial, libero-object, one of their tasks
    # (metaworld/reach-v3), or MODULE:TASK
    env: str
    episodes: Count = 200  # successful episodes to keep; of a suite, of each of its tasks
    seed: Seed = 0  # random seed
    # standard deviation of bursts of noise on executed actions; recorded actions are the expert's
    noise: NotNegative = 0.0
    out: Path  # the dataset's folder
    pixels: WholeNumber = 64  # height and width of the frames of each camera; 0 for no frames
    privileged: bool = False  # also record what only the simulator knows (privileged.*), for auxiliary in recipes
    workers: Maybe[Count] = None  # processes; one per core if not given
    json: bool = False  # print the counts as JSON

    def run(self) -> None:
        from specact.lab.data.generate import Order, record
        from specact.lab.rollout.pool import Pool

        if self.out.suffix:
            raise ConfigError(f"--out must be a folder whose name has no dot, got {self.out}")
        check_folder(self.out)
        order = Order(self.env, self.seed, self.noise, self.pixels, self.privileged)
        with Pool(self.workers) as pool, progress_bars() as update:
            recording = record(order, self.out, self.episodes, pool.each, partial(update, "demonstrations"))
        counts = {
            "path": str(self.out), "kept": sum(recording.kept.values()), "tried": sum(recording.tried.values()),
            "steps": recording.steps,
            "tasks": {name: {"kept": recording.kept[name], "tried": recording.tried[name]} for name in recording.kept},
        }  # fmt: skip
        print_result(self.json, counts)


@dataclass(frozen=True)
class FromRecording(Options):
    """Convert recordings of specact run --record to a LeRobot dataset (v3.0), for training."""

    recordings: Positional[tuple[Path, ...]]  # MCAP files, of the same observations and control rate
    out: Path  # the dataset's folder
    json: bool = False  # print the counts as JSON

    def run(self) -> None:
        from specact.lab.data.recordings import to_dataset

        if not self.recordings:
            raise ConfigError("give at least one recording, as in: specact data from-recording run.mcap --out dataset")
        check_folder(self.out)
        with progress_bars() as update:
            written, left_out, cut = to_dataset(self.recordings, self.out, partial(update, "recordings"))
        print_result(self.json, {
            "path": str(self.out), "episodes": sum(written.kept.values()), "steps": written.steps,
            "tasks": written.kept, "left_out": left_out, "cut": cut,
        })  # fmt: skip


Data = (
    Annotated[Info, tyro.conf.subcommand("info")]
    | Annotated[Record, tyro.conf.subcommand("record")]
    | Annotated[FromRecording, tyro.conf.subcommand("from-recording")]
)


def _as_read(recipe: Path, path: Path) -> tuple[Episodes, dict[str, ObservationSpec]]:
    """Demonstrations as a recipe reads them, and what each of its policies sees."""
    from specact.lab.data.generate import read_demonstrations
    from specact.lab.train.dataset import observation_of
    from specact.lab.train.recipe import Recipe, load_recipe

    wanted = load_recipe(recipe, Recipe)
    episodes = read_demonstrations(wanted, [path])
    seen = {who: observation_of(policy, wanted, episodes, f"policy {who!r}") for who, policy in wanted.seeing.items()}
    return episodes, seen
