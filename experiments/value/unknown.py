"""A draft of five tasks before a target of ten: does a gate notice what its draft was never shown?

``--data`` is the folder of the recordings that the draft learns from, one for each of the five:
``specact data record --env metaworld/TASK --out DATA/metaworld-TASK --episodes 150 --noise 0.4``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.figures import draw_series, points_of
from experiments.grid import ROOT, UNTIMED, Cell, Run, evaluated, made_pair, specact
from experiments.measure import outcomes, paired
from experiments.report import Picture, Report, Table, contrast_table, one_family, under
from specact.gates import Gate
from specact.lab.envs.metaworld import INSTRUCTIONS
from specact.lab.evaluation.run import Evaluation, read_table
from specact.lab.rollout.methods import Method, random_control
from specact.lab.rollout.statistics import roc_auc, seeds_interval, wilson
from specact.types import Proposal

SUITE, TARGET, DRAFT = "metaworld", "metaworld-flow", "metaworld-draft"
TASKS = tuple(INSTRUCTIONS)
KNOWN = TASKS[::2]  # an episode's task is its number modulo ten: those of even numbers are known
EPISODES, RATES, LESSONS = 200, (0.4, 0.2), 3000
# Seeds of the draft's training; those after the first are judged at the first rate alone.
TRAININGS = ("", "-1", "-2")


class Unlisted(Gate):
    """Control: asks wherever the instruction is none of those that the draft was trained on."""

    calibrated = False

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, *, tie_probability: float = 0.0, **settings: Any) -> Gate:
        return cls(0.5, force_first=False)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return float(proposal.window.instruction not in {INSTRUCTIONS[task] for task in KNOWN})


LIST = Method("list", f"{__name__}:Unlisted", "asks on every task that the draft was not trained on")
# By rate, those that none changes at the first one.
METHODS: dict[float, tuple[str | Method, ...]] = {
    0.4: ("draft", "target_on_device", LIST, random_control(LIST), "random", "adahi", "random_learned", "learned"),
    0.2: ("random", "adahi", "random_learned", "learned"),
}
# At the first rate: at most three skips in a row, as helped on LIBERO.
LIMITED, LIMIT = ("random", "adahi"), ("max_skips=3",)
# Of the episodes all, those of known tasks, and the others.
SHARES = {"success": slice(None), "known": slice(0, None, 2), "other": slice(1, None, 2)}
# Methods that no rate changes; and the one that asks no server.
UNRATED, DEVICE = ("draft", "target_on_device", "list", "random_list"), "target_on_device"
# What needs no server: a draft of all ten tasks, of the same size, and the target in one step; with its Euler steps.
ALONE = {"draft of ten": (DRAFT, 10), "one step": (TARGET, 1)}
# Of the picture, by the method in whose colour they are drawn.
SHOWN = {
    "draft": "draft", "random": "random", "adahi": "adahi", "learned": "learned", "oracle": "list",
    "head_draft": "draft of ten", "target_on_device": "one step",
}  # fmt: skip
PAIRS = [
    (gate, control) for gate, control in (("list", "random_list"), ("adahi", "random"), ("learned", "random_learned"))
]

TABLE = partial(
    Table, "unknown", f"{EPISODES} paired episodes of Meta-World, half of them of tasks that the draft knows; "
    "share of inferences that asked there and on the other tasks; AUROC of the score for other tasks. `list` asks "
    "on all of these. Where the draft has several trainings intervals are over these, too; one number: the first.",
    "method | success | by training | known tasks | other tasks | asked | on known | on other | AUROC",
    "`{method}` | {success:ci2} | {trainings} | {known:ci2} | {other:ci2} | {sent:.2f?} | {asked[0]:.2f?} "
    "| {asked[1]:.2f?} | {auroc:.2f?}",
)  # fmt: skip


def plan() -> Iterator[Cell]:
    """The drafts, what needs no server, and gates at each rate."""
    yield from (Cell(f"unknown/draft{training}", partial(train, training)) for training in TRAININGS)
    for name, (policy, steps) in ALONE.items():
        yield Cell(f"unknown/{name}", partial(alone, policy, steps))
    for rate, training in [(rate, "") for rate in RATES] + [(RATES[0], training) for training in TRAININGS[1:]]:
        yield Cell(f"unknown/{rate}{training}", partial(gates, rate, training))
    yield Cell("unknown/limit", limited)


def train(training: str, folder: Path, run: Run) -> dict[str, Any]:
    """Trains the draft: the recipe of the one of ten tasks, on recordings of five."""
    data = run.needed("recordings of five tasks").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    names = ", ".join(f'"metaworld-{task}"' for task in KNOWN)
    text = (ROOT / "recipes" / f"{DRAFT}.toml").read_text()
    recipe = folder / "recipe.toml"
    seed = training.removeprefix("-") or 0
    recipe.write_text(text.replace(f'data = ["{SUITE}"]', f"seed = {seed}\ndata = [{names}]"))
    specact("train", recipe.resolve(), "--data", data, "--out", (folder / "run").resolve(), folder=ROOT)
    return {"tasks": list(KNOWN)}


def alone(policy: str, steps: int, folder: Path, run: Run) -> dict[str, Any]:
    """A policy without a server, in so many steps where it is a flow."""
    return succeeded(pair_of(policy, policy, folder, steps), (DEVICE,), RATES[0], folder, run)


def gates(rate: float, training: str, folder: Path, run: Run) -> dict[str, Any]:
    """Gates before the target, at a rate, of a training of the draft."""
    methods = tuple(method for method in METHODS[rate] if not training or method != DEVICE)
    return taught(gated(training, folder, run), methods, rate, folder, run)


def taught(pair: str, methods: tuple[str | Method, ...], rate: float, folder: Path, run: Run) -> dict[str, Any]:
    """Methods of a pair, whose learned gate is trained first."""
    lessons, few = run.few(LESSONS), run.few(40)
    specact("calibrate", pair, "--gate", "learned", "--rate", rate, "--lessons", lessons, "--episodes", few,
            "--workers", run.pool.workers)  # fmt: skip
    return succeeded(pair, methods, rate, folder, run)


def limited(folder: Path, run: Run) -> dict[str, Any]:
    """Gates with a limit on skips."""
    return succeeded(gated("", folder, run), LIMITED, RATES[0], folder, run, LIMIT)


def gated(training: str, folder: Path, run: Run) -> str:
    """A training of the draft before the target."""
    drafts = f"unknown/draft{training}"
    run.result(drafts)
    return pair_of(str(run.out / drafts / "run/bundles" / DRAFT), TARGET, folder, 10)


def pair_of(draft: str, target: str, folder: Path, steps: int) -> str:
    """A pair that executes four actions of a chunk, in the cell's folder."""
    return made_pair(folder / "pair", draft, target, execute=4, env=SUITE, target_steps=steps)


def succeeded(
    pair: str, methods: tuple[str | Method, ...], rate: float, folder: Path, run: Run, options: tuple[str, ...] = ()
) -> dict[str, Any]:
    """By method who succeeded, shares that asked, on known and on other tasks too, and the score's AUROC."""
    evaluation = Evaluation(pair, SUITE, methods, EPISODES, run.seed, rate, gate_options=options, **UNTIMED)
    found = dict[str, Any]()
    for name in evaluated(evaluation, folder, run)["methods"]:
        steps = read_table(folder / "steps" / name)
        known, scores = steps["episode"] % 2 == 0, np.nan_to_num(steps["score"], posinf=1e9)
        asked = [float(steps["transmitted"][of].mean()) for of in (known, ~known)]
        found[name] = {
            "won": "".join(str(int(won)) for won in outcomes(folder, name)), "asked": asked,
            "sent": float(steps["transmitted"].mean()), "auroc": roc_auc(scores, ~known),
        }  # fmt: skip
    return found


def matched(won: Mapping[str, list[NDArray[np.float64]]], pair: tuple[str, str]) -> dict[str, NDArray[np.float64]]:
    """Outcomes of two methods: means over trainings of the draft, or of the first one where one of them has no more."""
    single = any(len(won[name]) == 1 for name in pair if name not in ALONE)
    return {name: won[name][0] if single else np.mean(won[name], axis=0) for name in pair}


def success(letters: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    """Of one training, or over several."""
    return asdict(seeds_interval(letters) if letters[1:] else wilson(int(letters[0].sum()), len(letters[0])))


def report(
    found: Mapping[str, Any], table: Callable[[list[dict[str, Any]]], Table] = TABLE, others: Sequence[str] = ()
) -> Report:
    """Methods, contrasts, facts by method and rate, and the picture; of several trainings the means."""
    rows, won = list[dict[str, Any]](), dict[str, list[NDArray[np.float64]]]()
    cells = [(name, DEVICE, [of[DEVICE]]) for name, of in found.items() if name in ALONE]
    for rate in RATES:
        trainings = [found[f"{rate}{training}"] for training in TRAININGS if f"{rate}{training}" in found]
        for name in trainings[0] if trainings else ():
            label = name if name in UNRATED else f"{name} {rate}"
            cells.append((label, name, [of[name] for of in trainings if name in of]))
    cells += [(f"{name} limit", name, [of]) for name, of in found.get("limit", {}).items()]
    for label, name, parts in cells:
        letters = won[label] = [np.array([*map(float, of["won"])]) for of in parts]
        means = {key: np.mean([of[key] for of in parts], axis=0).tolist() for key in ("sent", "asked")}
        rows.append({
            "method": label, "trainings": ", ".join(f"{of.mean():.2f}" for of in letters),
            **{key: success([of[at] for of in letters]) for key, at in SHARES.items()},
            **({"sent": None, "asked": [None, None]} if name == DEVICE else means),
            "auroc": float(np.mean([of["auroc"] for of in parts])) if name in ("adahi", "learned") else None,
        })  # fmt: skip
    tests = dict[tuple[str, str], None]()
    for rate in RATES:
        for gate, control in PAIRS:
            first, random = (name if name in UNRATED else f"{name} {rate}" for name in (gate, control))
            rivals = (random, "draft", *ALONE, *("list",) * (gate != "list"), *(f"{name} {rate}" for name in others))
            tests |= {(first, rival): None for rival in rivals if {first, rival} <= won.keys()}
    for rival in ("random limit", "random 0.4", "adahi 0.4", "draft of ten"):
        tests |= {("adahi limit", rival): None} if {"adahi limit", rival} <= won.keys() else {}
    shown, differences = table(rows), [row for pair in tests for row in paired(matched(won, pair), [pair])]
    family = one_family(under(f"{SUITE}, {shown.name}", differences))
    facts = {row["method"]: row for row in rows} | {f"{row['first']} - {row['second']}": row for row in family}
    drawn = {
        style: points_of({row["sent"] or 0.0: row["success"] for row in rows if row["method"].partition(" 0")[0] == of})
        for style, of in SHOWN.items()
    }
    picture = partial(draw_series, drawn, "share of inferences that ask", "success", "Meta-World, ten tasks", SHOWN)
    contrasts = contrast_table(family, f"{shown.name}-contrasts")
    return Report([shown, contrasts], facts, [Picture(f"{shown.name}.svg", picture)])
