"""A draft of five tasks before a target of ten: does a gate notice what its draft was never shown?

``--data`` is the folder of the recordings that the draft learns from, one for each of the five:
``specact data record --env metaworld/TASK --out DATA/metaworld-TASK --episodes 150 --noise 0.4``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.grid import ROOT, Cell, Run, evaluated, made_pair, specact
from experiments.measure import outcomes
from experiments.report import Table, contrast_table, one_family, under
from specact.families.chunks.pair import PairSettings
from specact.gates import Gate
from specact.lab.envs.metaworld import INSTRUCTIONS
from specact.lab.evaluation.run import Evaluation, read_table
from specact.lab.rollout.methods import Method, random_control
from specact.lab.rollout.statistics import contrast, roc_auc, wilson
from specact.types import Proposal

SUITE, TARGET, DRAFT = "metaworld", "metaworld-flow", "metaworld-draft"
TASKS = tuple(INSTRUCTIONS)
KNOWN = TASKS[::2]  # an episode's task is its number modulo ten: those of even numbers are known
EPISODES, RATES, LESSONS = 200, (0.4, 0.2), 3000


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
# Methods that no rate changes; and the one that asks no server.
UNRATED, DEVICE = ("draft", "target_on_device", "list", "random_list"), "target_on_device"
# What needs no server: a draft of all ten tasks, of the same size, and the target in one step; with its Euler steps.
ALONE = {"draft of ten": (DRAFT, 10), "one step": (TARGET, 1)}
PAIRS = [
    (gate, control) for gate, control in (("list", "random_list"), ("adahi", "random"), ("learned", "random_learned"))
]


def plan() -> Iterator[Cell]:
    """The draft, what needs no server, and gates at each rate."""
    yield Cell("unknown/draft", train)
    for name, (policy, steps) in ALONE.items():
        yield Cell(f"unknown/{name}", partial(alone, policy, steps))
    for rate in RATES:
        yield Cell(f"unknown/{rate}", partial(gates, rate))


def train(folder: Path, run: Run) -> dict[str, Any]:
    """Trains the draft: the recipe of the one of ten tasks, on recordings of five."""
    data = run.needed("recordings of five tasks").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    names = ", ".join(f'"metaworld-{task}"' for task in KNOWN)
    text = (ROOT / "recipes" / f"{DRAFT}.toml").read_text()
    recipe = folder / "recipe.toml"
    recipe.write_text(text.replace(f'data = ["{SUITE}"]', f"data = [{names}]"))
    specact("train", recipe.resolve(), "--data", data, "--out", (folder / "run").resolve(), folder=ROOT)
    return {"tasks": list(KNOWN)}


def alone(policy: str, steps: int, folder: Path, run: Run) -> dict[str, Any]:
    """A policy without a server, in so many steps where it is a flow."""
    return succeeded(pair_of(policy, policy, folder, steps), (DEVICE,), RATES[0], folder, run)


def gates(rate: float, folder: Path, run: Run) -> dict[str, Any]:
    """Gates before the target, at a rate."""
    run.result("unknown/draft")
    pair = pair_of(str(run.out / "unknown/draft/run/bundles" / DRAFT), TARGET, folder, 10)
    lessons, few = run.few(LESSONS), run.few(40)
    specact("calibrate", pair, "--gate", "learned", "--rate", rate, "--lessons", lessons, "--episodes", few,
            "--workers", run.pool.workers)  # fmt: skip
    return succeeded(pair, METHODS[rate], rate, folder, run)


def pair_of(draft: str, target: str, folder: Path, steps: int) -> str:
    """A pair that executes four actions of a chunk, in the cell's folder."""
    return str(made_pair(folder / "pair", draft, target, PairSettings(execute=4, env=SUITE, target_steps=steps)))


def succeeded(pair: str, methods: tuple[str | Method, ...], rate: float, folder: Path, run: Run) -> dict[str, Any]:
    """By method who succeeded, shares that asked, on known and on other tasks too, and the score's AUROC."""
    evaluation = Evaluation(
        pair, SUITE, methods, EPISODES, run.seed, rate, draft_ms=1.0, gate_ms=1.0, head_ms=1.0, target_ms=1.0
    )
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


def tables_of(found: Mapping[str, Any]) -> tuple[list[Table], dict[str, Any]]:
    """The table of methods and of contrasts, and facts by method and rate."""
    rows, won = [], {}
    cells = [(name, DEVICE, of[DEVICE]) for name, of in found.items() if name in ALONE]
    cells += [
        (name if name in UNRATED else f"{name} {rate}", name, of)
        for rate in map(str, RATES) for name, of in found.get(rate, {}).items()
    ]  # fmt: skip
    for label, name, of in cells:
        won[label] = np.array([*map(float, of["won"])])
        parts = {
            key: asdict(wilson(int(each.sum()), len(each)))
            for key, each in (("success", won[label]), ("known", won[label][::2]), ("other", won[label][1::2]))
        }  # fmt: skip
        asks = {"sent": None, "asked": [None, None]} if name == DEVICE else {}
        scored = {} if name in ("adahi", "learned") else {"auroc": None}
        rows.append({"method": label, **of, **parts, **asks, **scored})
    tests = dict[tuple[str, str], None]()
    for rate in RATES:
        for gate, control in PAIRS:
            first, random = (name if name in UNRATED else f"{name} {rate}" for name in (gate, control))
            rivals = (random, "draft", *ALONE, *("list",) * (gate != "list"))
            tests |= {(first, rival): None for rival in rivals if {first, rival} <= won.keys()}
    family = one_family(under(SUITE, [
        {"first": first, "second": second, **asdict(contrast(won[first], won[second]))} for first, second in tests
    ]))  # fmt: skip
    shown = Table(
        "unknown", f"{EPISODES} paired episodes of Meta-World, half of them of tasks that the draft knows; "
        "share of inferences that asked there and on the other tasks; AUROC of the score for other tasks. `list` asks "
        "on all of these.",
        "method | success | known tasks | other tasks | asked | on known | on other | AUROC",
        "`{method}` | {success:ci2} | {known:ci2} | {other:ci2} | {sent:.2f?} | {asked[0]:.2f?} | {asked[1]:.2f?} "
        "| {auroc:.2f?}", rows,
    )  # fmt: skip
    facts = {row["method"]: row for row in rows} | {f"{row['first']} - {row['second']}": row for row in family}
    return [shown, contrast_table(family, "unknown-contrasts")], facts
