"""The study of device compute: drafts of several sizes, plain and distilled, under every gate, on four tasks.

Run: OMP_NUM_THREADS=1 python benchmarks/budget.py run --out FOLDER --data path/to/demonstrations
     OMP_NUM_THREADS=1 python benchmarks/budget.py run --out FOLDER --published
     OMP_NUM_THREADS=1 python benchmarks/budget.py time --out FOLDER --data path/to/demonstrations
     python benchmarks/budget.py table FOLDER ...

`run` trains a target and drafts of a quarter, one, four and sixteen times the parameters of the recipe's draft for
every training seed, distils each draft from its target, trains a learned gate's head for each pair, and evaluates every
method at every rate on the same episodes. It is one process, which resumes after a stop: training from its checkpoints,
evaluations from their shards. Cells that benchmarks/results/budget.json already has are left out (`--again`: run them
again). With `--published` it evaluates the pairs of these tasks that come with the package instead, plain and
distilled, at a rate of .4; nothing is trained.
`time` measures every part of every size on one core, all sizes of a task alternately: costs of two cells can only be
compared if they were measured in one run. It takes minutes: how long a network takes depends on its shape alone, so the
networks are hardly trained. Run it with nothing else on the machine.
`table` adds the finished cells of the folders to benchmarks/results/budget.json, and writes docs/budget-TASK.png and
the marked parts of docs/budget.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import budget_tables as tables
from pages import fill

from specact.cli.output import progress_bars
from specact.families.codes.bundle import PARTS, Bundle, load_bundle
from specact.families.head import HEAD
from specact.files import write_json
from specact.gates.settings import GateChoices
from specact.lab.evaluation.budget import HEAD_DRAFT, TARGET, measure_together, study_ways
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.run import evaluate, finished, read_table
from specact.lab.report.budget import draw_budget
from specact.lab.report.drawing import style
from specact.lab.rollout.distillation import collector
from specact.lab.rollout.pool import Pool
from specact.locks import locked
from specact.runtime.parameters import count_parameters

if TYPE_CHECKING:
    from specact.lab.train.recipe import EncoderRecipe, PolicyRecipe, Recipe

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "budget.json"
PAGE = ROOT / "docs" / "budget.md"
Progress = Callable[[str, int, int], None]

SIZES = ("1/4", "1", "4", "16")
FIRST = (1, 0, 2, 3)  # today's first
NAMES = ("quarter", "one", "four", "sixteen")
RATES = (0.2, 0.4, 0.6)


@dataclass(frozen=True)
class Drafts:
    """A task's drafts with about a quarter, one, four and sixteen times the parameters of the recipe's.

    Attributes:
        widths: of their transformers.
        encoders: settings of their image encoders, besides the recipe's; empty without a camera.
        of: the recipe's draft.
        seeds: of the training.
    """

    widths: tuple[int, ...]
    encoders: tuple[Mapping[str, Any], ...] = ()
    of: str = "draft"
    seeds: tuple[int, ...] = (1, 2, 3)

    def settings(self, size: int, recipe: PolicyRecipe) -> PolicyRecipe:
        """The recipe of one of them."""
        encoder = replace(recipe.encoder, **self.encoders[size]) if self.encoders else recipe.encoder
        return replace(recipe, width=self.widths[size], encoder=encoder, snapshot=0.0)


DRAFTS = {
    # A quarter would need a width of 1, whose layer normalisation is constant.
    "ball": Drafts((2, 5, 18, 44), seeds=(1, 2, 3, 4, 5)),
    "pusht": Drafts((12, 32, 76, 162)),
    "peg": Drafts((3, 12, 36, 90), seeds=(1, 2, 3, 4, 5)),
    # Encoders of their own, which see half the pixels; the recipe's draft uses the target's, and so does not fit a
    # smaller budget. Sixteen times the parameters would take more time than the target.
    "pusht-camera": Drafts(
        (16, 32, 64),
        (
            {"pixels": 48, "channels": (16, 32, 32, 32), "keypoints": 16, "width": 112},
            {"pixels": 48},
            {"pixels": 48, "channels": (64, 128, 128, 128), "keypoints": 64, "width": 512},
        ),
        of="draft_camera",
        seeds=(1, 2),
    ),
}


@dataclass(frozen=True)
class Scale:
    """The size of the study; tests use a smaller one.

    Attributes:
        episodes: of the evaluation, for each method, rate and training seed.
        calibration: episodes in each of six rounds, separate from those of the evaluation.
        lessons: inferences in each of two rounds, for a head and for a distilled draft.
        head_steps: training steps in each of the head's rounds.
    """

    episodes: int = 50
    calibration: int = 15
    lessons: int = 15_000
    head_steps: int = 4000


@dataclass(frozen=True)
class Cell:
    """One draft of one training seed: the unit of work.

    Seed 0 is the pair that comes with the package, of the recipe's size.
    """

    task: str
    seed: int
    size: int
    distilled: bool

    @property
    def name(self) -> str:
        """The name of its bundle."""
        return f"{self.task}-{NAMES[self.size]}" + "-distilled" * self.distilled

    @property
    def draft(self) -> str:
        """Description of the draft."""
        return "distilled draft " * self.distilled + "draft " * (not self.distilled) + f"x{SIZES[self.size]}"

    @property
    def rates(self) -> tuple[float, ...]:
        """Transmission rates of its gates."""
        return (0.4,) if self.seed == 0 else RATES

    def folder(self, out: Path) -> Path:
        """The folder of its results."""
        return out / self.task / f"seed-{self.seed}" / self.name

    def training(self, out: Path) -> Path:
        """The folder of its training run: one for all plain drafts of a seed, one per distilled draft."""
        base = out / self.task / f"seed-{self.seed}"
        return base / f"distil-{NAMES[self.size]}" if self.distilled else base / "train"


def plan(tasks: Sequence[str], seeds: Sequence[int] | None = None) -> list[Cell]:
    """The cells of these seeds, all if not given.

    Those that share a target follow each other: a machine that is lost takes one target with it.
    """
    return [
        Cell(task, seed, size, distilled)
        for seed in sorted({seed for task in tasks for seed in DRAFTS[task].seeds})
        for task in tasks
        if seed in DRAFTS[task].seeds and (seeds is None or seed in seeds)
        for distilled in (False, True)
        for size in FIRST
        if size < len(DRAFTS[task].widths)
    ]


PUBLISHED = [
    Cell(task, 0, SIZES.index("1"), distilled) for task in ("ball", "peg", "pusht") for distilled in (False, True)
]


def run(out: Path, data: Path, cells: Sequence[Cell], scale: Scale, recipes: Path, update: Progress) -> None:
    """Runs the unfinished cells, in order."""
    left = [cell for cell in cells if not (cell.folder(out) / "cell.json").exists()]
    log(f"{len(cells)} cells, {len(cells) - len(left)} of them finished; load {os.getloadavg()[0]:.1f}")
    cpu_seconds: dict[str, list[float]] = {}
    while left:
        cell, *left = left
        update("cells", len(cells) - len(left) - 1, len(cells))
        wall, cpu = time.monotonic(), time.process_time()
        finish(cell, out, data, scale, recipes, update)
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        cpu_seconds.setdefault(cell.task, []).append(cpu)
        estimates = [sum(cpu_seconds[one.task]) / len(cpu_seconds[one.task]) for one in left if one.task in cpu_seconds]
        log(f"{cell.task} seed {cell.seed} {cell.draft}: {cpu:.0f} s of one core in {wall:.0f} s; {len(left)} cells "
            f"left, about {sum(estimates) / 3600:.1f} h of one core for {len(estimates)} of them")  # fmt: skip
    update("cells", len(cells), len(cells))


def finish(cell: Cell, out: Path, data: Path, scale: Scale, recipes: Path, update: Progress) -> None:
    """Trains and evaluates a cell; resumable."""
    cpu = time.process_time()
    with Pool(1) as pool:
        bundle = get_bundle(cell, out, data, scale, recipes, pool, update)
        bundle = with_head(bundle, scale, cell, pool, update)
        folder = cell.folder(out)
        for name, evaluation in evaluations(cell, bundle, scale):
            if not finished(evaluation, folder / name):
                evaluate(evaluation, folder / name, update, pool, command="python benchmarks/budget.py run")
    write_json(
        folder / "cell.json",
        {
            "parameters": {part: count_parameters(bundle.path / PARTS[part]) for part in ("draft", "target")}
            | {"head": count_parameters(bundle.path / HEAD)},
            "cpu_seconds": round(time.process_time() - cpu),
            "machine": machine(),
        },
    )


def evaluations(cell: Cell, bundle: Bundle, scale: Scale) -> Iterator[tuple[str, Evaluation]]:
    """Every method at every rate, on other episodes than those of the calibrations."""

    def evaluation(methods: Sequence[str], rate: float) -> Evaluation:
        return Evaluation(
            str(bundle.path), None, tuple(methods), scale.episodes, seed=1000 + cell.seed, rate=rate, shard=25,
            calibration_episodes=scale.calibration,
        )  # fmt: skip

    # The target is the same for every draft.
    yield "ends", evaluation(("draft", HEAD_DRAFT, "hybrid", *[TARGET] * (cell.size == 1 and not cell.distilled)), 0.5)
    lowest = GateChoices().settings("deviation", bundle).lowest_rate
    for rate in cell.rates:
        # If the deviation has a limit on skips, its random baseline has it too, as a separate method.
        own = () if rate <= lowest else ("adahi",) if lowest == 0.0 else ("random", "adahi")
        yield f"rate-{rate:g}", evaluation(("random_learned", *own, "uncertainty", "learned"), rate)


def get_bundle(cell: Cell, out: Path, data: Path, scale: Scale, recipes: Path, pool: Pool, update: Progress) -> Bundle:
    """Loads the cell's bundle, or trains it."""
    if cell.seed == 0:
        return load_bundle(cell.task + "-distilled" * cell.distilled)
    path = cell.training(out) / "bundles" / cell.name
    if (path / "manifest.json").exists():
        return load_bundle(path)
    from specact.lab.train.distil import DistilRecipe, distil
    from specact.lab.train.recipe import load_recipe
    from specact.lab.train.train import train

    recipe, drafts = load_recipe(recipes / f"{cell.task}.toml"), DRAFTS[cell.task]
    if cell.distilled:
        plain = get_bundle(replace(cell, distilled=False), out, data, scale, recipes, pool, update)
        # The plain draft's steps and batches: half the steps with twice the batch leave a small draft undertrained.
        settings = recipe.policies[drafts.of]
        distil_recipe = DistilRecipe(steps=settings.steps, batch=settings.batch, seed=cell.seed)
        roll = collector(scale.lessons, pool, update, folder=cell.training(out) / "frames")
        distil(plain, distil_recipe, roll, cell.training(out), update)
        shutil.rmtree(cell.training(out) / "frames", ignore_errors=True)
        return load_bundle(path)
    # The draft of the recipe's size first, for early results; more policies may be added to a training run later.
    sizes = range(len(drafts.widths)) if cell.size != FIRST[0] else (cell.size,)
    train(with_drafts(recipe, cell.task, sizes, cell.seed), data, cell.training(out), update)
    return load_bundle(path)


def with_drafts(recipe: Recipe, task: str, sizes: Iterable[int], seed: int) -> Recipe:
    """A task's recipe with its target and drafts of these sizes, in a bundle each."""
    drafts = DRAFTS[task]
    policies = {f"draft_{NAMES[size]}": drafts.settings(size, recipe.policies[drafts.of]) for size in sizes}
    return replace(
        recipe, seed=seed, policies={TARGET: recipe.policies[TARGET], **policies},
        bundles={f"{task}-{NAMES[size]}": (TARGET, f"draft_{NAMES[size]}") for size in sizes},
    )  # fmt: skip


def measured(task: str, out: Path, data: Path, recipes: Path, rounds: int, update: Progress) -> dict[str, Any]:
    """Milliseconds of all parts of every size of a task, of networks that are hardly trained, and their machine.

    Returns:
        ``machine``, ``rounds``, and ``parts``: by size, see :func:`~specact.lab.evaluation.budget.measure_parts`; the
        target's time is the median over the sizes, as its network is the same for all of them.
    """
    from specact.lab.train.recipe import load_recipe
    from specact.lab.train.train import train

    recipe, sizes = load_recipe(recipes / f"{task}.toml"), range(len(DRAFTS[task].widths))
    recipe = with_drafts(recipe, task, sizes, 0)
    # Some steps: a parameter that is still 1 everywhere is a constant of the exported network.
    short = {
        name: replace(one, steps=50, warmup=1, encoder=_short(one.encoder)) for name, one in recipe.policies.items()
    }
    tokenizer = replace(recipe.tokenizer, steps=2)
    recipe = replace(recipe, policies=short, tokenizer=tokenizer, generate_episodes=min(20, recipe.generate_episodes))
    train(recipe, data, out / task, update)
    pairs, scale = {}, Scale(lessons=200, head_steps=2)
    with Pool(1) as pool:
        for size in sizes:
            bundle = load_bundle(out / task / "bundles" / f"{task}-{NAMES[size]}")
            pairs[SIZES[size]] = with_head(bundle, scale, Cell(task, 1, size, False), pool, update)
    parts = measure_together(pairs, rounds)
    target_ms = sorted(found["target"] for found in parts.values())[len(parts) // 2]
    return {
        "machine": machine(), "rounds": rounds,
        "parts": {size: found | {"target": target_ms} for size, found in parts.items()},
    }  # fmt: skip


def _short(encoder: EncoderRecipe) -> EncoderRecipe:
    return replace(encoder, steps=2, scenes=min(64, encoder.scenes))


def machine() -> dict[str, Any]:
    """This machine."""
    return {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}


def with_head(bundle: Bundle, scale: Scale, cell: Cell, pool: Pool, update: Progress) -> Bundle:
    """The bundle with a learned gate's head."""
    if (bundle.path / HEAD).is_file():
        return bundle
    from specact.lab.train.head import HeadRecipe, train_head

    head_recipe = HeadRecipe(steps=scale.head_steps, seed=cell.seed)
    folder = bundle.path / "gate"
    train_head(bundle, head_recipe, collector(scale.lessons, pool, update, folder=folder / "frames"), folder, update)
    shutil.rmtree(folder)
    return load_bundle(bundle.path)


def collect(out: Path, cells: Sequence[Cell]) -> dict[str, Any]:
    """The results of the finished cells of a folder, with every episode."""
    results: dict[str, Any] = {"machine": None, "parameters": {}, "rows": []}
    for cell in cells:
        if (cell.folder(out) / "cell.json").exists():
            results = merge(results, results_of(cell, cell.folder(out)))
    return results


def results_of(cell: Cell, folder: Path) -> dict[str, Any]:
    """The results of a finished cell."""
    result = json.loads((folder / "cell.json").read_text())
    rows = []
    for evaluation in sorted(path.parent for path in folder.glob("*/summary.json")):
        summary = json.loads((evaluation / "summary.json").read_text())
        for method, metrics in summary["methods"].items():
            won = "".join(str(int(won)) for won in read_table(evaluation / "episodes" / method)["success"])
            asked = {"ends": float(method in ("hybrid", TARGET))}.get(evaluation.name, summary["rate"])
            for as_method in (method, *["target_on_device"] * (method == TARGET)):
                on_device = as_method == "target_on_device"
                rate = 0.0 if on_device else metrics["transmission_rate"]
                rows.append(
                    {
                        "task": cell.task,
                        "draft": "" if method == TARGET else cell.draft,
                        "method": as_method,
                        "asked": 0.0 if on_device else asked,
                        "seeds": {str(cell.seed): {"rate": rate, "successes": won}},
                    }
                )
    parameters = {cell.task: {cell.draft: result["parameters"]}}
    return {"machine": result["machine"], "parameters": parameters, "rows": rows}


def merge(results: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Results with those of more cells; a cell that both have is taken from the latter."""

    def key(row: dict[str, Any]) -> tuple[str, str, str, float]:
        return row["task"], row["draft"], row["method"], row["asked"]

    rows = {key(row): row for row in results["rows"]}
    for row in more["rows"]:
        seeds = rows[key(row)]["seeds"] if key(row) in rows else {}
        rows[key(row)] = row | {"seeds": dict(sorted((seeds | row["seeds"]).items()))}
    parameters = {
        task: results["parameters"].get(task, {}) | more["parameters"].get(task, {})
        for task in [*results["parameters"], *more["parameters"]]
    }
    return {
        "machine": more["machine"] or results["machine"],
        "parameters": parameters,
        "rows": [rows[which] for which in sorted(rows)],
    }


def missing_from(results: dict[str, Any], cells: Sequence[Cell]) -> list[Cell]:
    """The cells without results."""
    there = {(row["task"], row["draft"], seed) for row in results["rows"] for seed in row["seeds"]}
    return [cell for cell in cells if (cell.task, cell.draft, str(cell.seed)) not in there]


def write_pages(results: dict[str, Any], page: Path, pictures: Path) -> None:
    """Writes the marked parts of the page, and a figure of each task."""
    published = results["published"] | {"times": results["times"]}
    tasks = tables.tasks_of(results)
    if untimed := sorted({*tasks, *tables.tasks_of(published)} - results["times"].keys()):
        raise SystemExit(f"the parts of {', '.join(untimed)} have not been timed: python benchmarks/budget.py time")
    fill(page, "published", tables.advice(published))
    fill(page, "published choices", tables.choices(published))
    fill(page, "published costs", tables.costs(published))
    fill(page, "published results", tables.successes(published))
    fill(page, "advice", tables.advice(results))
    fill(page, "gates", tables.gates(results))
    fill(page, "choices", tables.choices(results))
    fill(page, "costs", tables.costs(results))
    fill(page, "results", tables.successes(results))
    fill(page, "missing", missing(results))
    figures = [f"![{task}: success over device time, by transmission rate](budget-{task}.png)" for task in tasks]
    fill(page, "pictures", "\n\n".join(figures))
    for task in tasks:
        with style():
            draw_budget(task, study_ways(results, task)).savefig(pictures / f"budget-{task}.png", dpi=130)


def missing(results: dict[str, Any]) -> str:
    """The finished sizes of every task and seed."""
    cells = plan(list(DRAFTS))
    left = missing_from(results, cells)
    lines = ["| task | training seed | plain | distilled |", "|---|---|---|---|"]
    for task, drafts in DRAFTS.items():
        for seed in drafts.seeds:
            columns = []
            for distilled in (False, True):
                sizes = [Cell(task, seed, size, distilled) for size in range(len(drafts.widths))]
                found = [f"x{SIZES[cell.size]}" for cell in sizes if cell not in left]
                columns.append(", ".join(found) or "none")
            lines.append(f"| {task} | {seed} | {' | '.join(columns)} |")
    return "\n".join([*lines, "", f"{len(left)} of {len(cells)} cells are missing."])


def log(text: str) -> None:
    """Logs a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--data", type=Path, default=Path())
    running.add_argument("--tasks", default=",".join(DRAFTS))
    running.add_argument("--seeds")
    running.add_argument("--published", action="store_true")
    running.add_argument("--again", action="store_true")
    running.add_argument("--recipes", type=Path, default=ROOT / "recipes")
    timing = verbs.add_parser("time")
    timing.add_argument("--out", type=Path, required=True)
    timing.add_argument("--data", type=Path, default=Path())
    timing.add_argument("--tasks", default=",".join(DRAFTS))
    timing.add_argument("--recipes", type=Path, default=ROOT / "recipes")
    table = verbs.add_parser("table")
    table.add_argument("outs", type=Path, nargs="*")
    arguments = parser.parse_args()
    if unknown := sorted(set(getattr(arguments, "tasks", "ball").split(",")) - set(DRAFTS)):
        parser.error(f"there is no task {unknown[0]!r} in the study; there are {', '.join(DRAFTS)}")
    results = json.loads(RESULTS.read_text())
    if arguments.verb == "run":
        seeds = None if arguments.seeds is None else [int(seed) for seed in arguments.seeds.split(",")]
        cells = PUBLISHED if arguments.published else plan(arguments.tasks.split(","), seeds)
        if not arguments.again:
            cells = missing_from(results["published"] if arguments.published else results, cells)
        with locked(arguments.out / ("published" if arguments.published else "trained")), progress_bars() as update:
            run(arguments.out, arguments.data, cells, Scale(), arguments.recipes, update)
        return
    if arguments.verb == "time":
        with progress_bars() as update:
            for task in arguments.tasks.split(","):
                found = measured(task, arguments.out, arguments.data, arguments.recipes, 400, update)
                results["times"][task] = found
        write_json(RESULTS, results)
        return
    published = results["published"]
    for out in arguments.outs:
        results |= merge(results, collect(out, plan(list(DRAFTS))))
        published = merge(published, collect(out, PUBLISHED))
    command = "python benchmarks/budget.py run and time, then table"
    results |= {"command": command, "published": published}
    write_json(RESULTS, results)
    write_pages(results, PAGE, ROOT / "docs")


if __name__ == "__main__":
    main()
