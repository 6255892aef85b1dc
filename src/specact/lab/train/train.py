"""``specact train``: the training of a recipe's kind."""

from __future__ import annotations

from pathlib import Path

from specact.errors import ConfigError
from specact.families.chunks.sources import LoadedPolicy
from specact.lab.train.chunks import ChunkTraining
from specact.lab.train.codes import CodesTraining
from specact.lab.train.drafters import DrafterTraining
from specact.lab.train.fit import Training, TrainingResult, fit
from specact.lab.train.flash import FlashTraining
from specact.lab.train.loop import Accelerator, Progress
from specact.lab.train.recipe import AnyRecipe, ChunkRecipe, CodesRecipe, DrafterRecipe, load_recipe
from specact.load import load_policy


def train_recipe(
    path: Path,
    data: Path,
    out: Path,
    progress: Progress,
    *,
    threads: int = 1,
    jobs: int = 1,
    teacher: str | None = None,
    on: Accelerator = "cpu",
) -> TrainingResult:
    """:func:`train` with the recipe in a file, and the name of a teacher.

    Raises:
        ConfigError: also if the recipe learns from something else than demonstrations, or teacher and data are given.
    """
    recipe = load_recipe(path)
    if teacher is not None and not isinstance(recipe, ChunkRecipe):
        raise ConfigError(
            f"{path} names what it learns from; leave out --teacher, which is for a recipe of kind flow, regression or "
            "tokens"
        )
    if isinstance(recipe, DrafterRecipe) and data != Path():
        raise ConfigError(f"{path} learns from rollouts of its target alone; leave out --data")
    policy = None if teacher is None else load_policy(teacher)
    return train(recipe, data, out, progress, threads=threads, jobs=jobs, teacher=policy, on=on)


def train(
    recipe: AnyRecipe,
    data: Path,
    out: Path,
    progress: Progress,
    *,
    threads: int = 1,
    jobs: int = 1,
    every: int = 250,
    teacher: LoadedPolicy | None = None,
    on: Accelerator = "cpu",
) -> TrainingResult:
    """Trains the policies of a recipe and exports its bundles.

    Args:
        recipe: what to train.
        data: folder the recipe's data paths are relative to.
        teacher: of a chunk policy, whose answers to the demonstrated observations are the labels.
        out, progress, threads, jobs, every, on: see :func:`~specact.lab.train.fit.fit`, as for errors.
    """
    training: Training
    if isinstance(recipe, CodesRecipe):
        training = CodesTraining(recipe, data)
    elif isinstance(recipe, ChunkRecipe):
        training = ChunkTraining(recipe, data, teacher)
    elif isinstance(recipe, DrafterRecipe):
        training = DrafterTraining(recipe, jobs)
    else:
        training = FlashTraining(recipe, data)
    return fit(training, out, progress, threads=threads, jobs=jobs, every=every, on=on)
