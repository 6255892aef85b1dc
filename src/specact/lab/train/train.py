"""``specact train``: from demonstrations to bundles, in stages that each resume where they were stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specact import __version__
from specact.families.codes.spec import PolicySpec
from specact.lab.envs.task import Task
from specact.lab.train import checkpoint, encoder_stage, stages
from specact.lab.train.encoder import ImageEncoder
from specact.lab.train.encoder_stage import Scenes, Telling
from specact.lab.train.export import write_bundle
from specact.lab.train.folder import check_free, claim, last_lines
from specact.lab.train.loop import run
from specact.lab.train.recipe import EncoderRecipe, PolicyRecipe, Recipe, as_dict
from specact.lab.train.stages import Progress
from specact.lab.train.tokenizer import ResidualVQ
from specact.lab.train.vqbet import Shapes, VQBeT
from specact.locks import locked
from specact.observation import ObservationSpec


@dataclass(frozen=True)
class Trained:
    """What a training run left behind.

    Attributes:
        bundles: their folders.
        metrics: the last log line of every stage.
    """

    bundles: list[Path]
    metrics: dict[str, Any]


def train(recipe: Recipe, data: Path, out: Path, progress: Progress, *, threads: int = 1) -> Trained:
    """Makes tokenizer, policies and bundles of a recipe; run again after a stop, it goes on where it was.

    Args:
        recipe: what to make.
        data: folder the recipe's data paths are relative to.
        out: folder of the run: checkpoints, ``log.jsonl`` and ``bundles/NAME``.
        progress: told (stage, steps done, steps in all).
        threads: of PyTorch, in the whole process; results are exact for the same number.

    Raises:
        ConfigError: if ``out`` holds a run of another recipe, another process trains there, or a file cannot be
            written.
        DataError: if the demonstrations cannot be used. ``out`` is untouched then.
    """
    torch.set_num_threads(threads)
    check_free(out, as_dict(recipe))  # before demonstrations are made, which can take minutes
    task = stages.task_of(recipe)
    made = stages.demonstrated(recipe, task, data, progress)
    specs = stages.specs_of(recipe, made)
    made = stages.needed(made, specs.values(), encoder_stage.learned(recipe, specs, made, task))
    dataset = stages.prepare(made, recipe)
    with locked(out):
        claim(out, as_dict(recipe))
        with stages.frames_at_hand(made, out / "frames", progress) as made:
            dataset = stages.prepare(made, recipe) if made.cameras else dataset
            return _train(recipe, task, specs, dataset, out, progress)


def _train(
    recipe: Recipe,
    task: Task | None,
    specs: dict[str, ObservationSpec],
    dataset: stages.Dataset,
    out: Path,
    progress: Progress,
) -> Trained:
    def advance(stage: str, total: int) -> Callable[[int], None]:
        return lambda done: progress(stage, done, total)

    stage = stages.tokenizer_stage(dataset, recipe)
    stage.module.load_state_dict(run(stage, out, advance("tokenizer", stage.steps)))
    tokenizer = stage.module.eval().requires_grad_(False)
    assert isinstance(tokenizer, ResidualVQ)

    scenes = Scenes(task, recipe.seed)
    trained: dict[tuple[str, EncoderRecipe], ImageEncoder] = {}  # policies with the same encoder share it
    for name, settings in recipe.policies.items():
        shown, encoder = dataset, settings.encoder
        cameras = specs[name].images if encoder.learns else ()
        for camera in cameras:
            if (camera, encoder) not in trained:
                stage = encoder_stage.encoder_stage(f"{name}.{camera}", encoder, camera, dataset, scenes, recipe.seed)
                stage.module.load_state_dict(run(stage, out, advance(stage.name, stage.steps)))
                assert isinstance(stage.module, Telling)
                trained[camera, encoder] = stage.module.encoder.eval()
            shown = encoder_stage.encoded(shown, camera, trained[camera, encoder])
        stage = stages.policy_stage(name, settings, shown, recipe, tokenizer, specs[name])
        assert isinstance(stage.module, VQBeT)
        for camera in cameras:
            stage.module.freeze(camera, trained[camera, encoder])
        stage.module.load_state_dict(run(stage, out, advance(name, stage.steps)))
    return Trained(_export(recipe, specs, dataset, tokenizer, out), last_lines(out))


def _export(
    recipe: Recipe, specs: dict[str, ObservationSpec], dataset: stages.Dataset, tokenizer: ResidualVQ, out: Path
) -> list[Path]:
    folders = []
    for name, (target, draft) in recipe.bundles.items():
        policies = {}
        for role, made in (("target", target), ("draft", draft)):
            shapes = stages.shapes_of(dataset, recipe, specs[made.removesuffix("@snapshot")])
            model = VQBeT(shapes, replace(recipe.policy(made), dropout=0.0), dataset.statistics)
            weights, _ = checkpoint.read(out / f"{made}.safetensors")
            model.load_state_dict(weights)
            policies[role] = model
        manifest = {
            "name": name,
            "env": recipe.env or "",
            "specact": __version__,
            "gates": recipe.gates,
            "recipe": as_dict(recipe),
            "policies": {"target": target, "draft": draft},
            "training": last_lines(out),
        }
        write_bundle(
            out / "bundles" / name,
            manifest=manifest,
            spec=_spec(recipe, dataset, policies["draft"].shapes, policies["target"].shapes, recipe.policy(target)),
            table=stages.decoder_table(tokenizer),
            centre=dataset.centre,
            scale=dataset.scale,
            policies=policies,
            half=recipe.precision == "float16",
        )
        folders.append(out / "bundles" / name)
    return folders


def _spec(recipe: Recipe, dataset: stages.Dataset, draft: Shapes, target: Shapes, settings: PolicyRecipe) -> PolicySpec:
    rate_hz = dataset.train.episodes.rate_hz
    assert rate_hz is not None, "a recipe or its task says it"
    return PolicySpec(
        draft=draft.observation,
        target=target.observation,
        codebooks=target.codebooks,
        codes=target.codes,
        chunk=target.chunk,
        actions=target.actions,
        execute=recipe.execute,
        overlap=recipe.overlap,
        temperature=recipe.temperature,
        rate_hz=rate_hz,
        sequential=settings.sequential,
    )
