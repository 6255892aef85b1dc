"""Gates at equal rate: readings of the deviation, uncertainties, learned gates and oracles (docs/gates.md).

``readings`` chose the bundles' recommended readings, so it has another seed than the rest (``--seed 0``).
``regression`` is the learned gate with a head that was trained to predict the rejection probability itself. ``chunks``
is the learned gate of a chunk pair, a small VQ draft before PushT's flow; ``--data`` has the demonstrations of PushT.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from experiments.grid import ROOT, Cell, Experiment, Finished, Part, Picture, Results, Run, evaluated
from experiments.tables import interval_text, markdown, optional_text
from specact.bundle.bundle import HEAD
from specact.cli.offline import Demonstrations
from specact.families.chunks import PairSettings
from specact.families.codes.pair import load_codes
from specact.gates.codes import Kind
from specact.gates.settings import gate_settings
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.offline import calibrate_offline
from specact.lab.rollout.distillation import collector
from specact.lab.rollout.statistics import holm
from specact.lab.train.head import DISTANCE, HeadRecipe, train_head
from specact.load import load_pair, make_pair
from specact.systems.adahi import Reading

HERE = Path(__file__).parent
RATE, BUNDLES, LESSONS = 0.4, ("ball", "swarm"), 50_000


def _deviation(**parameters: Any) -> tuple[str, ...]:
    return tuple(f"deviation.{name}={value}" for name, value in parameters.items())


# By the reading, and what differs from the default.
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
    keys = ("success", "score", "transmission_rate", "true_skip_ratio", "action_change_loss", "gate_efficiency")
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
            "random": random["score"], "difference": tested["adahi", "random"],
            "transmission_rate": adahi["transmission_rate"],
            "true_skip_ratio": [adahi["true_skip_ratio"], random["true_skip_ratio"]],
            "action_change_loss": [adahi["action_change_loss"], random["action_change_loss"]],
            "held_out_rate": summary["calibration"]["deviation"]["held_out_rate"],
        }
    }  # fmt: skip


def chunks(folder: Path, run: Run) -> Any:
    """The learned gate of a chunk pair beside random at its rate, and what its scores predict on demonstrations.

    The rank correlation of the scores of this gate and of the deviation is with the distance of the target's actions
    from the drafted ones.
    """
    path = folder / "pair"
    if not path.exists():
        make_pair(path, "pusht#draft", "pusht-flow", PairSettings(execute=4, env="pusht"))
    pair = load_pair(path)
    if not (path / HEAD).is_file():
        recipe = replace(DISTANCE, steps=20) if run.quick else DISTANCE
        train_head(pair, recipe, collector(60 if run.quick else 3000, run.pool, run.update), path / "gate", run.update)
        shutil.rmtree(path / "gate")
    recipe_file = ROOT / "recipes" / "flow-pusht.toml"
    _, held_out = Demonstrations(run.needed("the demonstrations of PushT"), recipe_file).split(pair)
    along = {
        gate: calibrate_offline(
            pair, gate_settings(gate, pair), RATE, held_out, run.pool, run.update, seed=run.seed
        ).model
        for gate in ("learned", "deviation")
    }
    methods = ("draft", "hybrid", "random_learned", "learned")
    what = Evaluation(str(path), None, methods, 100, run.seed, RATE, calibration_episodes=10)
    summary = evaluated(what, folder / "eval", run, None)
    keys = ("success", "score", "transmission_rate", "action_change_loss", "cost")
    return {
        "along demonstrations": along, "demonstrations": len(held_out),
        **{name: summary[name] for name in ("episodes", "seed", "rate", "contrasts")},
        "methods": {name: {key: row[key] for key in keys} for name, row in summary["methods"].items()},
    }  # fmt: skip


def merge(results: Results, found: Finished) -> Results:
    """``gates.json`` and ``readings.json``, rows by bundle; ``chunk_gate.json``."""
    kept = dict(results)
    for name, values in found.items():
        group, _, which = name.partition("/")
        if group == "chunks":
            kept["chunk_gate"] = values
        else:
            bundle = which.partition("/")[0]
            of_group = kept.get(group, {})
            kept[group] = of_group | {bundle: of_group.get(bundle, {}) | values}
    return kept


def pages(results: Results) -> Iterator[Part | Picture]:
    """gates.md and readings.md; docs/gates.md quotes them, and chunk_gate.json."""
    yield Part(HERE / "gates.md", "", gates_page(results["gates"]))
    yield Part(HERE / "readings.md", "", readings_page(results["readings"]))


def gates_page(results: Mapping[str, Any]) -> str:
    """One table per pair, the family of its tests."""
    parts = []
    for pair, rows in sorted(results.items()):
        first = next(iter(rows.values()))
        tested = {name: row["against_random"] for name, row in rows.items() if row["against_random"] is not None}
        corrected = dict(zip(tested, holm([against["p"] for against in tested.values()]), strict=True))
        heads = (
            "gate", "sent", "gate efficiency", "true skip", "action change", "score [95 %]",
            "against random [95 %], p",
        )  # fmt: skip
        table = [
            [
                name, f"{row['transmission_rate']:.3f}", optional_text(row["gate_efficiency"], 2),
                optional_text(row["true_skip_ratio"]), optional_text(row["action_change_loss"]),
                interval_text(row["score"], 3),
                f"{interval_text(tested[name], 3, '+')}, p = {corrected[name]:.2g}" if name in tested else "-",
            ]
            for name, row in rows.items()
        ]  # fmt: skip
        parts += [
            f"### {pair}, {first['episodes']} paired episodes, seed {first['seed']}, calibrated for a rate of {RATE}\n",
            f"{markdown(heads, table)}\n",
            f"p after Holm's correction over the {len(tested)} gates of this table.\n",
        ]
    return "\n".join(parts)


def readings_page(results: Mapping[str, Any]) -> str:
    """One table per environment, the family of its tests."""
    parts = []
    heads = ("reading", "ADAHI", "random", "difference [95 %], p", "sent", "true skip", "action change")
    for bundle, rows in sorted(results.items()):
        first = next(iter(rows.values()))
        corrected = holm([row["difference"]["p"] for row in rows.values()])
        table = [
            [
                name, f"{row['adahi']['mean']:.3f}", f"{row['random']['mean']:.3f}",
                f"{interval_text(row['difference'], 3, '+')}, p = {p:.2g}", f"{row['transmission_rate']:.3f}",
                *(f"{ours:.3f} / {chance:.3f}" for ours, chance in (row["true_skip_ratio"], row["action_change_loss"])),
            ]
            for (name, row), p in zip(rows.items(), corrected, strict=True)
        ]  # fmt: skip
        parts += [
            f"### {bundle}, {first['episodes']} paired episodes, seed {first['seed']}\n",
            f"{markdown(heads, table)}\n",
            f"p after Holm's correction over the {len(rows)} readings of this table.\n",
        ]
    return "\n".join(parts)


EXPERIMENT = Experiment(
    "gates at equal rate, and readings of the deviation (docs/gates.md)", plan, merge, pages, HERE / "results"
)
