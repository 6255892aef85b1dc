"""Every gate at the same rate: action deviations (reading, alpha, source), uncertainties, learned gates, oracles.

Run: python benchmarks/gates.py [BUNDLE ...]

A rate of 0.4, no limit on skips, seed 1, all methods on the same episodes; each run has random and the oracle besides,
which the gate efficiency is measured against. `regression` is the learned gate with a head that was trained to predict
the rejection probability itself instead of the target's distribution, see lab/train/head.py. Run folders go to
runs/gates and resume; the summaries are kept in benchmarks/results/gates.json, and benchmarks/results/gates.md is
written from that.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

from readings import EPISODES
from study import RESULTS, ROOT

from specact.cli.output import progress_bars
from specact.families.codes.bundle import load_bundle
from specact.families.head import HEAD
from specact.gates.settings import GateChoices
from specact.gates.uncertainty import Kind
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.run import evaluate
from specact.lab.rollout.distillation import collector
from specact.lab.rollout.pool import Pool
from specact.lab.statistics import holm
from specact.lab.train.head import HeadRecipe, train_head

RATE, SEED = 0.4, 1
LESSONS = 50_000
CALIBRATION = {"ball": 40, "swarm": 40, "pusht": 30, "kitchen": 4}
DEVIATIONS = {
    "deviation, euclidean": GateChoices(reading="euclidean"),
    "deviation, euclidean, alpha 0.2": GateChoices(reading="euclidean", alpha=0.2),
    "deviation, euclidean, alpha 0.8": GateChoices(reading="euclidean", alpha=0.8),
    "deviation, euclidean, of drafted actions": GateChoices(reading="euclidean", source="draft"),
    "deviation, path_ratio": GateChoices(reading="path_ratio"),
    "deviation, disparity": GateChoices(reading="disparity"),
    "deviation, zscore": GateChoices(reading="zscore"),
    "deviation, zscore, of drafted actions": GateChoices(reading="zscore", source="draft"),
    "deviation, jump": GateChoices(reading="jump"),
}
UNCERTAINTIES = {f"uncertainty, {kind}": GateChoices(uncertainty=kind) for kind in get_args(Kind)}


def main() -> None:
    kept = RESULTS / "gates.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for bundle in sys.argv[1:] or ("ball", "swarm"):
        for name, choices in DEVIATIONS.items():
            run(results, bundle, bundle, {name: "adahi"}, choices)
        for name, choices in UNCERTAINTIES.items():
            run(results, bundle, bundle, {name: "uncertainty"}, choices)
        own = {name: name for name in ("hybrid", "random", "learned", "learned_action", "oracle", "oracle_action")}
        run(results, bundle, bundle, own, GateChoices())
        run(results, bundle, str(regression(bundle)), {"regression": "learned"}, GateChoices())
        kept.write_text(json.dumps(results, indent=2) + "\n")
    text = markdown(results)
    (RESULTS / "gates.md").write_text(text)
    print(text)


def run(results: dict[str, dict[str, Any]], pair: str, bundle: str, rows: dict[str, str], choices: GateChoices) -> None:
    """Evaluates methods, given with the names of their rows, together with random and the oracle."""
    what = Evaluation(
        bundle=bundle, env=None, methods=tuple(dict.fromkeys((*rows.values(), "random", "oracle"))),
        episodes=EPISODES[pair], seed=SEED, rate=RATE, calibration_episodes=CALIBRATION[pair],
        gates=GateChoices(**vars(choices) | {"max_skips": "unlimited"}),
    )  # fmt: skip
    first = next(iter(rows))
    with Pool() as pool, progress_bars() as update:
        folder = ROOT / "runs" / "gates" / pair / first.replace(", ", "-").replace(" ", "-")
        summary = evaluate(what, folder, update, pool, command=f"python benchmarks/gates.py {pair}")
    contrasts = {(row["first"], row["second"]): row for row in summary["contrasts"]}
    for name, method in rows.items():
        found = summary["methods"][method]
        against = contrasts.get((method, "random"))
        results.setdefault(pair, {})[name] = {
            "episodes": summary["episodes"],
            "seed": summary["seed"],
            **{key: found[key] for key in ("success", "score", "transmission_rate", "true_skip_ratio")},
            **{key: found[key] for key in ("action_change_loss", "gate_efficiency")},
            "against_random": against and against["score"],
        }


def regression(pair: str) -> Path:
    """A copy of the pair whose head is the direct regression of the rejection probability."""
    path = ROOT / "runs" / "gates" / f"{pair}-regression"
    if (path / HEAD).is_file():
        return path
    shutil.copytree(
        load_bundle(pair).path, path, ignore=shutil.ignore_patterns(HEAD, "calibration"), dirs_exist_ok=True
    )
    bundle = load_bundle(path)
    with progress_bars() as update, Pool() as pool:
        train_head(bundle, HeadRecipe(objective="rejection"), collector(LESSONS, pool, update), path / "gate", update)
    shutil.rmtree(path / "gate")
    return path


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """One table per pair, the family of its tests."""
    parts = []
    for pair, rows in sorted(results.items()):
        first = next(iter(rows.values()))
        tested = {name: row["against_random"] for name, row in rows.items() if row["against_random"] is not None}
        corrected = dict(zip(tested, holm([against["p"] for against in tested.values()]), strict=True))
        parts += [
            f"### {pair}, {first['episodes']} paired episodes, seed {first['seed']}, calibrated for a rate of {RATE}",
            "",
            "| gate | sent | gate efficiency | true skip | action change | score [95 %] | against random [95 %], p |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, row in rows.items():
            score, against = row["score"], row["against_random"]
            cells = [
                name, f"{row['transmission_rate']:.3f}", _number(row["gate_efficiency"], 2),
                _number(row["true_skip_ratio"]), _number(row["action_change_loss"]),
                f"{score['mean']:.3f} [{score['low']:.3f}, {score['high']:.3f}]",
                "-" if against is None else
                f"{against['difference']:+.3f} [{against['low']:+.3f}, {against['high']:+.3f}], "
                f"p = {corrected[name]:.2g}",
            ]  # fmt: skip
            parts.append("| " + " | ".join(cells) + " |")
        parts += ["", f"p after Holm's correction over the {len(tested)} gates of this table.", ""]
    return "\n".join(parts)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
