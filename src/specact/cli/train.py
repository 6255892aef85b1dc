"""``specact train`` makes the tokenizer, the policies and the bundles of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro

from specact.cli.output import print_json, progress_bars, remarks
from specact.errors import ConfigError, MissingExtraError
from specact.gates.settings import GateSettings


def train(
    recipe: tyro.conf.Positional[Path | None] = None,
    /,
    *,
    out: Path,
    distil: str | None = None,
    lessons: int = 100_000,
    data: Path = Path(),
    threads: Annotated[int, tyro.conf.arg(help="threads of PyTorch; results are exact for the same number")] = 1,
    json: bool = False,
) -> None:
    """Make tokenizer, target, drafts and bundles of a recipe; run again after a stop, it goes on where it was.

    Args:
        recipe: TOML file, see recipes/.
        out: folder of the run: checkpoints, log.jsonl, bundles/.
        distil: instead of a recipe a bundle, by path or name: makes NAME-distilled, with a draft that was taught by
            the target on states of the gated policy.
        lessons: with --distil: inferences that the draft is taught from, in each of its two rounds.
        data: folder that the recipe's data paths are relative to.
        json: print the result as JSON.
    """
    try:
        from specact.training.recipe import load_recipe
        from specact.training.train import train as run
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    if (recipe is None) == (distil is None):
        raise ConfigError("say what to train: either a recipe (see recipes/), or --distil BUNDLE, and not both")
    if recipe is None:
        assert distil is not None
        path = _distil(distil, lessons, out, threads)
        if json:
            print_json({"bundles": [str(path)]})
        else:
            remarks.print(f"bundle: {path}", highlight=False)
        return
    wanted = load_recipe(recipe)
    with progress_bars() as update:
        made = run(wanted, data, out, update, threads=threads)
    if json:
        print_json(asdict(made) | {"bundles": [str(path) for path in made.bundles]})
        return
    for stage, line in made.metrics.items():
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in line["held_out"].items())
        remarks.print(f"{stage:18} after {line['step']} steps, held out: {numbers}", highlight=False)
    for path in made.bundles:
        remarks.print(f"bundle: {path}", highlight=False)


def _distil(name_or_path: str, lessons: int, out: Path, threads: int) -> Path:
    from specact.data.lessons import Lessons
    from specact.evaluation.lessons import collect
    from specact.evaluation.pool import Pool
    from specact.policies.bundle import Bundle, load_bundle
    from specact.training.distil import DistilRecipe, distil

    with progress_bars() as update, Pool() as pool:

        def roll(pair: Bundle, gates: Sequence[GateSettings], number: int) -> Lessons:
            said = f"lessons {number + 1}"
            return collect(pair, gates, lessons, number, pool, lambda done: update(said, done, lessons))

        return distil(load_bundle(name_or_path), DistilRecipe(), roll, out, update, threads=threads)
