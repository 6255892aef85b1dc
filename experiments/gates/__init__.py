"""Gates at equal rate: readings of the deviation, uncertainties, learned gates and oracles.

``readings`` chose the bundles' recommended readings, so it has another seed than the rest (``--seed 0``).
``regression`` is the learned gate with a head that was trained to predict the rejection probability itself. ``chunks``
is the learned gate of a chunk pair, a small VQ draft before PushT's flow.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from experiments.gates.tables import report as report
from experiments.grid import Cell, Run, evaluated, made_pair
from specact.bundle.bundle import HEAD
from specact.families.codes.pair import load_codes
from specact.gates.codes import Kind
from specact.lab.evaluation.run import Evaluation
from specact.lab.rollout.distillation import collector
from specact.lab.train.head import DISTANCE, HeadRecipe, train_head
from specact.load import load_pair
from specact.systems.adahi import Reading

RATE, BUNDLES, LESSONS = 0.4, ("ball", "swarm"), 50_000


def _deviation(**parameters: Any) -> tuple[str, ...]:
    return tuple(f"deviation.{name}={value}" for name, value in parameters.items())


# Gates by the reading of the deviation, and by what differs from its default.
DEVIATIONS = {
    f"deviation, {reading}{about}": _deviation(reading=reading, **options) for reading, about, options in (
        ("euclidean", "", {}), ("euclidean", ", alpha 0.2", {"alpha": 0.2}),
        ("euclidean", ", alpha 0.8", {"alpha": 0.8}), ("euclidean", ", of drafted actions", {"source": "draft"}),
        ("path_ratio", "", {}), ("disparity", "", {}), ("zscore", "", {}),
        ("zscore", ", of drafted actions", {"source": "draft"}), ("jump", "", {}),
    )
}  # fmt: skip
UNCERTAINTIES = {f"uncertainty, {kind}": (f"uncertainty.kind={kind}",) for kind in get_args(Kind)}
OTHERS = ("hybrid", "random", "learned", "learned_action", "oracle", "oracle_action")
_LIMITS = {0: get_args(Reading), 2: ("euclidean", "disparity"), 4: ("euclidean", "disparity", "zscore")}
READINGS = {
    name + (f", at most {skips} skips" if skips else ""): _deviation(reading=name, max_skips=skips or "unlimited")
    for skips, names in _LIMITS.items() for name in names
}  # fmt: skip
# Episodes per method, and per round of a calibration.
OF_READINGS = {"ball": (500, 200), "swarm": (500, 100), "pusht": (200, 60), "kitchen": (100, 16)}
OF_GATES = {"ball": (500, 40), "swarm": (500, 40)}


def plan(run: Run) -> Iterator[Cell]:
    """A cell per gate and bundle; random and the oracle, which the gate efficiency needs, run with every one."""
    for bundle in BUNDLES:
        for name, choices in (DEVIATIONS | UNCERTAINTIES).items():
            row = {name: "adahi" if name in DEVIATIONS else "uncertainty"}
            yield Cell(f"gates/{bundle}/{_slug(name)}", partial(gates, bundle, row, choices))
        yield Cell(f"gates/{bundle}/others", partial(gates, bundle, dict(zip(OTHERS, OTHERS, strict=True)), ()))
        yield Cell(f"gates/{bundle}/regression", partial(regression, bundle))
    for bundle in OF_READINGS:
        for name, choices in READINGS.items():
            yield Cell(f"readings/{bundle}/{_slug(name)}", partial(reading, bundle, name, choices))
    yield Cell("chunks", chunks)


def _slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def gates(
    pair: str, rows: Mapping[str, str], options: tuple[str, ...], folder: Path, run: Run, bundle: str = ""
) -> Any:
    """Evaluates methods, given with the names of their rows, together with random and the oracle."""
    episodes, calibration = OF_GATES[pair]
    methods = tuple(dict.fromkeys((*rows.values(), "random", "oracle")))
    what = Evaluation(
        bundle or pair, None, methods, episodes, run.seed, RATE, calibration_episodes=calibration,
        gate_options=(*options, "max_skips=unlimited"),
    )  # fmt: skip
    summary = evaluated(what, folder, run)
    against = {row["first"]: row["score"] for row in summary["contrasts"] if row["second"] == "random"}
    keys = ("success", "score", "sent", "true_skip_ratio", "action_change_loss", "gate_efficiency")
    return {
        name: {
            "episodes": summary["episodes"], "seed": summary["seed"],
            **{key: summary["methods"][method][key] for key in keys}, "against_random": against.get(method),
        }
        for name, method in rows.items()
    }  # fmt: skip


def regression(pair: str, folder: Path, run: Run) -> Any:
    """The learned gate of a copy of the pair whose head is the direct regression of the rejection probability."""
    path = folder / "pair"
    if not (path / HEAD).is_file():
        without = shutil.ignore_patterns(HEAD, "calibration")
        shutil.copytree(load_codes(pair).path, path, ignore=without, dirs_exist_ok=True)
        recipe = HeadRecipe(objective="rejection")
        recipe = replace(recipe, steps=20) if run.quick else recipe
        roll = collector(400 if run.quick else LESSONS, run.pool, run.update)
        train_head(load_pair(path), recipe, roll, path / "gate", run.update)
        shutil.rmtree(path / "gate")
    return gates(pair, {"regression": "learned"}, (), folder / "run", run, str(path))


def reading(bundle: str, name: str, options: tuple[str, ...], folder: Path, run: Run) -> Any:
    """ADAHI with one reading of the deviation against random at equal rate."""
    episodes, calibration = OF_READINGS[bundle]
    what = Evaluation(
        bundle, None, ("adahi", "random"), episodes, run.seed, gate_options=options, calibration_episodes=calibration
    )
    summary = evaluated(what, folder, run, None)
    adahi, random = (summary["methods"][name] for name in ("adahi", "random"))
    tested = {(row["first"], row["second"]): row["score"] for row in summary["contrasts"]}
    return {
        name: {
            "episodes": summary["episodes"], "seed": summary["seed"], "adahi": adahi["score"],
            "random": random["score"], "difference": tested["adahi", "random"], "sent": adahi["sent"],
            "true_skip_ratio": [adahi["true_skip_ratio"], random["true_skip_ratio"]],
            "action_change_loss": [adahi["action_change_loss"], random["action_change_loss"]],
            "held_out_rate": summary["calibration"]["adahi"]["held_out_rate"],
        }
    }  # fmt: skip


def chunks(folder: Path, run: Run) -> Any:
    """The learned gate of a chunk pair beside random at its rate."""
    path = Path(made_pair(folder / "pair", "pusht#draft", "pusht-flow", execute=4, env="pusht"))
    pair = load_pair(path)
    if not (path / HEAD).is_file():
        recipe = replace(DISTANCE, steps=20) if run.quick else DISTANCE
        train_head(pair, recipe, collector(60 if run.quick else 3000, run.pool, run.update), path / "gate", run.update)
        shutil.rmtree(path / "gate")
    methods = ("draft", "hybrid", "random_learned", "learned")
    what = Evaluation(str(path), None, methods, 100, run.seed, RATE, calibration_episodes=10)
    return evaluated(what, folder / "eval", run)
