"""``specact train`` trains the policies of a recipe, ``specact distil`` a pair's draft on its target's answers."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from specact.cli.options import Maybe, Options
from specact.cli.output import print_result, progress_bars
from specact.files import check_folder
from specact.records import Count


@dataclass(frozen=True)
class Train(Options):
    """Train the policies of a recipe and export its bundles. An interrupted run resumes."""

    # TOML file, see recipes/. Of the kind flow, regression or tokens: a chunk policy; drafters: of a token policy;
    # flash: the block of a flow policy; without a kind: a pair of action codes.
    recipe: Positional[Path]
    out: Maybe[Path] = None  # folder of the run: checkpoints, log.jsonl, bundles/; runs/RECIPE if not given
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

        recipe, jobs = load_recipe(self.recipe), self.jobs or max(1, (os.cpu_count() or 1) // self.threads)
        out = self.out or Path("runs") / self.recipe.stem
        check_folder(out)
        teacher = None if self.teacher is None else load_policy(self.teacher)
        with progress_bars() as update:
            result = train(
                recipe, self.data, out, update, teacher=teacher, threads=self.threads, jobs=jobs,
                on=self.accelerator,
            )  # fmt: skip
        print_result(self.json, asdict(result) | {"bundles": [str(path) for path in result.bundles]})


@dataclass(frozen=True)
class Distil(Options):
    """Make NAME-distilled of a pair: its draft is trained on the target's answers in states of the gated policy."""

    pair: Positional[str]  # path or name of a pair
    out: Path  # folder of the run; an interrupted one resumes
    target: Maybe[str] = None  # of a pair of chunk policies that does not name its target: MODULE:NAME or a .toml file
    env: Maybe[str] = None  # environment, a name or MODULE:TASK; the pair's own if not given
    lessons: Count = 100_000  # inferences to train the draft on, in each of two rounds
    threads: Count = 1  # PyTorch threads; results are reproducible only with the same number
    json: bool = False  # print the result as JSON

    def run(self) -> None:
        from specact.lab.rollout.distillation import collector
        from specact.lab.rollout.pool import Pool
        from specact.lab.train.distil import DistilRecipe, distil
        from specact.load import load_pair

        check_folder(self.out)
        pair = load_pair(self.pair, target=self.target)
        with progress_bars() as update, Pool() as pool:
            roll = collector(self.lessons, pool, update, self.env, self.out / "frames")
            bundle = distil(pair, DistilRecipe(), roll, self.out, update, threads=self.threads)
        shutil.rmtree(self.out / "frames", ignore_errors=True)
        print_result(self.json, {"bundles": [str(bundle)]})
