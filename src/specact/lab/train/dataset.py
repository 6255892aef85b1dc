"""Demonstrations ready for training: read, reduced to what is seen, split, normalised."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specact.bundle.manifest import Words
from specact.errors import DataError
from specact.lab.data.episodes import Episodes, Observed
from specact.lab.data.frames import Frames, copied
from specact.lab.data.generate import demonstrations
from specact.lab.envs import load_task
from specact.lab.envs.task import Task
from specact.lab.train.loop import Progress
from specact.lab.train.recipe import Recipe
from specact.lab.train.windows import Statistics, Windows
from specact.observation import ObservationSpec


@dataclass(frozen=True)
class Dataset:
    """Demonstrations ready for training.

    Attributes:
        train, held_out: windows of the training and of the held-out episodes.
        statistics: of the training observations.
        centre, scale: action normalisation, ``[A]``: ``normalised = (action - centre) / scale`` lies in [-1, 1].
        words: of the instructions trained on, or None where there are none.
    """

    train: Windows
    held_out: Windows
    statistics: Statistics
    centre: Tensor
    scale: Tensor
    words: Words | None = None


def task_of(recipe: Recipe) -> Task | None:
    """The recipe's environment; None where it says a control rate instead."""
    return None if recipe.env is None else load_task(recipe.env)


def read_demonstrations(recipe: Recipe, data: Path, progress: Progress) -> Episodes:
    """The demonstrations of a recipe: read from files below ``data``, or made by the task's scripted expert.

    Raises:
        DataError: if they cannot be read or do not fit the task.
    """
    return demonstrations(
        task_of(recipe),
        tuple(data / name for name in recipe.data),
        recipe.generate_episodes,
        recipe.generate_noise,
        recipe.seed,
        lambda done: progress("demonstrations", done, recipe.generate_episodes),
        sources=recipe.observations,
        rate_hz=recipe.rate_hz,
    )


def needed(episodes: Episodes, specs: Iterable[ObservationSpec], learned: Iterable[str] = ()) -> Episodes:
    """Without what no policy sees and no encoder learns; one frame of every camera that one does see is read.

    Raises:
        DataError: if such a camera cannot be read.
    """
    names = {name for spec in specs for name in spec.fields}.union(learned)
    kept = episodes.only(*(name for name in episodes.observation if name in names))
    for name in kept.cameras:
        kept.frames(name)[0]
    return kept


@contextmanager
def frames_at_hand(episodes: Episodes, folder: Path, progress: Progress) -> Iterator[Episodes]:
    """With every camera's frames decoded into one file in ``folder``, unless they are in memory anyway.

    Batches are drawn at random, and a frame in the middle of a compressed chunk or video costs all those before it. The
    files are removed when all has gone well; a run that was stopped finds them there.

    Raises:
        ConfigError: if there is no room for them.
        DataError: if a frame cannot be read.
    """

    def at_hand(name: str, array: Observed) -> Observed:
        if not isinstance(array, Frames) or array.in_memory:
            return array
        return copied(array, folder / f"{name}.npy", lambda done: progress(f"frames of {name}", done, len(array)))

    yield replace(episodes, observation={name: at_hand(name, seen) for name, seen in episodes.observation.items()})
    shutil.rmtree(folder, ignore_errors=True)


def prepare(episodes: Episodes, recipe: Recipe, *, skip_disturbed: bool = False) -> Dataset:
    """Splits by episode (the same split for every stage), normalises actions by their range.

    Args:
        episodes: demonstrations.
        recipe: of what they are for.
        skip_disturbed: see :class:`~specact.lab.train.windows.Windows`.

    Raises:
        DataError: if there are too few episodes, none as long as a chunk, or values too large to compute with.
    """
    longest = int(np.diff(episodes.ends, prepend=0).max())
    if recipe.chunk > longest:
        raise DataError(
            f"the longest demonstration has {longest} actions, fewer than chunk = {recipe.chunk}: every chunk would "
            "end in repetitions of a last action; shorten chunk"
        )
    train, held_out = episodes.split(recipe.held_out, recipe.seed)
    low, high = train.action.min(0), train.action.max(0)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is refused below
        centre, scale = (low + high) / 2, np.maximum((high - low) / 2, 1e-6)
    seen = train.observation
    statistics = {name: moments(values) for name, values in seen.items() if isinstance(values, np.ndarray)}
    tensors = [torch.from_numpy(centre), torch.from_numpy(scale)]
    parts = (*tensors, *(part for pair in statistics.values() for part in pair))
    if not all(bool(part.isfinite().all()) for part in parts):
        raise DataError(
            "these demonstrations hold values so large that their range or standard deviation overflows; rescale them"
        )
    words = None if train.instructions is None else Words.of(train.instructions)
    windows = [
        Windows(part, recipe.chunk, centre, scale, words, skip_disturbed=skip_disturbed) for part in (train, held_out)
    ]
    if not all(part.counts.any() for part in windows):
        raise DataError(
            f"no chunk of {recipe.chunk} actions lies before a disturbance; shorten chunk, or leave out skip_disturbed"
        )
    return Dataset(windows[0], windows[1], statistics, tensors[0], tensors[1], words)


def moments(values: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over the first axis, the latter not below 0.001; infinite where they overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(values.mean(0)), torch.from_numpy(np.maximum(values.std(0), 1e-3))
