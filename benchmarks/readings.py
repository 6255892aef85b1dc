"""The readings of the action deviation that the paper leaves open, in closed loop: ADAHI against random at equal rate.

Run: python benchmarks/readings.py [BUNDLE ...]

This is where the bundles' recommended readings come from, so it uses another seed (0) than the study (1).
Run folders go to runs/readings and resume; the summaries are kept in benchmarks/results/readings.json, and
benchmarks/results/readings.md is written from that.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from study import RESULTS, ROOT

from specact.cli.output import progress_bars
from specact.gates.settings import GateChoices
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.run import evaluate
from specact.lab.rollout.pool import Pool
from specact.lab.statistics import holm

CHOICES = {
    "euclidean": GateChoices(reading="euclidean", max_skips="unlimited"),
    "path_ratio": GateChoices(reading="path_ratio", max_skips="unlimited"),
    "disparity": GateChoices(reading="disparity", max_skips="unlimited"),
    "zscore": GateChoices(reading="zscore", max_skips="unlimited"),
    "jump": GateChoices(reading="jump", max_skips="unlimited"),
    "euclidean, at most 2 skips": GateChoices(reading="euclidean", max_skips=2),
    "disparity, at most 2 skips": GateChoices(reading="disparity", max_skips=2),
    "euclidean, at most 4 skips": GateChoices(reading="euclidean", max_skips=4),
    "disparity, at most 4 skips": GateChoices(reading="disparity", max_skips=4),
    "zscore, at most 4 skips": GateChoices(reading="zscore", max_skips=4),
}
EPISODES = {"ball": 500, "swarm": 500, "pusht": 200, "kitchen": 100}
CALIBRATION = {"ball": 200, "swarm": 100, "pusht": 60, "kitchen": 16}


def main() -> None:
    kept = RESULTS / "readings.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for bundle in sys.argv[1:] or EPISODES:
        for name, choices in CHOICES.items():
            what = Evaluation(
                bundle=bundle, env=None, methods=("adahi", "random"), episodes=EPISODES[bundle], gates=choices,
                calibration_episodes=CALIBRATION[bundle],
            )  # fmt: skip
            folder = ROOT / "runs" / "readings" / f"{bundle}-{name.replace(', ', '-').replace(' ', '-')}"
            with Pool() as pool, progress_bars() as update:
                summary = evaluate(what, folder, update, pool, command=f"python benchmarks/readings.py {bundle}")
            results.setdefault(bundle, {})[name] = row_of(summary)
            kept.write_text(json.dumps(results, indent=2) + "\n")
    text = markdown(results)
    (RESULTS / "readings.md").write_text(text)
    print(text)


def row_of(summary: dict[str, Any]) -> dict[str, Any]:
    """The part of an evaluation's summary in the table."""
    methods = summary["methods"]
    pairs = {(row["first"], row["second"]): row["score"] for row in summary["contrasts"]}
    return {
        "episodes": summary["episodes"],
        "seed": summary["seed"],
        "adahi": methods["adahi"]["score"],
        "random": methods["random"]["score"],
        "difference": pairs["adahi", "random"],
        "transmission_rate": methods["adahi"]["transmission_rate"],
        "true_skip_ratio": [methods[name]["true_skip_ratio"] for name in ("adahi", "random")],
        "action_change_loss": [methods[name]["action_change_loss"] for name in ("adahi", "random")],
        "held_out_rate": summary["calibration"]["deviation"]["held_out_rate"],
    }


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """One table per environment, the family of its tests."""
    parts = []
    for bundle, rows in sorted(results.items()):
        first = next(iter(rows.values()))
        parts += [
            f"### {bundle}, {first['episodes']} paired episodes, seed {first['seed']}",
            "",
            "| reading | ADAHI | random | difference [95 %], p | sent | true skip | action change |",
            "|---|---|---|---|---|---|---|",
        ]
        corrected = holm([row["difference"]["p"] for row in rows.values()])
        for (name, row), p in zip(rows.items(), corrected, strict=True):
            d = row["difference"]
            pairs = (f"{a:.3f} / {b:.3f}" for a, b in (row["true_skip_ratio"], row["action_change_loss"]))
            parts.append(
                f"| {name} | {row['adahi']['mean']:.3f} | {row['random']['mean']:.3f} | {d['difference']:+.3f} "
                f"[{d['low']:+.3f}, {d['high']:+.3f}], p = {p:.2g} | {row['transmission_rate']:.3f} "
                f"| {' | '.join(pairs)} |"
            )
        parts += ["", f"p after Holm's correction over the {len(rows)} readings of this table.", ""]
    return "\n".join(parts)


if __name__ == "__main__":
    main()
