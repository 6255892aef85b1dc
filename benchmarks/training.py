"""The effect of precision and concurrent stages on training time.

Steps per second of CPU time of the target and the draft of a recipe, with products in bfloat16 and in float32; then the
time of a short training run with one and with two stages at a time. Variants take turns.

Run: python benchmarks/training.py [RECIPE] [--data FOLDER] [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from msgspec import structs

from specact.lab.train import loop
from specact.lab.train.codes import CodesTraining
from specact.lab.train.loop import Stage, run
from specact.lab.train.recipe import CodesRecipe, load_recipe
from specact.lab.train.train import train

ROUNDS, SECONDS_A_ROUND = 9, 0.4
EPISODES = 40
SHORT = {"tokenizer": 100, "target": 500, "draft": 3500}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path, nargs="?", default=Path("recipes/ball.toml"))
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--rounds", type=int, default=2, help="of whole runs; 0 for none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(options.recipe, CodesRecipe)
    recipe = structs.replace(
        recipe,
        generate_episodes=min(recipe.generate_episodes, EPISODES),
        tokenizer=structs.replace(recipe.tokenizer, steps=SHORT["tokenizer"]),
        policies={name: recipe.policies[name] for name in ("target", "draft")},
        bundles={},
    )
    print(f"{options.recipe.stem}, one thread for each stage, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    speeds(recipe, options.data)
    if options.rounds:
        wall(recipe, options.data, options.rounds)


def speeds(recipe: CodesRecipe, data: Path) -> None:
    """Prints steps per second of every variant and its ratio to the first of them."""
    loop._BFLOAT16_FROM, loop._BFLOAT16_ON = 0, ("",)  # so that the recipe decides
    with tempfile.TemporaryDirectory() as folder:
        work = CodesTraining(recipe, data)
        work.read(lambda *told: None)
        work.out = Path(folder)
        run(work.stage("tokenizer"), work.out, lambda done: None)
        for name, policy in recipe.policies.items():
            variants = {bfloat16: variant(work, name, bfloat16) for bfloat16 in (True, False)}
            steps = max(1, round(SECONDS_A_ROUND * rate(variants[True], 3)))
            rounds: dict[bool, list[float]] = {bfloat16: [] for bfloat16 in variants}
            for _ in range(ROUNDS):
                for bfloat16, stage in variants.items():
                    rounds[bfloat16].append(rate(stage, steps))
            first = np.array(rounds[True])
            for bfloat16, rates in rounds.items():
                print(
                    f"{name:8} width {policy.width:4}  {'bfloat16' if bfloat16 else 'float32 '}  "
                    f"{np.median(rates):7.1f} steps/s  "
                    f"{np.median(np.array(rates) / first):5.2f} times"
                )


def variant(work: CodesTraining, name: str, bfloat16: bool) -> Stage:
    """A policy's stage."""
    work, policies = copy(work), work.recipe.policies
    settings = structs.replace(policies[name], bfloat16=bfloat16)
    work.recipe = structs.replace(work.recipe, policies={**policies, name: settings})
    return replace(work.stage(name), validate=lambda module: {})


def rate(stage: Stage, steps: int) -> float:
    """Steps per second of this process's CPU time."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        settings = structs.replace(stage.settings, steps=steps)
        run(replace(stage, settings=settings), Path(folder), lambda done: None)
        return steps / (time.process_time() - started)


def wall(recipe: CodesRecipe, data: Path, rounds: int) -> None:
    """Prints the time of complete short runs, process start included."""
    policies = {name: structs.replace(policy, steps=SHORT[name]) for name, policy in recipe.policies.items()}
    short = structs.replace(recipe, policies=policies)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for jobs, times in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                train(short, data, Path(folder) / "run", lambda *told: None, jobs=jobs)
                times.append(time.perf_counter() - started)
    for jobs, times in seconds.items():
        ratio = np.median(np.array(times) / np.array(seconds[1]))
        print(f"{' + '.join(f'{steps} {name}' for name, steps in SHORT.items())} steps, {jobs} at a time: "
              f"{np.median(times):.1f} s, {ratio:.2f} of the time")  # fmt: skip


if __name__ == "__main__":
    main()
