"""``python -m experiments NAME run|table|page``; without a name the list of experiments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments import verdicts
from experiments.grid import NAMES, Experiment, Run
from specact.cli.output import progress_bars
from specact.errors import SpecactError
from specact.files import write_whole
from specact.lab.rollout.pool import Pool


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Runs a study and writes its page.")
    parser.add_argument("name", choices=NAMES, nargs="?")
    verbs = parser.add_subparsers(dest="verb")
    running = verbs.add_parser("run", help="run the cells that are not finished")
    running.add_argument("--out", type=Path, required=True, help="folder of the cells; resumes there")
    running.add_argument(
        "--data", type=Path, help="folder of demonstrations, of recorded links, or a checkout of openpi"
    )
    running.add_argument("--seed", type=int, default=1)
    running.add_argument("--quick", action="store_true", help="two episodes of everything: does it work?")
    running.add_argument("--only", default="*", help="pattern of the names of cells")
    running.add_argument("--workers", type=int, help="processes; one per core if not given")
    running.add_argument("--on", default="here", help="here, ray, or ray:ADDRESS")
    verbs.add_parser("table", help="add finished cells to the stored results").add_argument(
        "folders", type=Path, nargs="+"
    )
    verbs.add_parser("page", help="write the page, and the verdicts of all, from the stored results")
    options = parser.parse_args()
    if options.name is None or options.verb is None:
        print("\n".join(f"{name:12} {Experiment.load(name).about}" for name in NAMES))
        return
    experiment = Experiment.load(options.name)
    try:
        if options.verb == "run":
            with Pool(options.workers, options.on) as pool, progress_bars() as update:
                run = Run(options.out, options.data, options.seed, options.quick, pool, update)
                names = experiment.run(run, options.only)
            print(f"finished: {', '.join(names)}; next: python -m experiments {options.name} table {options.out}")
        elif options.verb == "table":
            experiment.store(options.folders)
            print(f"stored: {experiment.results}; next: python -m experiments {options.name} page")
        else:
            for file, content in (experiment.files() | verdicts.files()).items():
                write_whole(file, content)
                print(f"written: {file}")
    except SpecactError as error:
        sys.exit(f"experiments: {error}")


if __name__ == "__main__":
    main()
