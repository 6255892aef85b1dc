"""Settings in which the target knows what the device cannot: tasks, the scene, and a second camera in two suites.

``--data`` is the folder of their recordings. Of five tasks, for a draft that never saw the others, one for each:
``specact data record --env metaworld/TASK --out DATA/metaworld-TASK --episodes 150 --noise 0.4``. With scenes and
frames of all ten: ``specact data record --env metaworld --privileged --noise 0.4 --episodes 150 --out
DATA/metaworld-scene``. Those of LIBERO-Object are made as ``recipes/libero-object-draft.toml`` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.controller import AUDIT_RATE, delay
from experiments.grid import ROOT, Cell, Experiment, Run
from experiments.measure import from_digits
from experiments.value import targets
from experiments.value.targets import COLUMNS, GATES, METAWORLD, OBJECT, RATES, Setting, Suite
from specact.gates import Gate
from specact.lab.envs.metaworld import INSTRUCTIONS
from specact.lab.evaluation.run import read_table
from specact.lab.rollout.methods import Method, random_control
from specact.types import Proposal

RECORDED = "metaworld-scene"
SEES_SCENE = Path(__file__).with_name("scene.toml").read_text()
# At the first rate: at most three skips in a row, as helped on LIBERO.
LIMITED, LIMIT = ("random", "adahi"), ("max_skips=3",)


class Unlisted(Gate):
    """Control: asks wherever the instruction is none of those that the draft was trained on."""

    calibrated = False

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, *, tie_probability: float = 0.0, **settings: Any) -> Gate:
        return cls(0.5, force_first=False)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return float(proposal.window.instruction not in {INSTRUCTIONS[task] for task in targets.KNOWN})


class Weak(Gate):
    """Control: asks at random, in the tasks in which the draft alone fails."""

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return float(failing(proposal) > 0.0) + rng.random()


class Weakest(Gate):
    """Control: asks in the tasks in which the draft alone fails most."""

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return failing(proposal) + 1e-3 * rng.random()


@cache
def fails() -> dict[str, float]:
    """How often the draft alone fails, by instruction, as stored; of tasks in which it does so in more than a tenth."""
    shares = Experiment.load("value").stored()["scene"]["fails"]
    return {INSTRUCTIONS[task]: share for task, share in shares.items() if share > 0.1}


def failing(proposal: Proposal) -> float:
    """How often the draft alone fails in the task of an inference."""
    return fails().get(str(proposal.window.instruction), 0.0)


def draft_recipe(suite: Suite, **changes: str) -> str:
    """The package's recipe of a draft, with other values of these names."""
    text = (ROOT / "recipes" / f"{suite.draft}.toml").read_text()
    for name, value in changes.items():
        text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
    return text


LIST = Method("list", f"{__name__}:Unlisted", "asks on every task that the draft was not trained on")
WEAK = tuple(
    Method(gate.__name__.lower(), f"{__name__}:{gate.__name__}", str(gate.__doc__)) for gate in (Weak, Weakest)
)
HAND = draft_recipe(METAWORLD, data=f'["{RECORDED}"]', sees='["image.gripper", "state"]')
WRIST = draft_recipe(OBJECT, sees='["image.wrist", "state"]')
UNKNOWN = Setting(
    "unknown", "five more tasks",
    f"{METAWORLD.episodes} paired episodes of Meta-World, half of them of tasks that the draft knows; "
    "share of inferences that asked there and on the other tasks; AUROC of the score for other tasks. `list` asks "
    "on all of these. Where the draft has several trainings intervals are over these, too; one number: the first.",
    "draft", draft_recipe(METAWORLD, data=str([f"{METAWORLD.name}-{task}" for task in targets.KNOWN])),
    methods=("draft", "target_on_device", LIST, random_control(LIST), *GATES[2:]), lists=("list",),
    columns={
        "method": COLUMNS["method"], "success": COLUMNS["success"], "by training": COLUMNS["by training"],
        "known tasks": "{known:ci2}", "other tasks": "{other:ci2}", "asked": COLUMNS["asked"],
        "on known": "{asked[0]:.2f?}", "on other": "{asked[1]:.2f?}", "AUROC": "{auroc:.2f?}",
    },
)  # fmt: skip
SCENE = Setting(
    "scene", "the scene",
    f"{METAWORLD.episodes} paired episodes of Meta-World by a draft of all ten tasks that sees cameras, before a "
    "target that is fed the scene; share of inferences that asked. `target_on_device` is the target alone, which no "
    "device can be. `weak` asks at random in tasks in which the draft fails, `weakest` where it fails most.",
    "target", SEES_SCENE, draft_recipe(METAWORLD, data=f'["{RECORDED}"]'), (*GATES, *WEAK),
    tuple(method.name for method in WEAK),
)  # fmt: skip
CAMERA = Setting(
    "camera", "one more camera",
    f"{METAWORLD.episodes} paired episodes of Meta-World by a draft that sees the hand's camera, before a target that "
    "sees the fixed one, too.", "draft", HAND, HAND,
)  # fmt: skip
FIXED = Setting(
    "object", "the fixed camera",
    f"{OBJECT.episodes} paired episodes of LIBERO-Object, in initial states of the benchmark, by a draft that sees the "
    "hand's camera, before a target that sees the fixed one, too.", "draft", WRIST, WRIST, suite=OBJECT,
)  # fmt: skip
SETTINGS = (UNKNOWN, SCENE, CAMERA, FIXED)


def plan() -> Iterator[Cell]:
    """The cells of each setting; of unknown tasks also policies without a server, gates with a limit, and an alarm."""
    for setting in SETTINGS:
        yield from setting.plan()
    for name, (policy, steps) in targets.ALONE.items():
        yield Cell(f"unknown/{name}", partial(targets.alone, policy, steps))
    yield Cell("scene/fails", failed)
    yield Cell("unknown/limit", limited)
    yield Cell("unknown/alarm", alarm)


def failed(folder: Path, run: Run) -> dict[str, float]:
    """How often the draft alone fails in each task, in other episodes."""
    pair, others = targets.pair_of(METAWORLD.draft, METAWORLD.target, folder), replace(run, seed=run.seed + 1)
    won = from_digits(targets.succeeded(pair, ("draft",), RATES[0], folder, others)["draft"]["won"])
    tasks = enumerate(targets.TASKS[: len(won)])
    return {task: round(1.0 - won[at :: len(targets.TASKS)].mean(), 2) for at, task in tasks}


def limited(folder: Path, run: Run) -> dict[str, Any]:
    """Gates with a limit on skips."""
    return targets.succeeded(UNKNOWN.pair("", folder, run), LIMITED, RATES[0], folder, run, LIMIT)


def alarm(folder: Path, run: Run) -> dict[str, Any]:
    """How long the audit of ADAHI takes to notice tasks that the draft was not shown, after a life of known ones.

    A draft is kept where every action is within a tolerance, in which on average over its actions nine of ten skipped
    drafts were on known tasks. Tolerance and level are of other episodes.
    """

    def skipped(within: float, name: str, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        targets.succeeded(UNKNOWN.pair("", folder / name, run, within), ("adahi",), RATES[0], folder / name, run)
        return skips(read_table(folder / name / "steps" / "adahi"))

    others = replace(run, seed=run.seed + 1)
    tolerance = float(np.quantile(skipped(0.0, "distance", others)[0]["distance"], 0.9))
    level = float(skipped(tolerance, "level", others)[0]["kept"].mean())
    known, other = skipped(tolerance, "judged", run)
    kept = [float(tasks["kept"].mean()) for tasks in (known, other)]
    return {"tolerance": tolerance, "level": level, "kept": kept, **noticed(known, other, level)}


def skips(steps: Mapping[str, NDArray[Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """On known tasks and on others: of skipped drafts ``distance`` and whether they were ``kept``, their ``share``.

    ``each`` is the number of inferences of an episode.
    """
    rows = list[dict[str, Any]]()
    for tasks in (steps["episode"] % 2 == 0, steps["episode"] % 2 == 1):
        skipped = tasks & ~steps["transmitted"]
        kept = steps["prefix"][skipped] >= METAWORLD.execute
        rows.append({
            "distance": steps["distance"][skipped], "kept": kept.astype(float),
            "share": skipped.sum() / tasks.sum(), "each": tasks.sum() / len(np.unique(steps["episode"][tasks])),
        })  # fmt: skip
    return rows[0], rows[1]


def noticed(known: Mapping[str, Any], other: Mapping[str, Any], level: float, most: int = 100_000) -> dict[str, Any]:
    """Median and ninth decile of the audits until the alarm, at ``most``, in a hundred lives with audits drawn anew."""
    rng = np.random.default_rng(0)
    audits = [delay(known["kept"], other["kept"], level, rng, most) for _ in range(100)]
    return {
        "false": audits.count(0), "audits": np.quantile(audits, (0.5, 0.9)).tolist(),
        "inferences": float(np.median(audits) / AUDIT_RATE / other["share"]), "each": float(other["each"]),
    }  # fmt: skip
