"""``specact train`` of a flow policy: from demonstrations to a bundle; stopped, it goes on where it was."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specact import __version__
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.sources import LoadedPolicy
from specact.lab.train import stages
from specact.lab.train.flow import Flow
from specact.lab.train.flow_export import write_flow_bundle
from specact.lab.train.flow_recipe import FlowRecipe
from specact.lab.train.flow_stage import NAME, flow_stage, units_of
from specact.lab.train.folder import check_free, claim, last_lines
from specact.lab.train.loop import run
from specact.lab.train.sees import observation_of
from specact.lab.train.stages import Progress
from specact.lab.train.teacher import check_teacher, forget_answers, teach
from specact.lab.train.train import Trained
from specact.locks import locked


def train_flow(
    recipe: FlowRecipe,
    data: Path,
    out: Path,
    progress: Progress,
    *,
    threads: int = 1,
    teacher: LoadedPolicy | None = None,
) -> Trained:
    """Makes the flow policy of a recipe; arguments and errors as for :func:`~specact.lab.train.train.train`.

    Args:
        teacher: a policy whose answers to the demonstrated observations are learned, instead of the demonstrated
            actions.
    """
    torch.set_num_threads(threads)
    asked = asdict(recipe) | ({} if teacher is None else {"teacher": [teacher.name, teacher.fingerprint]})
    check_free(out, asked)
    made = stages.demonstrated(recipe, stages.task_of(recipe), data, progress)
    observation = observation_of(recipe, recipe, made, "the policy")
    made = stages.needed(made, [observation] if teacher is None else [observation, teacher.policy.spec.observation])
    dataset = stages.prepare(made, recipe)
    assert made.rate_hz is not None, "the recipe or its task says it"
    spec = ChunkSpec(observation, recipe.chunk, made.action.shape[1], made.rate_hz)
    if teacher is not None:
        check_teacher(teacher, recipe.chunk, spec.actions, spec.rate_hz, set(made.observation))
    with locked(out):
        claim(out, asked)
        with stages.frames_at_hand(made, out / "frames", progress) as made:
            dataset = stages.prepare(made, recipe) if made.cameras else dataset
            if teacher is not None:
                teach(dataset, teacher, recipe.chunk, out, recipe.seed, progress)
            trained = _train(recipe, dataset, spec, out, progress, asked)
        forget_answers(out)
        return trained


def _train(
    recipe: FlowRecipe,
    dataset: stages.Dataset,
    spec: ChunkSpec,
    out: Path,
    progress: Progress,
    asked: dict[str, Any],
) -> Trained:
    stage = flow_stage(dataset, recipe, spec)
    stage.module.load_state_dict(run(stage, out, lambda done: progress(NAME, done, recipe.steps)))
    assert isinstance(stage.module, Flow)
    folder = out / "bundles" / recipe.bundle
    manifest = {
        "name": recipe.bundle,
        "env": recipe.env or "",
        "specact": __version__,
        "recipe": asked,
        "training": last_lines(out),
    }
    write_flow_bundle(
        folder, manifest=manifest, model=stage.module, units=units_of(dataset), half=recipe.precision == "float16"
    )
    return Trained([folder], last_lines(out))
