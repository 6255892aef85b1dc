"""``specact train`` trains the policies of a recipe."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from specact.cli.options import Maybe, Options
from specact.cli.output import print_result, progress_bars, remark
from specact.files import check_folder
from specact.records import Count


@dataclass(frozen=True)
class Train(Options):
    """Train the policies of a recipe and export its bundles. An interrupted run resumes."""

    # TOML file, see recipes/. Of the kind flow, regression or tokens: a chunk policy; drafters: of a token policy;
    # flash: the block of a flow policy; without a kind: a pair of action codes.
    recipe: Positional[Path]
    out: Path  # folder of the run: checkpoints, log.jsonl, bundles/
    data: Path = Path()  # folder that the recipe's data paths are relative to
    # Of a chunk policy: a larger policy (a bundle, BUNDLE#target, a .toml file, MODULE:NAME) whose answers to the
    # demonstrated observations are learned, not the demonstrated actions
    teacher: Maybe[str] = None
    threads: Count = 1  # PyTorch threads; results are reproducible only with the same number
    # stages that may be trained at the same time; as many as there are cores for their threads if not given
    jobs: Maybe[Count] = None
    accelerator: Literal["cpu", "cuda"] = "cpu"  # what the policies are trained on; a run may resume on the other
    json: bool = False  # print the result as JSON

    def run(self) -> None:
        from specact.lab.train.recipe import load_recipe
        from specact.lab.train.train import train
        from specact.load import load_policy

        check_folder(self.out)
        recipe, jobs = load_recipe(self.recipe), self.jobs or max(1, (os.cpu_count() or 1) // self.threads)
        teacher = None if self.teacher is None else load_policy(self.teacher)
        with progress_bars() as update:
            made = train(
                recipe, self.data, self.out, update, teacher=teacher, threads=self.threads, jobs=jobs,
                on=self.accelerator,
            )  # fmt: skip
        for stage, line in made.metrics.items():
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in line["held_out"].items())
            remark(f"{stage:18} after {line['step']} steps, held out: {numbers}")
        bundles = [str(path) for path in made.bundles]
        print_result(self.json, asdict(made) | {"bundles": bundles}, [f"bundle: {path}" for path in bundles])
