"""What it costs to look through cameras, and how often the scripted experts of metaworld succeed.

Run: MUJOCO_GL=egl python benchmarks/suite.py [rendering] [experts]

``rendering`` is processor time of a control step with and without frames, drawn by software on one core. ``experts``
records 50 episodes of each task without frames, in runs/metaworld, and resumes. The summary is kept in
benchmarks/results/metaworld.json, and the tables of docs/metaworld.md are written from it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess

os.environ["LP_NUM_THREADS"] = "0"  # before Mesa starts: it draws in the thread that asks

import time
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from pages import fill

from specact.lab.envs import load_task
from specact.observation import Field

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metaworld.md"
KEPT = Path(__file__).parent / "results" / "metaworld.json"
SIZES = (64, 96)
ENVS = {"metaworld": ("image.corner2", "image.gripper"), "kitchen": ("image.scene",)}
STEPS = 60
EPISODES = 50
NOISE = (0.0, 0.4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["rendering", "experts"], choices=["rendering", "experts"])
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in parser.parse_args().what:
        kept[name] = rendering() if name == "rendering" else experts()
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        fill(PAGE, name, rendering_table(kept[name]) if name == "rendering" else experts_table(kept[name]))


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
        out = ROOT / "runs" / "metaworld" / f"experts-{round(100 * noise)}"
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


if __name__ == "__main__":
    main()
