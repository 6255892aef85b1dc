"""``specact train`` of a flow policy: from demonstrations to a bundle; stopped, it goes on where it was."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from specact import __version__
from specact.envs import load_task
from specact.locks import locked
from specact.policies.chunk import ChunkSpec
from specact.training import stages
from specact.training.flow import Flow
from specact.training.flow_export import write_flow_bundle
from specact.training.flow_recipe import FlowRecipe
from specact.training.flow_stage import NAME, flow_stage, units_of
from specact.training.folder import check_free, claim, last_lines
from specact.training.loop import run
from specact.training.stages import Progress
from specact.training.train import Trained


def train_flow(recipe: FlowRecipe, data: Path, out: Path, progress: Progress, *, threads: int = 1) -> Trained:
    """Makes the flow policy of a recipe; arguments and errors as for :func:`~specact.training.train.train`."""
    torch.set_num_threads(threads)
    check_free(out, asdict(recipe))
    task = load_task(recipe.env)
    made = stages.demonstrated(recipe, task, data, progress)
    dataset = stages.prepare(made, recipe)
    spec = ChunkSpec(
        window=recipe.window,
        state=made.state.shape[1],
        goal=0 if made.goal is None else made.goal.shape[1],
        chunk=recipe.chunk,
        actions=made.action.shape[1],
        rate_hz=task.rate_hz,
    )
    with locked(out):
        claim(out, asdict(recipe))
        return _train(recipe, dataset, spec, out, progress)


def _train(recipe: FlowRecipe, dataset: stages.Dataset, spec: ChunkSpec, out: Path, progress: Progress) -> Trained:
    stage = flow_stage(dataset, recipe, spec)
    stage.module.load_state_dict(run(stage, out, lambda done: progress(NAME, done, recipe.steps)))
    assert isinstance(stage.module, Flow)
    folder = out / "bundles" / recipe.bundle
    manifest = {
        "name": recipe.bundle,
        "env": recipe.env,
        "specact": __version__,
        "recipe": asdict(recipe),
        "training": last_lines(out),
    }
    write_flow_bundle(
        folder, manifest=manifest, model=stage.module, units=units_of(dataset), half=recipe.precision == "float16"
    )
    return Trained([folder], last_lines(out))
