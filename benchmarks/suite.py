"""What it costs to look through cameras, how often metaworld's experts succeed, and how often the policies do.

Run: MUJOCO_GL=egl python benchmarks/suite.py [rendering] [experts]
     MUJOCO_GL=egl python benchmarks/suite.py policies|gates|seeds|curve|replanning --pairs PAIR ...

``rendering`` is processor time of a control step with and without frames, drawn by software on one core. ``experts``
records 50 episodes of each task without frames. ``policies`` evaluates pairs on 20 episodes of each task, the same for
all of them, and again on 5 of each with every camera blank; ``gates`` compares every gate of pairs whose bundles have
a learned gate's head (``specact calibrate --gate learned``); ``seeds`` puts together such evaluations of one recipe's
pairs, trained with several seeds; ``curve`` evaluates the bundles that one training of a flow policy made on its way
(``snapshots``), and the last one; ``replanning`` evaluates policies with fewer actions of a chunk executed. The runs
lie in runs/metaworld, and resume. The summary is kept in benchmarks/results/metaworld.json, and the tables of
docs/metaworld.md are written from it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess

os.environ["LP_NUM_THREADS"] = "0"  # before Mesa starts: it draws in the thread that asks

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import pyarrow.parquet as pq
from pages import fill

from specact.families.chunks.bundle import load_flow
from specact.families.chunks.folder import PairSettings, make_pair
from specact.lab.envs import load_task
from specact.lab.statistics import contrast, holm, seeds_interval
from specact.observation import Field

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metaworld.md"
KEPT = Path(__file__).parent / "results" / "metaworld.json"
SIZES = (64, 96)
ENVS = {"metaworld": ("image.corner2", "image.gripper"), "kitchen": ("image.scene",)}
STEPS = 60
EPISODES = 50
NOISE = (0.0, 0.4)
RUNS = ROOT / "runs" / "metaworld"
# Episodes of the evaluation: none of the demonstrations and calibrations begins like one of them.
SEED, EACH, BLANKED, RATE = 1, 20, 5, 0.4
# Actions executed of a chunk, and the seed of the episodes that one of them is selected on.
EXECUTED, CHOSEN_SEED = (4, 2, 1), 2
# Hybrid is the target, asked at every inference.
METHODS = ("draft", "random", "adahi", "hybrid")
TARGET = "target_on_device"
GATED = ("draft", "head_draft", "random", "adahi", "uncertainty", "random_learned", "learned", "hybrid")
GATE_CONTRASTS = (
    ("adahi", "random"), ("uncertainty", "random_learned"), ("learned", "random_learned"), ("learned", "adahi"),
    ("learned", "head_draft"), ("head_draft", "draft"), ("hybrid", "learned"),
)  # fmt: skip


class Blank(gym.ObservationWrapper[dict[str, Any], Any, dict[str, Any]]):
    """A world in which every camera shows black."""

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {name: np.zeros_like(seen) if name.startswith("image.") else seen for name, seen in observation.items()}


def make_blank(**options: Any) -> Blank:
    return Blank(load_task("metaworld").make(**options))


# What ``specact eval --env suite:BLANK`` loads.
BLANK = replace(load_task("metaworld"), name="metaworld-blank", make=make_blank)


def main() -> None:
    parts = {
        "rendering": (rendering, rendering_table), "experts": (experts, experts_table),
        "policies": (policies, policies_table), "gates": (gates, gates_table), "seeds": (seeds, seeds_table),
        "curve": (curve, curve_table), "replanning": (replanning, replanning_table),
    }  # fmt: skip
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["rendering", "experts"], choices=list(parts))
    parser.add_argument("--pairs", nargs="*", default=[], help="of policies: names or folders of pairs")
    asked = parser.parse_args()
    of_pairs = [name for name in asked.what if name in ("policies", "gates", "seeds", "curve", "replanning")]
    if of_pairs and not asked.pairs:
        parser.error(f"{' and '.join(of_pairs)}: name the policies with --pairs")
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in asked.what:
        measure, table = parts[name]
        if name == "policies":
            kept[name] = kept.get(name, {}) | policies(asked.pairs)
        elif name in ("gates", "seeds", "curve", "replanning"):
            kept[name] = measure(asked.pairs)
        else:
            kept[name] = measure()
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        fill(PAGE, name, table(kept[name]))


def rendering() -> dict[str, Any]:
    """Medians over interleaved steps, so that what else the machine does falls on all ways."""
    ways = [
        (env, cameras, size)
        for env, every in ENVS.items()
        for cameras in ((), *((camera,) for camera in every), *((every,) if len(every) > 1 else ()))
        for size in (SIZES if cameras else (0,))
    ]
    worlds = []
    for env, cameras, size in ways:
        worlds.append(load_task(env).seeing({name: Field((size, size, 3), "uint8") for name in cameras}).make())
        worlds[-1].reset(seed=2)
    spent: list[list[float]] = [[] for _ in ways]
    for _ in range(STEPS):
        for world, times in zip(worlds, spent, strict=True):
            before = time.process_time()
            world.step(np.zeros(world.action_space.shape or (), np.float32))
            times.append(1e3 * (time.process_time() - before))
    for world in worlds:
        world.close()
    rows = [
        {"env": env, "cameras": list(cameras), "pixels": size, "ms": float(np.median(times))}
        for (env, cameras, size), times in zip(ways, spent, strict=True)
    ]
    return {"steps": STEPS, "mujoco": mujoco.__version__, "renderer": os.environ.get("MUJOCO_GL", ""), "rows": rows}


def rendering_table(kept: dict[str, Any]) -> str:
    lines = [
        "| environment | cameras | pixels | ms of a core for a control step | steps per second and core |",
        "|---|---|---|---|---|",
    ]
    rows = (
        f"| {row['env']} | {', '.join(row['cameras']) or 'none'} | {row['pixels'] or ''} | {row['ms']:.1f} | "
        f"{1e3 / row['ms']:.0f} |"
        for row in kept["rows"]
    )
    return "\n".join([*lines, *rows])


def experts() -> list[dict[str, Any]]:
    """What ``specact data generate`` counts, without noise and with."""
    counts = []
    for noise in NOISE:
        out = RUNS / f"experts-{round(100 * noise)}"
        words = ["--env", "metaworld", "--pixels", "0", "--noise", str(noise), "--episodes", str(EPISODES)]
        done = subprocess.run(
            ["specact", "data", "generate", *words, "--out", str(out), "--json"], check=True, stdout=subprocess.PIPE
        )
        counts.append({"noise": noise, **json.loads(done.stdout)})
        del counts[-1]["path"]
    return counts


def experts_table(kept: list[dict[str, Any]]) -> str:
    noises = " | ".join(f"noise {run['noise']:g}" for run in kept)
    lines = [f"| instruction | {noises} |", f"|---|{'---|' * len(kept)}"]
    for task in kept[0]["tasks"]:
        shares = (f"{run['tasks'][task]['kept']} of {run['tasks'][task]['tried']}" for run in kept)
        lines.append(f"| {task} | {' | '.join(shares)} |")
    totals = (f"{run['kept']} of {run['tried']}, {run['steps']} steps" for run in kept)
    return "\n".join([*lines, f"| all | {' | '.join(totals)} |"])


def policies(pairs: Sequence[str] = ()) -> dict[str, Any]:
    """By pair, what ``specact eval`` says of it, with its cameras and without."""
    found = {}
    for pair in pairs:
        name = Path(pair).name
        found[name] = {
            "seen": evaluated(pair, RUNS / f"{name}-seen", METHODS, EACH),
            "blank": evaluated(pair, RUNS / f"{name}-blank", ("draft", "hybrid"), BLANKED, "--env", "suite:BLANK"),
        }
    return found


def evaluated(
    pair: str, out: Path, methods: Sequence[str], each: int, *options: str, seed: int = SEED
) -> dict[str, Any]:
    words = [
        "--bundle", pair, "--methods", ",".join(methods), "--episodes", str(each * 10), "--seed", str(seed), "--rate",
        str(RATE), "--out", str(out), "--json", *options,
    ]  # fmt: skip
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "specact", "eval", *words],
        check=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    said: dict[str, Any] = json.loads(done.stdout)
    return {key: said[key] for key in ("methods", "contrasts", "episodes", "seed", "rate")}


def policies_table(kept: dict[str, Any]) -> str:
    """For every pair: success of each task and of all with its interval, and what was sent."""
    lines = []
    for name, runs in kept.items():
        seen, blank = runs["seen"]["methods"], runs["blank"]["methods"]
        shown = [method for method in METHODS if method in seen]
        lines += ["", f"`{name}`", "", f"| task | {' | '.join(shown)} |", f"|---|{'---|' * len(shown)}"]
        for task in seen[shown[0]]["tasks"]:
            of_task = (seen[method]["tasks"][task] for method in shown)
            rates = (f"{one['rate']:.2f} [{one['low']:.2f}, {one['high']:.2f}]" for one in of_task)
            lines.append(f"| {task} | {' | '.join(rates)} |")
        lines.append(f"| **all** | {' | '.join(interval(seen[method]['success']) for method in shown)} |")
        lines.append(f"| all, cameras blank | {' | '.join(blanked(blank.get(method)) for method in shown)} |")
        rows = {
            "transmission rate": "transmission_rate", "true skip ratio": "true_skip_ratio",
            "distance of the target's actions from the drafted ones": "distance",
        }  # fmt: skip
        for title, key in rows.items():
            if any(seen[method].get(key) is not None for method in shown):
                lines.append(f"| {title} | {' | '.join(number(seen[method].get(key)) for method in shown)} |")
        times = (f"{seen[method]['latency']['per_action_ms']:.1f}" for method in shown)
        lines.append(f"| ms an action | {' | '.join(times)} |")
    return "\n".join(lines[1:])


def gates(pairs: Sequence[str] = ()) -> dict[str, Any]:
    """By pair, every gate at one rate, with paired contrasts; p-values after Holm's correction over each pair's."""
    found = {}
    for pair in pairs:
        run = RUNS / f"{Path(pair).name}-gates"
        methods = evaluated(pair, run, GATED, EACH)["methods"]
        won = {method: successes(run, method) for method in GATED}
        contrasts = [contrast(won[first], won[second]) for first, second in GATE_CONTRASTS]
        found[Path(pair).name] = {
            "episodes": 10 * EACH,
            "methods": methods,
            "contrasts": [
                {"first": first, "second": second, "difference": asdict(one.difference), "p": p}
                for (first, second), one, p in zip(
                    GATE_CONTRASTS, contrasts, holm([one.p for one in contrasts]), strict=True
                )
            ],
        }
    return found


def gates_table(kept: dict[str, Any]) -> str:
    lines = []
    for name, pair in kept.items():
        lines += [
            "",
            f"`{name}`, {pair['episodes']} paired episodes:",
            "",
            "| method | success | transmission rate | true skip ratio | ms an action |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {method} | {interval(row['success'])} | {number(row['transmission_rate'])} | "
            f"{number(row.get('true_skip_ratio'))} | {row['latency']['per_action_ms']:.1f} |"
            for method, row in pair["methods"].items()
        ]
        lines += ["", "| | difference of success | p (Holm) |", "|---|---|---|"]
        for row in pair["contrasts"]:
            at = row["difference"]
            lines.append(
                f"| {row['first']} - {row['second']} | {at['mean']:+.3f} [{at['low']:+.3f}, {at['high']:+.3f}] | "
                f"{row['p']:.2g} |"
            )
    return "\n".join(lines[1:])


def seeds(pairs: Sequence[str] = ()) -> dict[str, Any]:
    """By method and contrast the success of each training seed, and of all with an interval over seeds and episodes."""
    runs = [RUNS / f"{Path(pair).name}-seen" for pair in pairs]
    for pair, run in zip(pairs, runs, strict=True):
        if not (run / "summary.json").exists():
            evaluated(pair, run, METHODS, EACH)
    told = [json.loads((run / "summary.json").read_text())["methods"] for run in runs]
    success = {method: [successes(run, method) for run in runs] for method in METHODS}
    contrasts = {
        f"{first} - {second}": [a - b for a, b in zip(success[first], success[second], strict=True)]
        for first, second in (("adahi", "random"), ("hybrid", "adahi"), ("hybrid", "draft"))
    }
    rows = {
        name: {"each": [float(one.mean()) for one in values], "all": asdict(seeds_interval(values))}
        for name, values in (success | contrasts).items()
    }
    keys = ("transmission_rate", "true_skip_ratio")
    more = {method: {key: [methods[method].get(key) for methods in told] for key in keys} for method in METHODS}
    for method in METHODS:
        more[method]["ms an action"] = [methods[method]["latency"]["per_action_ms"] for methods in told]
    return {"pairs": [Path(pair).name for pair in pairs], "episodes": 10 * EACH, "rows": rows, "more": more}


def curve(bundles: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Of every bundle, after how many steps it was made, and how often it succeeds with half of its chunk executed."""
    found, won = [], []
    for bundle in bundles:
        flow, (name, _, step) = load_flow(bundle), Path(bundle).name.rpartition("-")
        recipe, run = flow.manifest.recipe, RUNS / f"{Path(bundle).name}-curve"
        evaluated(alone(bundle, flow.spec.chunk // 2), run, (TARGET,), EACH)
        won.append(successes(run, TARGET))
        method = json.loads((run / "summary.json").read_text())["methods"][TARGET]
        steps = int(step) if name == recipe["bundle"] else recipe["steps"]
        found.append(
            {
                "bundle": Path(bundle).name,
                "steps": steps,
                "samples": steps * recipe["batch"],
                "episodes": len(won[-1]),
                "success": method["success"],
                "tasks": {task: told["rate"] for task, told in method["tasks"].items()},
            }
        )
    for row, before, after in zip(found[1:], won, won[1:], strict=False):
        row["gained"] = asdict(contrast(after, before).difference)
    return found


def curve_table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| bundle | steps | samples | success | more than the one before | tasks below .8 |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        weak = ", ".join(f"{task} {rate:.2f}" for task, rate in row["tasks"].items() if rate < 0.8)
        gained = row.get("gained")
        more = "" if gained is None else f"{gained['mean']:+.3f} [{gained['low']:+.3f}, {gained['high']:+.3f}]"
        lines.append(
            f"| `{row['bundle']}` | {row['steps']:,} | {row['samples']:,} | {interval(row['success'])} | "
            f"{more} | {weak} |"
        )
    return "\n".join(lines)


def replanning(bundles: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Of every policy, how often it succeeds with fewer actions of a chunk executed.

    The number is selected on other episodes than those that it is judged on.
    """
    found = []
    for bundle in bundles:
        name = Path(bundle).name
        tried = {
            number: evaluated(
                alone(bundle, number), RUNS / f"{name}-execute-{number}-chosen", (TARGET,), EACH // 2, seed=CHOSEN_SEED
            )["methods"][TARGET]["success"]
            for number in EXECUTED
        }
        best = max(EXECUTED, key=lambda number: tried[number]["rate"])
        runs = {number: RUNS / f"{name}-execute-{number}" for number in {EXECUTED[0], best}}
        judged = {
            number: evaluated(alone(bundle, number), run, (TARGET,), EACH)["methods"][TARGET]
            for number, run in runs.items()
        }
        won = {number: successes(run, TARGET) for number, run in runs.items()}
        found.append(
            {
                "policy": name,
                "tried": {str(number): success for number, success in tried.items()},
                "best": best,
                "judged": {
                    str(number): {
                        "success": method["success"],
                        "ms": method["latency"]["per_action_ms"],
                        "tasks": {task: told["rate"] for task, told in method["tasks"].items()},
                    }
                    for number, method in judged.items()
                },
                "gained": asdict(contrast(won[best], won[EXECUTED[0]])),
            }
        )
    return found


def replanning_table(found: list[dict[str, Any]]) -> str:
    """Success by the number of executed actions: on the episodes of the choice, and on the others."""
    first, ps = EXECUTED[0], holm([row["gained"]["p"] for row in found])
    lines = [
        f"| policy | {' | '.join(f'{number} executed, for the choice' for number in EXECUTED)} | {first} executed | "
        "the best choice | more | p (Holm) | tasks below .8 |",
        "|---" * (len(EXECUTED) + 6) + "|",
    ]
    for row, p in zip(found, ps, strict=True):
        best, gained = row["judged"][str(row["best"])], row["gained"]["difference"]
        weak = ", ".join(f"{task} {rate:.2f}" for task, rate in best["tasks"].items() if rate < 0.8)
        tried = " | ".join(f"{row['tried'][str(number)]['rate']:.2f}" for number in EXECUTED)
        lines.append(
            f"| `{row['policy']}` | {tried} | {interval(row['judged'][str(first)]['success'])} | {row['best']}: "
            f"{interval(best['success'])} | {gained['mean']:+.3f} [{gained['low']:+.3f}, {gained['high']:+.3f}] | "
            f"{p:.2g} | {weak} |"
        )
    return "\n".join(lines)


def alone(bundle: str, execute: int) -> str:
    """A pair of a policy with itself that executes so many actions of a chunk."""
    pair = RUNS / "pairs" / f"{Path(bundle).name}-{execute}"
    if not pair.exists():
        make_pair(pair, bundle, bundle, PairSettings(execute=execute))
    return str(pair)


def successes(run: Path, method: str) -> np.ndarray:
    """By episode, 0 and 1."""
    tables = [pq.read_table(file, columns=["episode", "success"]) for file in (run / "episodes" / method).iterdir()]
    found = {episode: won for table in tables for episode, won in zip(*table.to_pydict().values(), strict=True)}
    return np.array([found[episode] for episode in sorted(found)], np.float64)


def seeds_table(found: dict[str, Any]) -> str:
    lines = [
        f"| success | {' | '.join(f'`{name}`' for name in found['pairs'])} | over seeds and episodes |",
        "|---" * (2 + len(found["pairs"])) + "|",
    ]
    for name, row in found["rows"].items():
        sign, at = "+" if " - " in name else "", row["all"]
        each = " | ".join(f"{value:{sign}.3f}" for value in row["each"])
        lines.append(f"| {name} | {each} | {at['mean']:{sign}.3f} [{at['low']:{sign}.3f}, {at['high']:{sign}.3f}] |")
    for key in next(iter(found["more"].values())):
        for method in ("random", "adahi", "hybrid"):
            values = found["more"][method][key]
            if None not in values:
                each = " | ".join(f"{value:.2f}" for value in values)
                # Milliseconds of several runs on a shared machine have no mean, only their ratios do.
                mean = "" if key == "ms an action" else f"{np.mean(values):.2f}"
                lines.append(f"| {method}: {key.replace('_', ' ')} | {each} | {mean} |")
    for method in ("random", "adahi"):
        times = (found["more"][one]["ms an action"] for one in (method, "hybrid"))
        shares = [mine / whole for mine, whole in zip(*times, strict=True)]
        each = " | ".join(f"{share:.2f}" for share in shares)
        lines.append(f"| {method}: time an action, of hybrid's | {each} | {np.mean(shares):.2f} |")
    return "\n".join(lines)


def interval(success: dict[str, Any]) -> str:
    return f"**{success['rate']:.2f}** [{success['low']:.2f}, {success['high']:.2f}]"


def blanked(found: dict[str, Any] | None) -> str:
    """Success without cameras, and how much draft and target agree then."""
    if found is None:
        return ""
    accepted, distance = (found.get("acceptance") or {}).get("all"), found.get("distance")
    agreed = "" if accepted is None else f", {accepted:.2f} accepted"
    return interval(found["success"]) + agreed + ("" if distance is None else f", distance {distance:.2f}")


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
