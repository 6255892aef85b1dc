"""A target that is fed the scene of the simulator, before a draft that sees cameras: what a device never knows.

``--data`` is the folder of its demonstrations: ``specact data record --env metaworld --privileged --pixels 0 --noise
0.4 --episodes 150 --out DATA/metaworld-scene``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from experiments.grid import ROOT, Cell, Run, specact
from experiments.report import Table
from experiments.value.unknown import DEVICE, DRAFT, EPISODES, RATES, SUITE, pair_of, taught

BUNDLE = "metaworld-scene"
RECIPE = f"""kind = "regression"
bundle = "{BUNDLE}"
env = "{SUITE}"
data = ["{BUNDLE}"]
sees = ["state", "privileged.scene"]
instruction = true
skip_disturbed = true
window = 1
chunk = 8
layers = 3
width = 128
dropout = 0.0
batch = 128
steps = 5000
"""
METHODS = ("random", "adahi", "random_learned", "learned")
TABLE = partial(
    Table, "scene", f"{EPISODES} paired episodes of Meta-World by a draft of all ten tasks that sees cameras, before a "
    "target that is fed the scene; share of inferences that asked. `target_on_device` is the target alone, which no "
    "device can be.",
    "method | success | asked", "`{method}` | {success:ci2} | {sent:.2f?}",
)  # fmt: skip


def plan() -> Iterator[Cell]:
    """The target, and gates before it at each rate."""
    yield Cell("scene/target", train)
    yield from (Cell(f"scene/{rate}", partial(gates, rate)) for rate in RATES)


def train(folder: Path, run: Run) -> dict[str, Any]:
    """Trains the target."""
    data, recipe = run.needed("demonstrations with their scenes").resolve(), folder.resolve() / "recipe.toml"
    folder.mkdir(parents=True, exist_ok=True)
    recipe.write_text(RECIPE)
    specact("train", recipe, "--data", data, "--out", recipe.with_name("run"), folder=ROOT)
    return {"sees": "scene"}


def gates(rate: float, folder: Path, run: Run) -> dict[str, Any]:
    """Gates before the target at a rate; at the first one also what no rate changes."""
    run.result("scene/target")
    target = str(run.out / "scene/target/run/bundles" / BUNDLE)
    unrated = ("draft", DEVICE) if rate == RATES[0] else ()
    return taught(pair_of(DRAFT, target, folder, 10), (*unrated, *METHODS), rate, folder, run)
