"""FLASH on our flow policies: the tables and pictures of docs/flash.md.

Run: MUJOCO_GL=egl specact reproduce flow --out STUDY, then python benchmarks/flow.py STUDY
FLASH's verdicts shuffled between its rounds: python benchmarks/flow.py STUDY --shuffled OUT
Other training seeds of PushT's flow and block: python benchmarks/flow.py STUDY --seeds OUT --data DEMONSTRATIONS; an
hour of one core, and it goes on after a stop.

Keeps the summaries in benchmarks/results/flow.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from pages import fill

from specact.lab.report.drawing import style
from specact.lab.report.flow import draw_flow, methods_table, report_markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "flash.md"
KEPT = Path(__file__).parent / "results" / "flow.json"
SEEDS, METHODS = (1, 2), ("full", "full_2", "full_1", "flash", "flash_fitted", "unchecked")
PARTS = ("env", "bundle", "episodes", "seed", "methods", "contrasts")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("study", type=Path)
    parser.add_argument("--seeds", type=Path)
    parser.add_argument("--shuffled", type=Path)
    parser.add_argument("--data", type=Path, default=Path())
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for folder in sorted(given.study.iterdir()):
        if (folder / "rounds.json").exists() and (folder / "summary.json").exists():
            rounds = json.loads((folder / "rounds.json").read_text())
            kept[folder.name] = {"summary": read(folder), "rounds": rounds}
    if given.seeds is not None:
        kept["seeds"] = {str(seed): trained(seed, given.seeds, given.data) for seed in SEEDS}
    if given.shuffled is not None:
        kept["shuffled"] = {
            bundle: shuffled(bundle, given.shuffled / bundle) for bundle in ("pusht-flow", "metaworld-flow")
        }
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    fill(PAGE, "shuffled", shuffled_table(kept["shuffled"]) if "shuffled" in kept else "Not run yet.")
    fill(PAGE, "rounds", methods_table())
    fill(PAGE, "seeds", seeds_table(kept))
    for name, found in kept.items():
        if name not in ("seeds", "shuffled"):
            fill(PAGE, name, "\n".join(report_markdown(found["summary"], found["rounds"])))
            with style():
                figure = draw_flow(found["summary"], found["rounds"])
                figure.savefig(PAGE.parent / f"flash-{found['summary']['env']}.png", dpi=110)


def read(folder: Path) -> dict[str, Any]:
    """The published part of a run's summary."""
    summary = json.loads((folder / "summary.json").read_text())
    return {part: summary[part] for part in PARTS}


def trained(seed: int, out: Path, data: Path) -> dict[str, Any]:
    """Trains PushT's flow and its block with another seed, and evaluates them on the study's episodes."""
    out.mkdir(parents=True, exist_ok=True)
    flow, block = out / f"flow-{seed}.toml", out / f"flash-{seed}.toml"
    recipe = (ROOT / "recipes" / "flow-pusht.toml").read_text().replace("pusht-flow", f"pusht-flow-{seed}")
    flow.write_text(f"{recipe}seed = {seed}\n")
    specact("train", flow, "--data", data, "--out", out / f"flow-{seed}")
    bundle = out / f"flow-{seed}" / "bundles" / f"pusht-flow-{seed}"
    if not (bundle / "flash").exists():
        block.write_text(
            f'kind = "flash"\nbundle = "pusht-flash-{seed}"\ntarget = "{bundle}"\nexecute = 8\nseed = {seed}\n'
        )
        specact("train", block, "--data", data, "--out", out / f"flash-{seed}")
        shutil.copytree(out / f"flash-{seed}" / "bundles" / f"pusht-flash-{seed}", bundle / "flash")
    run = out / f"run-{seed}"
    specact("eval", "--bundle", bundle, "--methods", ",".join(METHODS), "--episodes", 200, "--seed", 1, "--out", run)
    return read(run)


def shuffled(bundle: str, run: Path) -> dict[str, Any]:
    """Evaluates FLASH and its control with shuffled accepted lengths, on the study's episodes."""
    methods = ("full", "full_2", "flash", "flash_shuffled", "flash_fitted", "flash_fitted_shuffled")
    shard = 10 if bundle == "metaworld-flow" else 20
    specact(
        "eval", "--bundle", bundle, "--methods", ",".join(methods), "--episodes", 200, "--seed", 1, "--shard", shard,
        "--out", run,
    )  # fmt: skip
    return read(run)


def shuffled_table(found: dict[str, Any]) -> str:
    lines = ["| policy | method | success | full rounds | actions accepted in a check |", "|---|---|---|---|---|"]
    for bundle, run in found.items():
        for name, method in run["methods"].items():
            won = method["success"]
            accepted = "" if method.get("accepted") is None else f"{method['accepted']:.2f}"
            lines.append(
                f"| {bundle} | `{name}` | {won['rate']:.3f} [{won['low']:.3f}, {won['high']:.3f}] | "
                f"{method['full']:.2f} | {accepted} |"
            )
    lines += ["", "| policy | | difference of success | p (Holm) |", "|---|---|---|---|"]
    for bundle, run in found.items():
        for one in run["contrasts"]:
            if one["second"].endswith("shuffled"):
                at = one["success"]
                lines.append(
                    f"| {bundle} | `{one['first']}` - `{one['second']}` | {at['difference']:+.3f} [{at['low']:+.3f}, "
                    f"{at['high']:+.3f}] | {at['p_holm']:.2g} |"
                )
    return "\n".join(lines)


def specact(*words: object) -> None:
    """Runs a command of specact."""
    subprocess.run(["specact", *map(str, words)], check=True)


def seeds_table(kept: dict[str, Any]) -> str:
    """Success of the training seeds side by side."""
    runs = {"0": kept["pusht-flow"]["summary"], **kept.get("seeds", {})}
    rows = ["| method | " + " | ".join(f"seed {seed}" for seed in runs) + " |", "|---" * (1 + len(runs)) + "|"]
    for name in METHODS:
        found = [run["methods"][name]["success"] for run in runs.values()]
        rows.append(
            f"| `{name}` | " + " | ".join(f"{s['rate']:.2f} [{s['low']:.2f}, {s['high']:.2f}]" for s in found) + " |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
