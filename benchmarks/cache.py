"""FreqCache on our flow policy with two cameras: the tables and the picture of docs/freqcache.md.

Run: MUJOCO_GL=egl specact reproduce cache --out STUDY, then python benchmarks/cache.py STUDY
A policy trained on smaller frames: MUJOCO_GL=egl python benchmarks/cache.py STUDY --smaller OUT --data DATA; two hours
of one core, and it resumes after a stop.

Keeps the summaries in benchmarks/results/cache.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pages import fill

from specact.families.load import load_pair
from specact.lab.evaluation.cache_study import fastest
from specact.lab.evaluation.flow_study import relative_costs, target_observations
from specact.lab.evaluation.run import read_table
from specact.lab.report.cache import draw_cache, methods_table, report_markdown
from specact.lab.report.drawing import style
from specact.lab.report.tables import relative_text
from specact.lab.statistics import contrast, holm
from specact.rng import Role, stream

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "freqcache.md"
KEPT = Path(__file__).parent / "results" / "cache.json"
# The policy itself, and the same recipe at 48 pixels: as many tokens as FreqCache computes again, for nothing more.
WHOLE, SMALLER = "metaworld-flow", "metaworld-flow-48"
COMPARED = {WHOLE: ("full", "freqcache"), SMALLER: ("full",)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("study", type=Path)
    parser.add_argument("--smaller", type=Path)
    parser.add_argument("--data", type=Path, default=Path())
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for folder in sorted(given.study.iterdir()) if given.study.is_dir() else ():
        if (folder / "reuse.json").exists() and (folder / "summary.json").exists():
            summary, reuse = (json.loads((folder / name).read_text()) for name in ("summary.json", "reuse.json"))
            parts = ("env", "bundle", "episodes", "seed", "methods", "contrasts")
            kept[folder.name] = {"summary": {part: summary[part] for part in parts}, "reuse": reuse}
    if given.smaller is not None:
        kept["smaller"] = smaller(given.smaller, given.data)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    fill(PAGE, "methods", methods_table())
    fill(PAGE, "smaller", smaller_table(kept["smaller"]) if "smaller" in kept else "Not run yet.")
    for name, found in kept.items():
        if name == "smaller":
            continue
        fill(PAGE, name, "\n".join(report_markdown(found["summary"], found["reuse"])))
        with style():
            figure = draw_cache(found["summary"], found["reuse"])
            figure.savefig(PAGE.parent / f"freqcache-{found['summary']['env']}.png", dpi=110)


def smaller(out: Path, data: Path) -> dict[str, Any]:
    """The same recipe trained on smaller frames, beside the policy itself: success and the time of an inference."""
    recipe = ROOT / "recipes" / f"{SMALLER}.toml"
    specact("train", recipe, "--data", data, "--out", out / "trained")
    bundles = {WHOLE: WHOLE, SMALLER: str(out / "trained" / "bundles" / SMALLER)}
    methods: dict[str, Any] = {}
    won: dict[str, Any] = {}
    for name, bundle in bundles.items():
        specact(
            "eval", "--bundle", bundle, "--methods", ",".join(COMPARED[name]), "--episodes", 200, "--seed", 1,
            "--shard", 10, "--out", out / name,
        )  # fmt: skip
        summary = json.loads((out / name / "summary.json").read_text())
        for method in COMPARED[name]:
            methods[f"{name} {method}"] = summary["methods"][method]["success"]
            won[f"{name} {method}"] = read_table(out / name / "episodes" / method)["success"].astype(float)
    pairs = [(f"{SMALLER} full", f"{WHOLE} {method}") for method in COMPARED[WHOLE]]
    found = [contrast(won[first], won[second]) for first, second in pairs]
    return {
        "episodes": 200,
        "seed": 1,
        "success": methods,
        "contrasts": [
            {"first": first, "second": second, "p_holm": p, **asdict(one)}
            for (first, second), one, p in zip(pairs, found, holm([one.p for one in found]), strict=True)
        ],
        "costs": costs({name: load_pair(bundle) for name, bundle in bundles.items()}),
    }


def costs(pairs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Tokens of the prefix, and what encoder, prefix and ten steps take on the same observations, in turns."""
    first = pairs[WHOLE]
    seen = [window for path in target_observations(first, first.env, 4, 1) for window in path]
    spent: dict[str, list[float]] = {name: [] for name in pairs}
    tokens: dict[str, int] = {}
    for window in seen:
        for name, pair in pairs.items():
            windows, noise = (
                [pair.policy.spec.observation.select(window)],
                pair.policy.noise(stream(1, Role.GATE))[None],
            )

            def inference(networks: Any = pair.policy.networks, windows: Any = windows, noise: Any = noise) -> None:
                cache = networks.cache(windows, networks.tokens(windows))
                for step in range(10):
                    networks.velocity(noise, np.full(1, step / 10, np.float32), cache)

            spent[name].append(fastest(inference))
            tokens[name] = pair.policy.networks.tokens(windows).shape[1]
    return {name: {"tokens": tokens[name], **cost} for name, cost in relative_costs(spent, spent[WHOLE]).items()}


def smaller_table(found: dict[str, Any]) -> str:
    lines = [
        "| policy | tokens | method | success | inference, ms | of `full` at 64 pixels |",
        "|---|---|---|---|---|---|",
    ]
    for called, success in found["success"].items():
        name, method = called.split(" ")
        cost = found["costs"][name]
        times = f"{cost['ms']:.2f} | {relative_text(cost)}" if method == "full" else " | "
        lines.append(
            f"| {name} | {cost['tokens']} | `{method}` | {success['rate']:.3f} "
            f"[{success['low']:.3f}, {success['high']:.3f}] | {times} |"
        )
    lines += ["", "| | difference of success | p (Holm) |", "|---|---|---|"]
    for one in found["contrasts"]:
        at = one["difference"]
        lines.append(
            f"| {one['first']} - {one['second']} | {at['mean']:+.3f} [{at['low']:+.3f}, {at['high']:+.3f}] | "
            f"{one['p_holm']:.2g} |"
        )
    return "\n".join(lines)


def specact(*words: object) -> None:
    """A command, as a user would type it."""
    subprocess.run(["specact", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
