"""``specact train`` makes the tokenizer, the policies and the bundles of a recipe."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro

from specact.cli.output import print_json, progress_bars, remarks
from specact.errors import MissingExtraError


def train(
    recipe: tyro.conf.Positional[Path],
    /,
    out: Path,
    data: Path = Path(),
    threads: Annotated[int, tyro.conf.arg(help="threads of PyTorch; results are exact for the same number")] = 1,
    json: bool = False,
) -> None:
    """Make tokenizer, target, drafts and bundles of a recipe; run again after a stop, it goes on where it was.

    Args:
        recipe: TOML file, see recipes/.
        out: folder of the run: checkpoints, log.jsonl, bundles/.
        data: folder that the recipe's data paths are relative to.
        json: print the result as JSON.
    """
    try:
        from specact.training.recipe import load_recipe
        from specact.training.train import train as run
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
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
