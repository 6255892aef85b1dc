"""PushT through a camera beside PushT from its state: success and coverage on the same episodes.

Run: python benchmarks/cameras.py [--episodes N]

Evaluations go to runs/cameras and resume. The summary is kept in benchmarks/results/cameras.json, and the table of
docs/choices.md is written from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

from pages import fill

from specact.lab.evaluation.run import read_table
from specact.lab.statistics import contrast, holm

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "results" / "cameras.json"
RUNS = {"pusht": "draft,target", "pusht-camera": "draft,target", "pusht-camera-state": "draft,hybrid"}
# Of these bundles, draft and target see ...
SEES = {
    "pusht": ("state", "state"),
    "pusht-camera": ("frames, agent's position", "frames, agent's position"),
    "pusht-camera-state": ("state", "frames, agent's position"),
}
# Run and method against run and method, in mean coverage.
PAIRS = (
    ("pusht-camera", "target", "pusht", "target"),
    ("pusht-camera-state", "hybrid", "pusht", "target"),
    ("pusht-camera", "draft", "pusht", "draft"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", default="100")
    episodes: str = parser.parse_args().episodes
    summaries, scores = {}, {}
    for name, methods in RUNS.items():
        out = ROOT / "runs" / "cameras" / name
        if not (out / "summary.json").exists():
            given = ["--methods", methods, "--episodes", episodes, "--seed", "1", "--out", str(out)]
            subprocess.run(["specact", "eval", "--bundle", name, *given], check=True)
        summaries[name] = json.loads((out / "summary.json").read_text())
        scores |= {(name, method): read_table(out / "episodes" / method)["score"] for method in methods.split(",")}
    found = [contrast(scores[a, b].astype(float), scores[c, d].astype(float)) for a, b, c, d in PAIRS]
    kept = {
        "methods": {name: summary["methods"] for name, summary in summaries.items()},
        "episodes": int(episodes),
        "contrasts": [
            {"first": " ".join(pair[:2]), "second": " ".join(pair[2:]), "p_holm": p, **dataclasses.asdict(one)}
            for pair, one, p in zip(PAIRS, found, holm([one.p for one in found]), strict=True)
        ],
    }
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    fill(ROOT / "docs" / "choices.md", "cameras", table(kept))


def table(kept: dict[str, Any]) -> str:
    """Every method, and the contrasts in words."""
    lines = [
        "| pair | method | draft sees | target sees | largest coverage | success, above .85 | above .95 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, methods in kept["methods"].items():
        for method, m in methods.items():
            score, success, strict = m["score"], m["success"], m["success_at"]["0.95"]
            lines.append(
                f"| {name} | {method} | {SEES[name][0]} | {SEES[name][1]} | "
                f"{score['mean']:.3f} [{score['low']:.3f}, {score['high']:.3f}] | "
                f"{success['rate']:.2f} [{success['low']:.2f}, {success['high']:.2f}] | "
                f"{strict['rate']:.2f} [{strict['low']:.2f}, {strict['high']:.2f}] |"
            )
    said = [
        f"{row['first']} - {row['second']}: {row['difference']['mean']:+.3f} "
        f"[{row['difference']['low']:+.3f}, {row['difference']['high']:+.3f}], p = {row['p_holm']:.2g}"
        for row in kept["contrasts"]
    ]
    return "\n".join([*lines, "", f"Coverage, p after Holm's correction over these {len(said)}: {'; '.join(said)}."])


if __name__ == "__main__":
    main()
