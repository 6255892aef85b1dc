"""``specact distil`` trains a pair's draft on its target's answers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from specact.cli.options import Maybe, Options
from specact.cli.output import print_result, progress_bars
from specact.files import check_folder
from specact.records import Count


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
            made = distil(pair, DistilRecipe(), roll, self.out, update, threads=self.threads)
        shutil.rmtree(self.out / "frames", ignore_errors=True)
        print_result(self.json, {"bundles": [str(made)]}, [f"bundle: {made}"])
