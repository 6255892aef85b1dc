"""Targets that know what a device cannot: gates before them, what needs no server, and a draft that they teach.

What a setting trains is trained several times; the gates of the first rate are judged in every training, those of the
others in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments.figures import Point, add_series, points_of
from experiments.grid import UNTIMED, Cell, Run, bundle_in, evaluated, made_pair, specact, trained
from experiments.measure import from_digits, outcomes, paired, to_digits
from experiments.report import Report, Table, contrast_table, one_family, under
from specact.lab.envs.metaworld import INSTRUCTIONS
from specact.lab.evaluation.run import Evaluation, read_table
from specact.lab.rollout.methods import Method
from specact.lab.rollout.statistics import roc_auc, seeds_interval, wilson


@dataclass(frozen=True)
class Suite:
    """Ten tasks, with a target and a draft of the package.

    Attributes:
        execute: actions of a chunk that are played. ``episodes``: those that methods are paired on.
        calibrated: episodes of a calibration. ``lessons``: inferences that a learned gate is trained on.
    """

    name: str
    target: str
    draft: str
    execute: int
    episodes: int
    calibrated: int
    lessons: int


METAWORLD = Suite("metaworld", "metaworld-flow", "metaworld-draft", 4, 200, 40, 3000)
# In initial states of the benchmark. Ten simulators live in a process: give ``--workers 1``.
OBJECT = Suite("libero-object", "libero-object-flow", "libero-object-draft", 16, 100, 20, 1000)
TASKS = tuple(INSTRUCTIONS)
KNOWN = TASKS[::2]  # an episode's task is its number modulo ten: those of even numbers are known
RATES = (0.4, 0.2)
TRAININGS = ("", "-1", "-2")
# Slices of the episodes: all, those of known tasks, and those of other tasks.
SHARES = {"success": slice(None), "known": slice(0, None, 2), "other": slice(1, None, 2)}
# Methods that no rate changes; and the one that asks no server.
UNRATED, DEVICE = ("draft", "target_on_device", "list", "random_list"), "target_on_device"
# What needs no server, with its Euler steps: a draft of all ten tasks, of the same size, and the target in one step;
# and a draft that the target teaches.
ALONE, DISTILLED = {"draft of ten": (METAWORLD.draft, 10), "one step": (METAWORLD.target, 1)}, "distilled draft"
SERVERLESS = (*ALONE, DISTILLED)
GATES = ("draft", DEVICE, "random", "adahi", "random_learned", "learned")
# Methods of the picture, by the method of other pictures whose colour they have.
SHOWN = {
    "draft": "draft", "random": "random", "adahi": "adahi", "learned": "learned", "oracle": "list",
    "head_draft": "draft of ten", "target_on_device": "one step", "hybrid": DISTILLED, "oracle_action": "weakest",
}  # fmt: skip
PAIRS = (("list", "random_list"), ("adahi", "random"), ("learned", "random_learned"))
COLUMNS = {"method": "`{method}`", "success": "{success:ci2}", "by training": "{trainings}", "asked": "{sent:.2f?}"}


@dataclass(frozen=True)
class Setting:
    """A target that knows what the device cannot, and a draft; one of both is trained, the other is of the package.

    Attributes:
        name: the group of its cells.
        knows: what the target knows and the device does not.
        about: its table, whose ``columns`` are these.
        part: what is trained by ``recipe``, from the folders that this names below ``--data``.
        taught: the recipe of a draft that learns the target's answers.
        methods: at the first rate; at others those that a rate changes.
        lists: names of methods that are controls of every gate.
        suite: the tasks, and the package's target and draft.
    """

    name: str
    knows: str
    about: str
    part: Literal["draft", "target"]
    recipe: str
    taught: str = ""
    methods: tuple[str | Method, ...] = GATES
    lists: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=lambda: COLUMNS)
    suite: Suite = METAWORLD

    def plan(self) -> Iterator[Cell]:
        """The trainings, the taught draft, and gates at each rate."""
        yield from (Cell(f"{self.name}/{self.part}{training}", partial(self.train, training)) for training in TRAININGS)
        if self.taught:
            yield Cell(f"{self.name}/{DISTILLED}", self.distil)
        for rate, training in [(RATES[0], training) for training in TRAININGS] + [(rate, "") for rate in RATES[1:]]:
            yield Cell(f"{self.name}/{rate}{training}", partial(self.gates, rate, training))

    def train(self, training: str, folder: Path, run: Run) -> dict[str, Any]:
        """One of the trainings."""
        from_recordings(f"seed = {training.removeprefix('-') or 0}\n{self.recipe}", folder, run)
        return {}

    def distil(self, folder: Path, run: Run) -> dict[str, Any]:
        """A draft that learns the first target's answers, alone."""
        target = self.suite.target if self.part == "draft" else self.bundle("", run)
        taught = from_recordings(self.taught, folder, run, "--teacher", target)
        return alone(taught, 10, folder, run, self.suite)

    def gates(self, rate: float, training: str, folder: Path, run: Run) -> dict[str, Any]:
        """Methods at a rate, whose learned gate is trained first; those that no rate or training changes only once."""
        measured = UNRATED if rate != RATES[0] else (DEVICE,) if training and self.part == "draft" else ()
        methods = tuple(method for method in self.methods if getattr(method, "name", method) not in measured)
        pair, suite = self.pair(training, folder, run), self.suite
        specact("calibrate", pair, "--gate", "learned", "--rate", rate, "--lessons", run.few(suite.lessons),
                "--episodes", run.few(suite.calibrated), "--workers", run.pool.workers)  # fmt: skip
        return succeeded(pair, methods, rate, folder, run, suite=suite)

    def pair(self, training: str, folder: Path, run: Run, within: float = 0.0) -> str:
        """Draft and target of a training, in the folder of a cell."""
        bundle, suite = self.bundle(training, run), self.suite
        draft, target = (bundle, suite.target) if self.part == "draft" else (suite.draft, bundle)
        return pair_of(draft, target, folder, suite, accept_within=within)

    def bundle(self, training: str, run: Run) -> str:
        """What one of the trainings made."""
        run.result(cell := f"{self.name}/{self.part}{training}")
        return str(bundle_in(run.out / cell))


def from_recordings(recipe: str, folder: Path, run: Run, *options: str) -> str:
    """The bundle that a recipe trains in a folder from the run's data."""
    data = run.needed("the recordings that the recipes name").resolve()
    return str(trained(recipe, folder, run, "--data", data, *options))


def alone(policy: str, steps: int, folder: Path, run: Run, suite: Suite = METAWORLD) -> dict[str, Any]:
    """A policy without a server, in so many steps where it is a flow."""
    pair = pair_of(policy, policy, folder, suite, target_steps=steps)
    return succeeded(pair, (DEVICE,), RATES[0], folder, run, suite=suite)


def pair_of(draft: str, target: str, folder: Path, suite: Suite = METAWORLD, **settings: Any) -> str:
    """A pair in the folder of a cell, see :class:`~specact.families.chunks.pair.PairSettings`."""
    return made_pair(folder / "pair", draft, target, execute=suite.execute, env=suite.name, **settings)


def succeeded(
    pair: str, methods: tuple[str | Method, ...], rate: float, folder: Path, run: Run, options: tuple[str, ...] = (),
    suite: Suite = METAWORLD,
) -> dict[str, Any]:  # fmt: skip
    """Evaluates methods; returns for each who ``won``, its shares that asked, and the AUROC of its score."""
    evaluation = Evaluation(
        pair, suite.name, methods, suite.episodes, run.seed, rate, gate_options=options,
        calibration_episodes=suite.calibrated, **UNTIMED,
    )  # fmt: skip
    results = dict[str, Any]()
    for name in evaluated(evaluation, folder, run)["methods"]:
        steps = read_table(folder / "steps" / name)
        known, scores = steps["episode"] % 2 == 0, np.nan_to_num(steps["score"], posinf=1e9)
        results[name] = {
            "won": to_digits(outcomes(folder, name)),
            "asked": [float(steps["transmitted"][part].mean()) for part in (known, ~known)],
            "sent": float(steps["transmitted"].mean()), "auroc": roc_auc(scores, ~known),
        }  # fmt: skip
    return results


def matched(won: Mapping[str, list[NDArray[np.float64]]], pair: tuple[str, str]) -> dict[str, NDArray[np.float64]]:
    """Outcomes of two methods: means over trainings, or the first training where one of both has no other."""
    single = any(len(won[name]) == 1 for name in pair if name not in SERVERLESS)
    return {name: won[name][0] if single else np.mean(won[name], axis=0) for name in pair}


def success(won: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    """The success rate of one training, or over several, with its interval."""
    return asdict(seeds_interval(won) if won[1:] else wilson(int(won[0].sum()), len(won[0])))


def label(name: str, rate: float) -> str:
    """The name of a method in tables, with its rate where it has one."""
    return name if name in UNRATED else f"{name} {rate}"


def report(setting: Setting, results: Mapping[str, Any]) -> Report:
    """Methods, contrasts, facts by method and rate, and the picture; of several trainings the means."""
    rows, won = list[dict[str, Any]](), dict[str, list[NDArray[np.float64]]]()
    shown = " | ".join(setting.columns.values())
    cells = [(name, DEVICE, [cell[DEVICE]]) for name, cell in results.items() if name in SERVERLESS]
    for rate in RATES:
        trainings = [results[f"{rate}{training}"] for training in TRAININGS if f"{rate}{training}" in results]
        names = trainings[0] if trainings else ()
        cells += [(label(name, rate), name, [cell[name] for cell in trainings if name in cell]) for name in names]
    cells += [(f"{name} limit", name, [cell]) for name, cell in results.get("limit", {}).items()]
    for title, name, parts in cells:
        successes = won[title] = [from_digits(part["won"]) for part in parts]
        means = {key: np.mean([part[key] for part in parts], axis=0).tolist() for key in ("sent", "asked")}
        row = {
            "method": title, "trainings": ", ".join(f"{episodes.mean():.2f}" for episodes in successes),
            **{key: success([episodes[part] for episodes in successes]) for key, part in SHARES.items()},
            **({"sent": None, "asked": [None, None]} if name == DEVICE else means),
            "auroc": float(np.mean([part["auroc"] for part in parts])) if name in ("adahi", "learned") else None,
        }  # fmt: skip
        rows.append({key: value for key, value in row.items() if f"{{{key}" in shown})
    tests = dict[tuple[str, str], None]()
    for rate in RATES:
        for gate, control in PAIRS:
            first, random, *lists = (label(name, rate) for name in (gate, control, *setting.lists))
            rivals = [rival for rival in (random, "draft", *SERVERLESS, *lists) if rival != first]
            tests |= {(first, rival): None for rival in rivals if {first, rival} <= won.keys()}
            tests |= {(random, "draft"): None} if {random, "draft"} <= won.keys() else {}
    for rival in ("random limit", "random 0.4", "adahi 0.4", "draft of ten"):
        tests |= {("adahi limit", rival): None} if {"adahi limit", rival} <= won.keys() else {}
    family = one_family(
        under(
            f"{setting.suite.name}, {setting.name}",
            [row for pair in tests for row in paired(matched(won, pair), [pair])],
        )
    )
    facts = {row["method"]: row for row in rows} | {f"{row['first']} - {row['second']}": row for row in family}
    facts["alarm"] = results.get("alarm")
    table = Table(setting.name, setting.about, " | ".join(setting.columns), shown, rows)
    contrasts = contrast_table(family, f"{setting.name}-contrasts")
    return Report([table, contrasts], facts)


def series_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Success over the share that asks, by the style of a method."""
    return {
        style: points_of({
            row["sent"] or 0.0: row["success"] for row in rows if row["method"].partition(" 0")[0] == name
        }) for style, name in SHOWN.items()
    }  # fmt: skip


def draw(panels: Mapping[str, Mapping[str, Sequence[Point]]], y: str, names: Mapping[str, str]) -> Figure:
    """Series over the share that asks, one panel beside the other."""
    columns = 2 if len(panels) == 4 else len(panels)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * lines), layout="constrained")
    for place, (title, series) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines, columns, place)
        add_series(axes, series, "share of inferences that ask", y, title, names)
    return figure
