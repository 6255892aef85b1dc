"""Spec-VLA, KERV and HeiSD on our token policies: the tables and pictures of docs/tokens.md.

Run: MUJOCO_GL=egl specact reproduce tokens --out STUDY, then python benchmarks/tokens.py STUDY
With a chunk policy on the same episodes (specact eval --bundle metaworld-flow --methods full_1,full_2 --episodes 200
--seed 1 --shard 10 --out FLOWS/metaworld-flow): ... STUDY --flows FLOWS

Keeps the summaries in benchmarks/results/tokens.json; a part that STUDY does not have stays as it was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pages import fill

from specact.families.chunks.bundle import load_flow
from specact.families.tokens.bundle import load_tokens
from specact.lab.report.drawing import style
from specact.lab.report.tokens import draw_tokens, methods_table, report_markdown
from specact.lab.statistics import contrast, holm, mean_interval, wilson

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tokens.md"
KEPT = Path(__file__).parent / "results" / "tokens.json"


TOKENS, FLOW = "metaworld-tokens", "metaworld-flow"
# Of a summary, what the tables need.
PARTS = ("env", "bundle", "episodes", "seed", "methods", "contrasts")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("study", type=Path)
    parser.add_argument("--flows", type=Path)
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for folder in sorted(path for path in given.study.iterdir() if path.is_dir()):
        found = kept.setdefault(folder.name, {})
        if (folder / "gain.json").exists():
            found["gain"] = json.loads((folder / "gain.json").read_text())
        if (folder / "summary.json").exists():
            summary = json.loads((folder / "summary.json").read_text())
            found["summary"] = {part: summary[part] for part in PARTS}
    if given.flows is not None:
        kept["one pass"] = one_pass(given.study / TOKENS, given.flows / FLOW)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    fill(PAGE, "decodings", methods_table())
    fill(PAGE, "one-pass", one_pass_table(kept["one pass"]) if "one pass" in kept else "Not run yet.")
    for name in kept.keys() - {"one pass"}:
        found = kept[name]
        fill(PAGE, name, "\n".join(report_markdown(found["summary"], found["gain"])))
        with style():
            draw_tokens(found["summary"]).savefig(PAGE.parent / f"tokens-{found['summary']['env']}.png", dpi=110)


def one_pass(tokens: Path, flows: Path) -> dict[str, Any]:
    """The control without decoding: a chunk policy of the same suite, on the common episodes."""
    runs = {name: successes(tokens, name) for name in ("ar", "specvla", "kerv", "heisd_fixed")}
    runs |= {f"flow, {steps} steps": successes(flows, f"full_{steps}") for steps in (1, 2)}
    both = sorted(set.intersection(*(set(run) for run in runs.values())))
    arrays = {name: np.array([run[episode] for episode in both], np.float64) for name, run in runs.items()}
    pairs = [(f"flow, {steps} steps", name) for steps in (1, 2) for name in arrays if not name.startswith("flow")]
    found = [contrast(arrays[first], arrays[second]) for first, second in pairs]
    return {
        "episodes": len(both),
        "success": {name: (int(array.sum()), len(array)) for name, array in arrays.items()},
        "contrasts": [
            {
                "first": first, "second": second, "p": p,
                **{key: getattr(one.difference, key) for key in ("low", "mean", "high")},
            }
            for (first, second), one, p in zip(pairs, found, holm([one.p for one in found]), strict=True)
        ],
        "time": times(),
    }  # fmt: skip


def successes(run: Path, method: str) -> dict[int, bool]:
    """Success by episode."""
    tables = [pq.read_table(file, columns=["episode", "success"]) for file in (run / "episodes" / method).iterdir()]
    return {episode: won for table in tables for episode, won in zip(*table.to_pydict().values(), strict=True)}


def times(rounds: int = 60) -> dict[str, tuple[float, float, float]]:
    """Time ratio of a flow inference to greedy decoding, alternating on an observation of zeros, with interval."""
    tokens, flow = load_tokens(TOKENS).policy(), load_flow(FLOW)
    rng, window = np.random.default_rng(0), tokens.spec.observation.zeros()
    works: dict[str, Callable[[], Any]] = {"ar": lambda: tokens.infer(window, rng)}
    for steps in (1, 2):
        policy = flow.policy(steps)
        works[f"flow, {steps} steps"] = lambda policy=policy: policy.infer(policy.spec.observation.zeros(), rng)
    spent: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            spent[name].append(time.perf_counter() - started)
    ratios = {name: np.log(taken) - np.log(spent["ar"]) for name, taken in spent.items()}
    intervals = {name: mean_interval(ratio[10:]) for name, ratio in ratios.items() if name != "ar"}
    return {name: tuple(np.exp([at.low, at.mean, at.high]).tolist()) for name, at in intervals.items()}


def one_pass_table(found: dict[str, Any]) -> str:
    lines = ["| | success | time of greedy decoding's |", "|---|---|---|"]
    for name, (k, n) in found["success"].items():
        won, took = wilson(k, n), found["time"].get(name)
        cell = "1" if name == "ar" else "see above" if took is None else f"{took[1]:.3f} [{took[0]:.3f}, {took[2]:.3f}]"
        lines.append(f"| `{name}` | {won.mean:.2f} [{won.low:.2f}, {won.high:.2f}] | {cell} |")
    lines += ["", "| | difference of success | p (Holm) |", "|---|---|---|"]
    for one in found["contrasts"]:
        lines.append(
            f"| `{one['first']}` - `{one['second']}` | {one['mean']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}] | "
            f"{one['p']:.2g} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
