"""``specact train`` trains the policies of a recipe, or distils a draft from a pair's target."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import tyro

from specact.cli.options import refuse_unused
from specact.cli.output import print_json, progress_bars, remarks
from specact.errors import ConfigError
from specact.files import check_folder

# Inferences that a draft is distilled from, in each round.
LESSONS = 100_000


def train(
    recipe: tyro.conf.Positional[Path | None] = None,
    /,
    *,
    out: Path,
    distil: str | None = None,
    target: str | None = None,
    env: str | None = None,
    lessons: int = LESSONS,
    data: Path = Path(),
    threads: Annotated[
        int, tyro.conf.arg(help="number of PyTorch threads; results are reproducible only with the same number")
    ] = 1,
    jobs: int | None = None,
    accelerator: Literal["cpu", "cuda"] = "cpu",
    json: bool = False,
) -> None:
    """Train the policies and bundles of a recipe. An interrupted run resumes.

    Args:
        recipe: TOML file, see recipes/; kind = "flow", "regression" or "tokens" trains a chunk policy, "drafters" the
            drafters of a token policy on its own rollouts, "flash" the drafting block of a flow policy; without a kind
            tokenizer, target and drafts are trained.
        out: folder of the run: checkpoints, log.jsonl, bundles/.
        distil: without a recipe, a pair, by path or name: makes NAME-distilled, whose draft is trained on the
            target's output in states of the gated policy. With a recipe of a chunk policy, the
            target that the draft is for (MODULE:NAME, a .toml file that describes an ONNX file, a flow bundle,
            BUNDLE#target): its answers to the demonstrated observations are learned, not the demonstrated actions.
        target: with --distil and no recipe: of a pair of chunk policies, where the pair does not name it,
            MODULE:NAME or a .toml file.
        env: with --distil and no recipe: environment, a name or MODULE:TASK; the bundle's own if not given.
        lessons: with --distil and no recipe: number of inferences to train the draft on, in each of two rounds.
        data: folder that the recipe's data paths are relative to.
        jobs: stages of a recipe that may be trained at the same time; they do not change the results. As many as there
            are processor cores for their threads if not given.
        accelerator: what the policies of a recipe are trained on; a run may resume on the other.
        json: print the result as JSON.
    """
    from specact.families.chunks.sources import load_policy
    from specact.lab.train.chunk_recipe import ChunkRecipe, load_any_recipe
    from specact.lab.train.chunk_train import train_chunks
    from specact.lab.train.drafters import DrafterRecipe, is_drafters, load_drafter_recipe, train_drafters
    from specact.lab.train.flash import FlashRecipe, is_flash, load_flash_recipe, train_flash
    from specact.lab.train.recipe import Recipe
    from specact.lab.train.train import train as train_pairs

    if recipe is None and distil is None:
        raise ConfigError("give a recipe (see recipes/) or --distil BUNDLE")
    for option, count in (("threads", threads), ("jobs", jobs)):
        if count is not None and count < 1:
            raise ConfigError(f"--{option} must be at least 1, got {count}")
    check_folder(out)
    if recipe is None:
        assert distil is not None
        refuse_unused(
            {"accelerator": accelerator != "cpu", "data": data != Path(), "jobs": jobs is not None},
            "is for a recipe; leave it out with --distil alone",
        )
        path = _distil(distil, target, env, lessons, out, threads)
        if json:
            print_json({"bundles": [str(path)]})
        else:
            remarks.print(f"bundle: {path}", highlight=False)
        return
    refuse_unused(
        {"target": target is not None, "env": env is not None, "lessons": lessons != LESSONS},
        "is for --distil without a recipe; leave it out, the recipe says it",
    )
    at_once = max(1, (os.cpu_count() or 1) // threads) if jobs is None else jobs
    what: DrafterRecipe | FlashRecipe | ChunkRecipe | Recipe
    if is_drafters(recipe):
        what = load_drafter_recipe(recipe)
    else:
        what = load_flash_recipe(recipe) if is_flash(recipe) else load_any_recipe(recipe)[0]
    if isinstance(what, DrafterRecipe):
        refuse_unused({"data": data != Path()}, "has no effect: these drafters learn from rollouts; leave it out")
    if isinstance(what, DrafterRecipe | FlashRecipe) and distil is not None:
        raise ConfigError("what drafts learns from the target that its recipe names; leave out --distil")
    if distil is not None and not isinstance(what, ChunkRecipe):
        raise ConfigError(
            "a recipe of action codes trains its own target; leave out --distil, or give a recipe of "
            'kind = "flow", "regression" or "tokens"'
        )
    with progress_bars() as update:
        if isinstance(what, DrafterRecipe):
            made = train_drafters(what, out, update, threads=threads, jobs=at_once, on=accelerator)
        elif isinstance(what, FlashRecipe):
            made = train_flash(what, data, out, update, threads=threads, on=accelerator)
        elif isinstance(what, ChunkRecipe):
            teacher = None if distil is None else load_policy(distil)
            made = train_chunks(what, data, out, update, threads=threads, teacher=teacher, on=accelerator)
        else:
            made = train_pairs(what, data, out, update, threads=threads, jobs=at_once, on=accelerator)
    if json:
        print_json(asdict(made) | {"bundles": [str(path) for path in made.bundles]})
        return
    for stage, line in made.metrics.items():
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in line["held_out"].items())
        remarks.print(f"{stage:18} after {line['step']} steps, held out: {numbers}", highlight=False)
    for path in made.bundles:
        remarks.print(f"bundle: {path}", highlight=False)


def _distil(name: str, target: str | None, env: str | None, lessons: int, out: Path, threads: int) -> Path:
    from specact.families.chunks.pair import ChunkPair
    from specact.families.load import load_pair, of_codes
    from specact.lab.rollout.distillation import collector
    from specact.lab.rollout.pool import Pool
    from specact.lab.train.distil import DistilRecipe, distil
    from specact.lab.train.distil_chunks import distil_chunks

    pair = load_pair(name, target=target)
    with progress_bars() as update, Pool() as pool:
        roll = collector(lessons, pool, update, env, out / "frames")
        if isinstance(pair, ChunkPair):
            made = distil_chunks(pair, DistilRecipe(), roll, out, update, threads=threads)
        else:
            codes = of_codes(pair, "distillation")
            made = distil(codes, DistilRecipe(), roll, out, update, threads=threads)
    shutil.rmtree(out / "frames", ignore_errors=True)
    return made
