"""``specact train``: trains bundles on demonstrations, in resumable stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specact import __version__
from specact.families.codes.spec import PolicySpec
from specact.lab.data.locks import locked
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


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training run.

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
) -> TrainingResult:
    """Trains the tokenizer and policies of a recipe and exports its bundles; a stopped run resumes.

    Args:
        recipe: what to train.
        data: folder the recipe's data paths are relative to.
        out: folder of the run: checkpoints, ``log.jsonl`` and ``bundles/NAME``.
        progress: called with (stage, steps done, total).
        threads: of PyTorch, in every process; results are exact for the same number.
        jobs: stages that are trained concurrently, each in its own process; it does not change the results. With more
            than one, the calling program must be importable: ``if __name__ == "__main__":``.
        every: steps between checkpoints, the most that a kill can lose.
        on: device of the policies' training; a stopped run may resume on another one.

    Raises:
        ConfigError: if there is no such accelerator, ``out`` holds a run of another recipe, is locked by another
            process, or a file cannot be written.
        DataError: if the demonstrations cannot be used; ``out`` is then not created.
        SpecactError: if the process of a stage ended before the stage did.
    """
    torch.set_num_threads(threads)
    accelerator(on)  # fails early if it is missing
    check_free(out, as_dict(recipe))  # before demonstrations are generated, which can take minutes
    task = stages.task_of(recipe)
    episodes = stages.demonstrated(recipe, task, data, progress)
    specs = stages.specs_of(recipe, episodes)
    episodes = stages.needed(episodes, specs.values(), learned(recipe, specs, episodes, task))
    # Fails on unusable demonstrations before the folder is created.
    stages.prepare(episodes, recipe, skip_disturbed=recipe.skip_disturbed)
    with locked(out):
        claim(out, as_dict(recipe))
        with stages.frames_at_hand(episodes, out / "frames", progress) as episodes:
            work = Work(recipe, episodes, out, every, on)
            train_stages(work, progress, jobs=jobs, threads=threads)
            sort_log(out / "log.jsonl", list(work.plan()))
            return TrainingResult(_export(work), last_lines(out))


def _export(work: Work) -> list[Path]:
    recipe, dataset, out, folders = work.recipe, work.dataset, work.out, []
    for name, (target, draft) in recipe.bundles.items():
        policies = {}
        for role, policy_name in (("target", target), ("draft", draft)):
            shapes = stages.shapes_of(dataset, recipe, work.specs[policy_name.removesuffix("@snapshot")])
            model = VQBeT(shapes, replace(recipe.policy(policy_name), dropout=0.0), dataset.statistics)
            model.load_state_dict(work.trained(policy_name))
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
        vocabularies = [policy.shapes.words for policy in policies.values() if policy.shapes.words is not None]
        if vocabularies:
            manifest["words"] = vocabularies[0].describe()
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
    assert rate_hz is not None, "given by the recipe or its task"
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
