"""``specact train``: from demonstrations to bundles, in stages that each resume where they were stopped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specact import __version__
from specact.families.codes.spec import PolicySpec
from specact.lab.train import stages
from specact.lab.train.encoder import learned
from specact.lab.train.export import write_bundle
from specact.lab.train.folder import check_free, claim, last_lines
from specact.lab.train.jobs import Work, train_stages
from specact.lab.train.loop import Accelerator, accelerator, sort_log
from specact.lab.train.recipe import PolicyRecipe, Recipe, as_dict
from specact.lab.train.stages import Progress
from specact.lab.train.vqbet import Shapes, VQBeT
from specact.lab.train.windows import Dataset
from specact.locks import locked


@dataclass(frozen=True)
class Trained:
    """What a training run left behind.

    Attributes:
        bundles: their folders.
        metrics: the last log line of every stage.
    """

    bundles: list[Path]
    metrics: dict[str, Any]


def train(
    recipe: Recipe,
    data: Path,
    out: Path,
    progress: Progress,
    *,
    threads: int = 1,
    jobs: int = 1,
    every: int = 250,
    on: Accelerator = "cpu",
) -> Trained:
    """Makes tokenizer, policies and bundles of a recipe; run again after a stop, it goes on where it was.

    Args:
        recipe: what to make.
        data: folder the recipe's data paths are relative to.
        out: folder of the run: checkpoints, ``log.jsonl`` and ``bundles/NAME``.
        progress: called with (stage, steps done, total).
        threads: of PyTorch, in every process; results are exact for the same number.
        jobs: stages that may be trained at the same time, each in a process of its own; it does not change the results.
            A program that asks for more than one must be importable: ``if __name__ == "__main__":``.
        every: steps between checkpoints, which is also what a kill can cost.
        on: what policies are trained on; a run that was stopped may go on with another.

    Raises:
        ConfigError: if there is no such accelerator, ``out`` holds a run of another recipe, another process trains
            there, or a file cannot be written.
        DataError: if the demonstrations cannot be used. ``out`` is untouched then.
        SpecactError: if the process of a stage ended before the stage did.
    """
    torch.set_num_threads(threads)
    accelerator(on)  # what is not there is told at once
    check_free(out, as_dict(recipe))  # before demonstrations are made, which can take minutes
    task = stages.task_of(recipe)
    made = stages.demonstrated(recipe, task, data, progress)
    specs = stages.specs_of(recipe, made)
    made = stages.needed(made, specs.values(), learned(recipe, specs, made, task))
    # What cannot be used is refused before there is a folder.
    stages.prepare(made, recipe, skip_disturbed=recipe.skip_disturbed)
    with locked(out):
        claim(out, as_dict(recipe))
        with stages.frames_at_hand(made, out / "frames", progress) as made:
            work = Work(recipe, made, out, every, on)
            train_stages(work, progress, jobs=jobs, threads=threads)
            sort_log(out / "log.jsonl", list(work.plan()))
            return Trained(_export(work), last_lines(out))


def _export(work: Work) -> list[Path]:
    recipe, dataset, out, folders = work.recipe, work.dataset, work.out, []
    for name, (target, draft) in recipe.bundles.items():
        policies = {}
        for role, made in (("target", target), ("draft", draft)):
            shapes = stages.shapes_of(dataset, recipe, work.specs[made.removesuffix("@snapshot")])
            model = VQBeT(shapes, replace(recipe.policy(made), dropout=0.0), dataset.statistics)
            model.load_state_dict(work.trained(made))
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
        told = [policy.shapes.words for policy in policies.values() if policy.shapes.words is not None]
        if told:
            manifest["words"] = told[0].describe()
        write_bundle(
            out / "bundles" / name,
            manifest=manifest,
            spec=_spec(recipe, dataset, policies["draft"].shapes, policies["target"].shapes, recipe.policy(target)),
            table=stages.decoder_table(work.tokenizer()),
            centre=dataset.centre,
            scale=dataset.scale,
            policies=policies,
            half=recipe.precision == "float16",
        )
        folders.append(out / "bundles" / name)
    return folders


def _spec(recipe: Recipe, dataset: Dataset, draft: Shapes, target: Shapes, settings: PolicyRecipe) -> PolicySpec:
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
