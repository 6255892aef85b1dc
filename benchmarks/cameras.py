"""PushT with a camera and PushT with its state: success and coverage on the same episodes.

Run: python benchmarks/cameras.py [--episodes N]

Evaluations are written to runs/cameras and are resumable. The summary is written to benchmarks/results/cameras.json,
and the table of docs/choices.md from it.
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
# Observations of draft and target, by bundle.
SEES = {
    "pusht": ("state", "state"),
    "pusht-camera": ("frames, agent's position", "frames, agent's position"),
    "pusht-camera-state": ("state", "frames, agent's position"),
}
# Contrasts in mean coverage: run and method against run and method.
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
            options = ["--methods", methods, "--episodes", episodes, "--seed", "1", "--out", str(out)]
            subprocess.run(["specact", "eval", "--bundle", name, *options], check=True)
        summaries[name] = json.loads((out / "summary.json").read_text())
        scores |= {(name, method): read_table(out / "episodes" / method)["score"] for method in methods.split(",")}
    contrasts = [contrast(scores[a, b].astype(float), scores[c, d].astype(float)) for a, b, c, d in PAIRS]
    summary = {
        "methods": {name: summary["methods"] for name, summary in summaries.items()},
        "episodes": int(episodes),
        "contrasts": [
            {"first": " ".join(pair[:2]), "second": " ".join(pair[2:]), "p_holm": p, **dataclasses.asdict(one)}
            for pair, one, p in zip(PAIRS, contrasts, holm([one.p for one in contrasts]), strict=True)
        ],
    }
    KEPT.write_text(json.dumps(summary, indent=1) + "\n")
    fill(ROOT / "docs" / "choices.md", "cameras", table(summary))


def table(summary: dict[str, Any]) -> str:
    """The table of methods, and the contrasts as text."""
    lines = [
        "| pair | method | draft sees | target sees | largest coverage | success, above .85 | above .95 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, methods in summary["methods"].items():
        for method, m in methods.items():
            score, success, strict = m["score"], m["success"], m["success_at"]["0.95"]
            lines.append(
                f"| {name} | {method} | {SEES[name][0]} | {SEES[name][1]} | "
                f"{score['mean']:.3f} [{score['low']:.3f}, {score['high']:.3f}] | "
                f"{success['rate']:.2f} [{success['low']:.2f}, {success['high']:.2f}] | "
                f"{strict['rate']:.2f} [{strict['low']:.2f}, {strict['high']:.2f}] |"
            )
    texts = [
        f"{row['first']} - {row['second']}: {row['difference']['mean']:+.3f} "
        f"[{row['difference']['low']:+.3f}, {row['difference']['high']:+.3f}], p = {row['p_holm']:.2g}"
        for row in summary["contrasts"]
    ]
    return "\n".join([*lines, "", f"Coverage, p after Holm's correction over these {len(texts)}: {'; '.join(texts)}."])


if __name__ == "__main__":
    main()
