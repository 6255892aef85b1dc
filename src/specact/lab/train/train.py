"""``specact train``: the training of a recipe's kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

from specact.errors import ConfigError
from specact.families.chunks.sources import LoadedPolicy
from specact.lab.train.chunks import ChunkTraining
from specact.lab.train.codes import CodesTraining
from specact.lab.train.corrector import CorrectorTraining
from specact.lab.train.drafters import DrafterTraining
from specact.lab.train.fit import How, Training, TrainingResult, fit
from specact.lab.train.flash import FlashTraining
from specact.lab.train.loop import Progress
from specact.lab.train.recipe import AnyRecipe, ChunkRecipe, CodesRecipe, CorrectorRecipe, DrafterRecipe, FlashRecipe

_TRAININGS: dict[type, Callable[[Any, Path], Training]] = {
    CodesRecipe: CodesTraining, DrafterRecipe: DrafterTraining, FlashRecipe: FlashTraining,
    CorrectorRecipe: CorrectorTraining,
}  # fmt: skip


def train(
    recipe: AnyRecipe, data: Path, out: Path, progress: Progress, *, teacher: LoadedPolicy | None = None,
    **how: Unpack[How],
) -> TrainingResult:  # fmt: skip
    """Trains the policies of a recipe, whose data paths are relative to ``data``; see :func:`fit`, as for errors.

    Args:
        recipe: what to train.
        teacher: of a chunk policy, whose answers to the demonstrated observations are the labels.
        data, out, progress, how: folders, and how it is trained.
    """
    if isinstance(recipe, ChunkRecipe):
        return fit(ChunkTraining(recipe, data, teacher), out, progress, **how)
    if teacher is not None:
        raise ConfigError(
            "this recipe names what it learns from; leave out --teacher, which is for a recipe of kind flow, "
            "regression or tokens"
        )
    return fit(_TRAININGS[type(recipe)](recipe, data), out, progress, **how)
