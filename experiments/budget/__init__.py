"""Device compute: drafts of several sizes, plain and distilled, under every gate, on four tasks.

``times`` and ``targets`` measure on one core: run them alone on the machine, with OMP_NUM_THREADS=1. The rest trains a
target and drafts of a quarter, one, four and sixteen times the parameters of the recipe's draft for every training
seed, distils each draft, trains a learned gate's head for each pair, and evaluates every method at every rate on the
same episodes. ``--data`` is the folder of the demonstrations.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from experiments.budget import tables
from experiments.grid import ROOT, Cell, Results, Run, evaluated
from experiments.measure import outcomes, to_digits
from experiments.report import Report
from specact.bundle.bundle import HEAD
from specact.bundle.manifest import read_manifest
from specact.families.codes.pair import CodeParts, load_codes
from specact.gates.settings import gate_settings
from specact.lab.evaluation.advice import HEAD_DRAFT, TARGET, measure_parts
from specact.lab.evaluation.run import Evaluation
from specact.lab.rollout.distillation import collector
from specact.lab.train.distil import DistilRecipe, distil
from specact.lab.train.head import HeadRecipe, train_head
from specact.lab.train.recipe import CodesRecipe, PolicyRecipe, load_recipe
from specact.lab.train.train import train
from specact.load import load_pair

NAMES = ("quarter", "one", "four", "sixteen")
FIRST = (1, 0, 2, 3)  # today's first
RATES = (0.2, 0.4, 0.6)
# Inferences in each of two rounds, for a head and for a distilled draft; training steps in each of the head's rounds.
LESSONS, HEAD_STEPS = 15_000, 4000


@dataclass(frozen=True)
class Drafts:
    """A task's drafts with about a quarter, one, four and sixteen times the parameters of the recipe's draft ``base``.

    Widths of their transformers, settings of their image encoders besides the recipe's, and seeds of the training.
    """

    widths: tuple[int, ...]
    encoders: tuple[Mapping[str, Any], ...] = ()
    base: str = "draft"
    seeds: tuple[int, ...] = (1, 2, 3)


DRAFTS = {
    # A quarter would need a width of 1, whose layer normalisation is constant.
    "ball": Drafts((2, 5, 18, 44), seeds=(1, 2, 3, 4, 5)),
    "pusht": Drafts((12, 32, 76, 162)),
    "peg": Drafts((3, 12, 36, 90), seeds=(1, 2, 3, 4, 5)),
    # Encoders of their own, which see half the pixels; the recipe's draft uses the target's, and so does not fit a
    # smaller budget. Sixteen times the parameters would take more time than the target.
    "pusht-camera": Drafts(
        (16, 32, 64), (
            {"pixels": 48, "channels": (16, 32, 32, 32), "keypoints": 16, "width": 112},
            {"pixels": 48},
            {"pixels": 48, "channels": (64, 128, 128, 128), "keypoints": 64, "width": 512},
        ), base="draft_camera", seeds=(1, 2),
    ),
}  # fmt: skip
# The pairs that come with the package whose targets differ, with the drafts of those that have none of their own.
TARGETS = {
    "ball": None, "swarm": None, "pusht": None, "pusht-camera": None, "peg": None, "kitchen": None, "relocate": None,
    "metaworld": None, "ball-chase-flow": None, "pusht-flow": None, "kitchen-tokens": None, "relocate-tokens": None,
    "metaworld-flow": None, "metaworld-tokens": "metaworld-draft",
}  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """One draft of one training seed."""

    task: str
    seed: int
    size: int
    distilled: bool

    @property
    def bundle(self) -> str:
        return f"{self.task}-{NAMES[self.size]}" + "-distilled" * self.distilled

    @property
    def about(self) -> str:
        return "distilled " * self.distilled + f"draft x{tables.SIZES[self.size]}"

    @property
    def cell(self) -> str:
        return f"{self.task}/seed-{self.seed}/{self.bundle}"

    def training(self, run: Run) -> Path:
        """The folder of its training run: one for all plain drafts of a seed, one per distilled draft."""
        base = run.out / self.task / f"seed-{self.seed}"
        return base / f"distil-{NAMES[self.size]}" if self.distilled else base / "train"


# Drafts that share a target follow each other: a machine that is lost takes one target with it.
TRAINED = [
    Draft(task, seed, size, distilled)
    for seed in range(1, 6) for task, drafts in DRAFTS.items() if seed in drafts.seeds
    for distilled in (False, True) for size in FIRST if size < len(drafts.widths)
]  # fmt: skip


def plan(run: Run) -> Iterator[Cell]:
    """Times, and every draft that is trained."""
    yield Cell("targets", targets)
    for task in DRAFTS:
        yield Cell(f"times/{task}", partial(times, task))
    for draft in TRAINED:
        yield Cell(draft.cell, partial(finish, draft))


def finish(draft: Draft, folder: Path, run: Run) -> dict[str, Any]:
    """Trains and evaluates a draft: its parameters, and every episode of every method."""
    bundle = with_head(get_bundle(draft, run), draft.seed, run)
    rows = [row for name, what in evaluations(draft, bundle) for row in rows_of(draft, what, folder / name, run)]
    counts = read_manifest(bundle.path).parameters
    return {"parameters": {draft.task: {draft.about: counts}}, "rows": rows}


def evaluations(draft: Draft, bundle: CodeParts) -> Iterator[tuple[str, Evaluation]]:
    """Every method at every rate, on other episodes than those of the calibrations."""

    def evaluation(methods: Sequence[str], rate: float) -> Evaluation:
        return Evaluation(
            str(bundle.path), None, tuple(methods), 50, 1000 + draft.seed, rate, shard=25, calibration_episodes=15
        )

    # The target is the same for every draft.
    target = [TARGET] * (draft.size == 1 and not draft.distilled)
    yield "ends", evaluation(("draft", HEAD_DRAFT, "hybrid", *target), 0.5)
    lowest = gate_settings("adahi", bundle.pair()).lowest_rate
    for rate in RATES:
        # If the deviation has a limit on skips, its random baseline has it too, as a separate method.
        deviation = () if rate <= lowest else ("adahi",) if lowest == 0.0 else ("random", "adahi")
        yield f"rate-{rate:g}", evaluation(("random_learned", *deviation, "uncertainty", "learned"), rate)


def rows_of(draft: Draft, evaluation: Evaluation, folder: Path, run: Run) -> Iterator[dict[str, Any]]:
    """A row for each method: who won which episode, as a letter 1 or 0."""
    summary = evaluated(evaluation, folder, run)
    for method, metrics in summary["methods"].items():
        won = to_digits(outcomes(folder, method))
        rate = float(method in ("hybrid", TARGET)) if folder.name == "ends" else evaluation.rate
        about = {"task": draft.task, "draft": "" if method == TARGET else draft.about}
        sent = metrics["sent"]
        yield {**about, "method": method, "asked": rate, "seeds": {str(draft.seed): {"rate": sent, "successes": won}}}
        if method == TARGET:
            seeds = {str(draft.seed): {"rate": 0.0, "successes": won}}
            yield {**about, "method": "target_on_device", "asked": 0.0, "seeds": seeds}


def get_bundle(draft: Draft, run: Run) -> CodeParts:
    """Loads the draft's bundle, or trains it."""
    folder, settings = draft.training(run), DRAFTS[draft.task]
    path = folder / "bundles" / draft.bundle
    if (path / "manifest.json").exists():
        return load_codes(path)
    recipe = load_recipe(ROOT / "recipes" / f"{draft.task}.toml", CodesRecipe)
    if draft.distilled:
        plain = get_bundle(replace(draft, distilled=False), run)
        # The plain draft's steps and batches: half the steps with twice the batch leave a small draft undertrained.
        policy = recipe.policies[settings.base]
        roll = collector(200 if run.quick else LESSONS, run.pool, run.update, folder=folder / "frames")
        steps = 4 if run.quick else policy.steps
        distil(plain.pair(), DistilRecipe(steps=steps, batch=policy.batch, seed=draft.seed), roll, folder, run.update)
        shutil.rmtree(folder / "frames", ignore_errors=True)
        return load_codes(path)
    # The draft of the recipe's size first, for early results; more policies may be added to a training run later.
    sizes = range(len(settings.widths)) if draft.size != FIRST[0] else (draft.size,)
    recipe = with_drafts(recipe, draft.task, sizes, draft.seed)
    train(hardly(recipe) if run.quick else recipe, run.data or Path(), folder, run.update)
    return load_codes(path)


def with_drafts(recipe: CodesRecipe, task: str, sizes: Iterable[int], seed: int) -> CodesRecipe:
    """A task's recipe with its target and drafts of these sizes, in a bundle each."""
    drafts = DRAFTS[task]

    def draft(size: int) -> PolicyRecipe:
        policy = recipe.policies[drafts.base]
        encoder = structs.replace(policy.encoder, **drafts.encoders[size]) if drafts.encoders else policy.encoder
        return structs.replace(policy, width=drafts.widths[size], encoder=encoder, snapshot=0.0)

    policies = {f"draft_{NAMES[size]}": draft(size) for size in sizes}
    return structs.replace(
        recipe, seed=seed, policies={TARGET: recipe.policies[TARGET], **policies},
        bundles={f"{task}-{NAMES[size]}": (TARGET, f"draft_{NAMES[size]}") for size in sizes},
    )  # fmt: skip


def hardly(recipe: CodesRecipe) -> CodesRecipe:
    """The recipe with few training steps, for times: how long a network takes depends on its shape alone.

    Some steps: a parameter that is still 1 everywhere is a constant of the exported network.
    """

    def short(policy: PolicyRecipe) -> PolicyRecipe:
        encoder = structs.replace(policy.encoder, steps=2, scenes=min(64, policy.encoder.scenes))
        return structs.replace(policy, steps=50, warmup=1, encoder=encoder)

    return structs.replace(
        recipe, policies={name: short(policy) for name, policy in recipe.policies.items()},
        tokenizer=structs.replace(recipe.tokenizer, steps=2), generate_episodes=min(20, recipe.generate_episodes),
    )  # fmt: skip


def with_head(bundle: CodeParts, seed: int, run: Run, lessons: int = LESSONS, steps: int = HEAD_STEPS) -> CodeParts:
    """The bundle with a learned gate's head."""
    if (bundle.path / HEAD).is_file():
        return bundle
    folder, few = bundle.path / "gate", run.quick
    roll = collector(200 if few else lessons, run.pool, run.update, folder=folder / "frames")
    train_head(bundle.pair(), HeadRecipe(steps=2 if few else steps, seed=seed), roll, folder, run.update)
    shutil.rmtree(folder)
    return load_codes(bundle.path)


def times(task: str, folder: Path, run: Run) -> dict[str, Any]:
    """Milliseconds of all parts of every size of a task, of networks that are hardly trained.

    The sizes alternate: costs of two drafts can only be compared if they were measured in one run. The target's time is
    the median over the sizes, as its network is the same for all of them.
    """
    sizes, rounds = range(len(DRAFTS[task].widths)), 4 if run.quick else 400
    recipe = with_drafts(load_recipe(ROOT / "recipes" / f"{task}.toml", CodesRecipe), task, sizes, 0)
    train(hardly(recipe), run.data or Path(), folder / "train", run.update)
    pairs = {}
    for size in sizes:
        bundle = load_codes(folder / "train" / "bundles" / f"{task}-{NAMES[size]}")
        pairs[tables.SIZES[size]] = with_head(bundle, 1, run, lessons=200, steps=2).pair()
    parts = measure_parts(pairs, rounds)
    target_ms = sorted(ms["target"] for ms in parts.values())[len(parts) // 2]
    return {"parts": {size: ms | {"target": target_ms} for size, ms in parts.items()}}


def targets(folder: Path, run: Run) -> dict[str, Any]:
    """Milliseconds of draft and target of the package's pairs, and how long the actions of a chunk last."""
    rounds, pairs = 2 if run.quick else 100, {}
    # One after the other: between larger networks the smaller ones find their weights gone from the cache.
    for name, draft in TARGETS.items():
        pair = load_pair(name, draft=draft)
        parts = measure_parts({name: pair}, rounds)[name]
        drafts = isinstance(pair.parts, CodeParts) or draft
        chunk_ms = 1e3 * pair.execute / pair.rate_hz
        pairs[name] = {
            "target_ms": parts["target"], "draft_ms": parts["draft"] if drafts else None, "chunk_ms": chunk_ms,
        }  # fmt: skip
    return {"pairs": pairs}


def gathered(drafts: Iterable[Mapping[str, Any]], times: Mapping[str, Any]) -> dict[str, Any]:
    """What the tables need of finished drafts: ``rows`` with all training seeds, ``parameters`` by task, ``times``."""
    rows, parameters = dict[tuple[Any, ...], dict[str, Any]](), dict[str, dict[str, Any]]()
    for draft in drafts:
        for row in draft["rows"]:
            key = (row["task"], row["draft"], row["method"], row["asked"])
            seeds = rows.get(key, {"seeds": {}})["seeds"] | row["seeds"]
            rows[key] = row | {"seeds": dict(sorted(seeds.items()))}
        for task, counts in draft["parameters"].items():
            parameters.setdefault(task, {}).update(counts)
    order = [Draft("", 0, size, late).about for late in (False, True) for size in FIRST]
    ordered = {task: {name: counts[name] for name in order if name in counts} for task, counts in parameters.items()}
    return {"rows": [rows[key] for key in sorted(rows)], "parameters": ordered, "times": times}


def report(results: Results) -> Report:
    """The study, and what ``specact advise`` knows of other policies."""
    cells = [cell for task in DRAFTS for drafts in results[task].values() for cell in drafts.values()]
    return tables.report(gathered(cells, results["times"]), results["targets"])
