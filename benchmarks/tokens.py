"""Spec-VLA, KERV and HeiSD on our token policies: the tables and pictures of docs/tokens.md.

Run: MUJOCO_GL=egl specact reproduce tokens --out STUDY, then python benchmarks/tokens.py STUDY
With other policies on the same episodes, a chunk policy (specact eval metaworld-flow --methods full_1,full_2
--episodes 200 --seed 1 --shard 10 --out OTHERS/metaworld-flow), a smaller one (specact eval --bundle
relocate-tokens-small --methods ar ... --out OTHERS/relocate-tokens-small), or one by regression (specact pair --draft
relocate-regression --target relocate-regression --env relocate --out PAIR; specact eval PAIR --methods
target_on_device ... --out OTHERS/relocate-regression): ... STUDY --others OTHERS

Keeps the summaries in benchmarks/results/tokens.json; a part that STUDY does not have stays as it was. Methods of the
same policy on the same episodes may come from several runs (specact eval NAME --methods ... --episodes 200
--seed 1 --shard 10 --out OTHER/NAME): ... STUDY OTHER. Contrasts and their correction are over all of them.
With gates before a decoding (specact eval metaworld-tokens --draft metaworld-draft --decoding specvla
--methods draft,hybrid,random,adahi,random_learned,learned ... --out GATED/metaworld-tokens): ... STUDY --gated GATED.
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

from specact.families.chunks.sources import load_policy
from specact.families.codes.bundle import find_bundle
from specact.families.tokens.decoding import DECODINGS
from specact.lab.evaluation.metrics import END_POINTS, contrasts
from specact.lab.evaluation.run import read_table
from specact.lab.report.drawing import style
from specact.lab.report.tables import contrast_table, success_text
from specact.lab.report.tokens import draw_tokens, methods_table, report_markdown
from specact.lab.rollout.methods import load_method
from specact.lab.statistics import contrast, holm, mean_interval, wilson

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tokens.md"
KEPT = Path(__file__).parent / "results" / "tokens.json"


FLOWS = {f"flow, {steps} steps": ("metaworld-flow", f"full_{steps}") for steps in (1, 2)}
# Policies that decodings are compared to: run folder and method, by label. And the decodings.
OTHERS = {"metaworld-tokens": FLOWS | {"one layer": ("metaworld-tokens-small", "ar")}} | {
    f"{name}-tokens": {
        "one layer": (f"{name}-tokens-small", "ar"),
        "regression": (f"{name}-regression", "target_on_device"),
    }
    for name in ("relocate", "kitchen")
}
RIVALS = {
    "metaworld-tokens": ("ar", "specvla", "kerv", "heisd_fixed"),
    "relocate-tokens": ("ar", "last", "specvla", "kerv", "last_fixed"),
    "kitchen-tokens": ("ar", "last", "specvla", "kerv", "last_fixed"),
}
# What runs have in common whose methods are compared.
SAME = ("env", "bundle", "episodes", "seed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("studies", type=Path, nargs="+")
    parser.add_argument("--others", type=Path)
    parser.add_argument("--gated", type=Path)
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for folder in (folder for study in given.studies for folder in sorted(study.iterdir()) if folder.is_dir()):
        found = kept.setdefault(folder.name, {})
        if (folder / "gain.json").exists():
            found["gain"] = json.loads((folder / "gain.json").read_text())
        if (folder / "summary.json").exists():
            found["summary"] = merge(found.get("summary", {}), summary_of(folder))
        if given.others is not None and can_compare(folder, given.others):
            found["others"] = compare_others(folder, given.others)
        if given.gated is not None and (given.gated / folder.name / "summary.json").exists():
            found["gated"] = summary_of(given.gated / folder.name)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    fill(PAGE, "decodings", methods_table())
    for name, found in kept.items():
        fill(PAGE, f"others {name}", others_table(found["others"]) if "others" in found else "Not run yet.")
        fill(PAGE, f"gated {name}", gated_table(found["gated"]) if "gated" in found else "Not run yet.")
        fill(PAGE, name, "\n".join(report_markdown(found["summary"], found["gain"])))
        with style():
            draw_tokens(found["summary"]).savefig(PAGE.parent / f"tokens-{found['summary']['env']}.png", dpi=110)


def summary_of(folder: Path) -> dict[str, Any]:
    """What the tables need of a run, with the outcome of every episode."""
    summary = json.loads((folder / "summary.json").read_text())
    outcomes = {
        method: {point: table[point].astype(float).tolist() for point in END_POINTS}
        for method, table in ((method, read_table(folder / "episodes" / method)) for method in summary["methods"])
    }
    return {part: summary[part] for part in (*SAME, "methods")} | {"outcomes": outcomes}


def merge(kept: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A summary with the methods of another one; without those of other episodes."""
    methods, outcomes = more["methods"], more["outcomes"]
    if kept and all(kept[part] == more[part] for part in SAME):
        lost = sorted(set(kept["methods"]) - set(methods)) if "outcomes" not in kept else []
        if lost:
            raise SystemExit(f"{more['bundle']}: the outcomes of {', '.join(lost)} were not kept; run these again, too")
        methods, outcomes = kept["methods"] | methods, kept.get("outcomes", {}) | outcomes
    order = [method for method in DECODINGS if method in methods]
    tables = {method: {point: np.array(values) for point, values in outcomes[method].items()} for method in order}
    return {part: more[part] for part in SAME} | {
        "methods": {method: methods[method] for method in order},
        "contrasts": contrasts(map(load_method, tables), tables),
        "outcomes": {method: outcomes[method] for method in order},
    }


def compare_others(tokens: Path, others: Path) -> dict[str, Any]:
    """Decodings beside policies that need none, or less of it: success on the common episodes, and the time."""
    policy = tokens.name
    runs = {name: successes(tokens, name) for name in RIVALS[policy]}
    runs |= {label: successes(others / name, method) for label, (name, method) in OTHERS[policy].items()}
    both = sorted(set.intersection(*(set(run) for run in runs.values())))
    arrays = {name: np.array([run[episode] for episode in both], np.float64) for name, run in runs.items()}
    pairs = [(label, name) for label in OTHERS[policy] for name in RIVALS[policy]]
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
        "time": times(policy, {label: bundle_of(others / name) for label, (name, _) in OTHERS[policy].items()}),
    }  # fmt: skip


def can_compare(tokens: Path, others: Path) -> bool:
    """Whether a run has the decodings that others are compared to, and there are runs of all the others."""
    rivals, runs = RIVALS.get(tokens.name, ()), OTHERS.get(tokens.name, {})
    has_rivals = bool(rivals) and all((tokens / "episodes" / name).is_dir() for name in rivals)
    return has_rivals and all((others / name / "summary.json").exists() for name, _ in runs.values())


def bundle_of(run: Path) -> str:
    """The policy that a run evaluated, as a name or a path: of a pair its target."""
    bundle = find_bundle(json.loads((run / "manifest.json").read_text())["evaluation"]["bundle"])
    manifest = json.loads((bundle / "manifest.json").read_text())
    return str(manifest["sources"]["target"] if manifest["kind"] == "chunks" else bundle)


def successes(run: Path, method: str) -> dict[int, bool]:
    """Success by episode."""
    tables = [pq.read_table(file, columns=["episode", "success"]) for file in (run / "episodes" / method).iterdir()]
    return {episode: won for table in tables for episode, won in zip(*table.to_pydict().values(), strict=True)}


def times(policy: str, others: dict[str, str], rounds: int = 60) -> dict[str, tuple[float, float, float]]:
    """Time ratios to greedy decoding, alternating on an observation of zeros, with intervals."""
    works = {"ar": inference(policy)} | {
        label: inference(bundle, int(label.split()[1]) if label in FLOWS else 10) for label, bundle in others.items()
    }
    spent: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            spent[name].append(time.perf_counter() - started)
    ratios = {name: np.log(taken) - np.log(spent["ar"]) for name, taken in spent.items()}
    intervals = {name: mean_interval(ratio[10:]) for name, ratio in ratios.items() if name != "ar"}
    return {name: tuple(np.exp([at.low, at.mean, at.high]).tolist()) for name, at in intervals.items()}


def inference(bundle: str, steps: int = 10) -> Callable[[], Any]:
    """An inference of a policy: of a flow in so many steps, of tokens by greedy decoding."""
    policy = load_policy(bundle, steps=steps).policy
    rng, window = np.random.default_rng(0), policy.spec.observation.zeros()
    return lambda: policy.infer(window, rng)


def gated_table(summary: dict[str, Any]) -> str:
    """Success and transmission rate of every gate before one decoding."""
    tables = {
        method: {point: np.array(values) for point, values in found.items()}
        for method, found in summary["outcomes"].items()
    }
    lines = ["| method | success | verified | passes per inference |", "|---|---|---|---|"]
    for name, metrics in summary["methods"].items():
        sent = metrics["transmission_rate"]
        lines.append(f"| `{name}` | {success_text(metrics)} | {sent:.2f} | {metrics['passes']:.2f} |")
    compared = contrast_table({"contrasts": contrasts(map(load_method, tables), tables)}, ("success",))
    return "\n".join(lines) + f"\n\n{compared}"


def others_table(found: dict[str, Any]) -> str:
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
