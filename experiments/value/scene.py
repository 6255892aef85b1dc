"""A target that is fed the simulator's scene, before a draft that sees cameras: what a device never knows.

``--data`` is the folder of its demonstrations: ``specact data record --env metaworld --privileged --pixels 0 --noise 0.4
--episodes 300 --out DATA/metaworld-scene``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.grid import ROOT, Cell, Run, specact
from experiments.measure import paired
from experiments.report import Report, Table, contrast_table, one_family, under
from experiments.value.unknown import DEVICE, DRAFT, EPISODES, RATES, SUITE, pair_of, succeeded, taught
from specact.lab.rollout.statistics import wilson

BUNDLE = "metaworld-scene"
# The target's recipe is that of the one with cameras, but for what it sees.
RECIPE = f"""kind = "flow"
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
batch = 256
steps = 9000
"""
GATES = {"adahi": "random", "learned": "random_learned"}  # with their controls
METHODS = (*GATES, *GATES.values())


def plan() -> Iterator[Cell]:
    """The target, what it does in one step, and gates before it at each rate."""
    yield Cell("scene/target", train)
    yield Cell("scene/one step", alone)
    yield from (Cell(f"scene/{rate}", partial(gates, rate)) for rate in RATES)


def train(folder: Path, run: Run) -> dict[str, Any]:
    """Trains the target."""
    data, recipe = run.needed("demonstrations with their scenes").resolve(), folder.resolve() / "recipe.toml"
    folder.mkdir(parents=True, exist_ok=True)
    recipe.write_text(RECIPE)
    specact("train", recipe, "--data", data, "--out", recipe.with_name("run"), folder=ROOT)
    return {"sees": "scene"}


def target(run: Run) -> str:
    """The path of its bundle."""
    run.result("scene/target")
    return str(run.out / "scene/target/run/bundles" / BUNDLE)


def alone(folder: Path, run: Run) -> dict[str, Any]:
    """The target in one step, before no draft."""
    return succeeded(pair_of(target(run), target(run), folder, 1), (DEVICE,), RATES[0], folder, run)


def gates(rate: float, folder: Path, run: Run) -> dict[str, Any]:
    """Gates before the target at a rate; at the first one also what no rate changes."""
    unrated = ("draft", DEVICE) if rate == RATES[0] else ()
    return taught(pair_of(DRAFT, target(run), folder, 10), (*unrated, *METHODS), rate, folder, run)


def report(cells: Mapping[str, Any]) -> Report:
    """Success of every method, and of gates against their controls and the draft."""
    named = {"one step": cells["one step"][DEVICE]} if "one step" in cells else {}
    for rate in RATES:
        for name, row in cells.get(str(rate), {}).items():
            named[f"{name} {rate}" if name in METHODS else name] = row
    won = {name: np.array([*map(float, row["won"])]) for name, row in named.items()}
    rows = [
        {"method": name, "success": asdict(wilson(int(of.sum()), len(of))),
         "sent": named[name]["sent"] if name.partition(" ")[0] in METHODS else None}
        for name, of in won.items()
    ]  # fmt: skip
    pairs = [
        (f"{gate} {rate}", rival) for rate in RATES for gate, control in GATES.items()
        for rival in (f"{control} {rate}", "draft") if f"{gate} {rate}" in won
    ]  # fmt: skip
    family = one_family(under(SUITE, paired(won, pairs))) if pairs else []
    table = Table(
        "scene", f"{EPISODES} paired episodes of Meta-World before a target that is fed the scene, by the same draft of "
        "all ten tasks; share of inferences that asked. `one step` and `target_on_device` are the target alone.",
        "method | success | asked", "`{method}` | {success:ci2} | {sent:.2f?}", rows,
    )  # fmt: skip
    facts = {row["method"]: row for row in rows} | {f"{row['first']} - {row['second']}": row for row in family}
    return Report([table, contrast_table(family, "scene-contrasts")], facts)
