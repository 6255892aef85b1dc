"""The study of device budgets, small: it goes on where it was stopped, and its page holds its results."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("mujoco")

from specact import load_bundle
from specact.lab.evaluation.budget import study_ways
from specact.lab.evaluation.run import read_table
from specact.lab.train.recipe import load_recipe

ROOT = Path(__file__).parents[3]

RECIPE = """
env = "ball"
generate_episodes = 30
generate_noise = 0.5
window = 1
chunk = 5
execute = 5

[tokenizer]
codes = 8
latent = 16
hidden = 32
steps = 200
batch = 64

[policies.target]
layers = 2
heads = 2
width = 16
head_width = 32
steps = 60
batch = 32
bfloat16 = false

[policies.draft]
layers = 1
heads = 1
width = 5
head_width = 0
dropout = 0.0
steps = 20
snapshot = 0.1

[bundles]
ball = ["target", "draft"]
"""


@pytest.fixture(scope="module")
def budget() -> Iterator[ModuleType]:
    """The script, which imports its neighbours."""
    with script("budget") as module:
        yield module


@contextmanager
def script(name: str) -> Iterator[ModuleType]:
    """A script of the benchmarks."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "benchmarks"))
    del sys.modules[name]


# Stated, so that no answer depends on a clock.
PARTS = {
    "draft": 1.0, "head_draft": 2.0, "target": 8.0, "ask": 0.5, "gate random": 0.1, "gate deviation": 0.2,
    "gate uncertainty": 0.5, "gate learned": 1.2,
}  # fmt: skip
TIMES = {"ball": {"parts": {size: PARTS | {"draft": ms} for size, ms in (("1/4", 0.9), ("1", 1.0), ("16", 4.0))}}}


class StoppedError(Exception):
    """As by a signal."""


@pytest.fixture(scope="module")
def study(budget: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A plain draft and the same distilled; stopped in an evaluation of the first, and gone on with."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "ball.toml").write_text(RECIPE)
    cells = [budget.Cell("ball", 1, 1, False), budget.Cell("ball", 1, 1, True)]
    scale = budget.Scale(episodes=3, calibration=2, lessons=50, head_steps=10)
    out = folder / "out"

    def stop(what: str, done: int, total: int) -> None:
        if what == "calibrating learned":
            raise StoppedError

    with pytest.raises(StoppedError):
        budget.run(out, Path(), cells, scale, folder, stop)
    first = cells[0].folder(out)
    assert not (first / "cell.json").exists()
    assert budget.collect(out, cells)["rows"] == []
    kept = (first / "ends" / "summary.json").stat().st_mtime_ns
    told: list[str] = []
    budget.run(out, Path(), cells, scale, folder, lambda what, done, total: told.append(what))
    assert (first / "ends" / "summary.json").stat().st_mtime_ns == kept
    assert "target" not in told or told.index("distilled draft") < told.index("target"), "it was not trained again"
    before = (first / "cell.json").stat().st_mtime_ns
    budget.run(out, Path(), cells, scale, folder, lambda what, done, total: None)
    assert (first / "cell.json").stat().st_mtime_ns == before
    results = budget.collect(out, budget.plan(["ball"], (1, 2)))
    return out, results | {"times": TIMES}


def test_cells_that_share_a_target_follow_each_other(budget: ModuleType) -> None:
    cells = budget.plan(["ball", "pusht", "peg"])
    assert len(set(cells)) == len(cells) == 104
    assert [cell.task for cell in cells[:24:8]] == ["ball", "pusht", "peg"]
    assert all({(cell.task, cell.seed) for cell in cells[i : i + 8]} == {(cells[i].task, cells[i].seed)}
               for i in range(0, 104, 8))  # fmt: skip
    assert {cell.seed for cell in cells[:24]} == {1}
    camera = budget.plan(["pusht-camera", "ball"], (2, 3))
    assert [(cell.task, cell.seed) for cell in camera] == [("pusht-camera", 2)] * 6 + [("ball", 2)] * 8 + [
        ("ball", 3)
    ] * 8
    for task, drafts in budget.DRAFTS.items():
        recipe = load_recipe(ROOT / "recipes" / f"{task}.toml").policies[drafts.of]
        made = [drafts.settings(size, recipe) for size in range(len(drafts.widths))]
        assert made[1].width == recipe.width, "one is today's"
        assert not any(draft.width % draft.heads for draft in made)
        assert len(drafts.encoders) == (len(made) if "image" in recipe.sees else 0)


def test_pairs_that_are_published_are_not_trained(budget: ModuleType, tmp_path: Path) -> None:
    for cell in budget.PUBLISHED:
        bundle = budget.get_bundle(cell, tmp_path, Path(), budget.Scale(), tmp_path, None, None)
        assert bundle.name == cell.task + "-distilled" * cell.distilled
        names = [name for name, _ in budget.evaluations(cell, bundle, budget.Scale())]
        assert names == ["ends", "rate-0.4"]
    # PushT's deviation skips two in a row at most: chance has that limit beside it, and .2 cannot be asked of it.
    pusht = load_bundle("pusht")
    by_rate = dict(budget.evaluations(budget.Cell("pusht", 1, 1, False), pusht, budget.Scale()))
    assert by_rate["rate-0.4"].methods == ("random_learned", "random", "adahi", "uncertainty", "learned")
    assert by_rate["rate-0.2"].methods == ("random_learned", "uncertainty", "learned")


def test_every_way_is_in_the_results_with_its_cost(study: tuple[Path, dict[str, Any]]) -> None:
    ways = study_ways(study[1], "ball")
    by_draft: dict[str, set[tuple[str, float]]] = {}
    for way in ways:
        by_draft.setdefault(way.draft, set()).add((way.method, way.asked))
        assert way.episodes == 3 and list(way.successes) == [1]
    gates = {(name, rate) for name in ("random_learned", "adahi", "uncertainty", "learned") for rate in (0.2, 0.4, 0.6)}
    wanted = gates | {("draft", 0.0), ("head_draft", 0.0), ("hybrid", 1.0)}
    assert by_draft == {
        "draft x1": wanted, "distilled draft x1": wanted, "": {("target", 1.0), ("target_on_device", 0.0)},
    }  # fmt: skip
    costs = {(way.draft, way.method): way.cost for way in ways}
    assert costs["", "target"] == 0.5 / 8.0, "asking takes time"
    assert costs["", "target_on_device"] == 1.0, "costs are shares of the target's"
    assert costs["draft x1", "draft"] == costs["distilled draft x1", "draft"] == 1.0 / 8.0
    assert costs["draft x1", "hybrid"] == 1.5 / 8.0, "hybrid asks, too"
    assert costs["draft x1", "learned"] > 2.2 / 8.0
    for way in ways:
        assert way.rate == {"draft": 0.0, "head_draft": 0.0, "hybrid": 1.0}.get(way.method, way.rate)


def test_costs_of_sizes_come_from_one_run(budget: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ball.toml").write_text(RECIPE)
    monkeypatch.setitem(budget.DRAFTS, "ball", budget.Drafts((2, 5, 90)))
    found = budget.measured("ball", tmp_path / "out", Path(), tmp_path, 30, lambda *told: None)
    parts = found["parts"]
    assert list(parts) == ["1/4", "1", "4"] and found["rounds"] == 30
    assert len({of_size["target"] for of_size in parts.values()}) == 1
    assert {"draft", "head_draft", "ask", "gate learned", "gate deviation"} <= parts["1"].keys()
    # Of the draft's time nearly all is the call, so a size costs little; the head's is added to the draft's.
    assert all(of_size["head_draft"] > of_size["draft"] for of_size in parts.values())


def test_nothing_is_judged_on_what_a_gate_was_calibrated_on(study: tuple[Path, dict[str, Any]]) -> None:
    out, _ = study
    folders = sorted((out / "ball" / "seed-1").glob("ball-one*/*/episodes/*"))
    assert len(folders) == 2 * 15 + 1
    for folder in folders:
        assert read_table(folder)["episode"].tolist() == [0, 1, 2], "calibrations and lessons have other numbers"


def test_the_distilled_pair_has_the_same_target_and_another_draft(study: tuple[Path, dict[str, Any]]) -> None:
    base = study[0] / "ball" / "seed-1"
    plain = load_bundle(base / "train" / "bundles" / "ball-one")
    distilled = load_bundle(base / "distil-one" / "bundles" / "ball-one-distilled")
    one, other = plain.manifest["fingerprints"], distilled.manifest["fingerprints"]
    assert one["target"] == other["target"] and one["draft"] != other["draft"]


def test_the_page_says_what_is_there_and_what_is_missing(
    budget: ModuleType, study: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, results = study
    page = tmp_path / "page.md"
    names = ("advice", "gates", "choices", "costs", "results", "missing", "pictures")
    page.write_text("".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in names))
    nothing = budget.collect(tmp_path, budget.PUBLISHED)
    assert nothing["rows"] == [] and budget.missing_from(nothing, budget.PUBLISHED) == budget.PUBLISHED
    results = results | {"published": nothing}
    before = page.read_text()
    with pytest.raises(SystemExit, match=r"the parts of ball have not been timed: python benchmarks/budget\.py time"):
        budget.write_pages(results | {"times": {}}, page, tmp_path)
    assert page.read_text() == before
    budget.write_pages(json.loads(json.dumps(results)), page, tmp_path)
    text = page.read_text()
    assert "| ball | draft x1 | " in text
    assert "0 of 18 contrasts, 0 of them in favour of the gate." in text
    assert "- **ball** (training seed 1, 3 episodes each, 32 ways): from 0." in text
    assert "| ball | 1 | x1 | x1 |\n| ball | 2 | none | none |" in text
    assert "114 of 116 cells are missing." in text
    assert "**pusht**" not in text and not (tmp_path / "budget-pusht.png").exists()
    assert "![ball: success over device time, by transmission rate](budget-ball.png)" in text
    assert (tmp_path / "budget-ball.png").stat().st_size > 10_000


def test_cells_of_another_machine_are_added_and_not_run_again(
    budget: ModuleType, study: tuple[Path, dict[str, Any]]
) -> None:
    results, cells = study[1], budget.plan(["ball"], (1, 2))
    there = [budget.Cell("ball", 1, 1, False), budget.Cell("ball", 1, 1, True)]
    assert [cell for cell in cells if cell not in budget.missing_from(results, cells)] == there
    other = json.loads(json.dumps(results))
    for row in other["rows"]:
        row["seeds"] = {"2": row["seeds"]["1"] | {"successes": "111"}}
    both = budget.merge(results, other)
    assert len(both["rows"]) == len(results["rows"])
    for row, old in zip(both["rows"], results["rows"], strict=True):
        assert row["seeds"]["1"] == old["seeds"]["1"] and row["seeds"]["2"]["successes"] == "111"
    assert len(budget.missing_from(both, cells)) == len(cells) - 4
    assert budget.merge(both, results) == both


def test_the_published_page_is_that_of_the_stored_results(budget: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "budget.md"
    page.write_text((ROOT / "docs" / "budget.md").read_text())
    budget.write_pages(json.loads(budget.RESULTS.read_text()), page, tmp_path)
    with script("targets") as targets:
        targets.fill(page, "targets", targets.table(json.loads(targets.RESULTS.read_text())))
    assert page.read_text() == (ROOT / "docs" / "budget.md").read_text()


def test_a_target_fits_from_its_share_of_a_core_on() -> None:
    pairs = {
        "slow": {"target_ms": 2.0, "draft_ms": None, "chunk_ms": 200.0},
        "ball": {"target_ms": 2.0, "draft_ms": 0.5, "chunk_ms": 400.0},
    }
    with script("targets") as targets:
        rows = targets.table({"pairs": pairs}).splitlines()[2:]
        found = targets.measured(3)["pairs"]
    assert rows == [
        "| `ball` | 2.00 | 0.50 | 0.250 | 400 | 0.50% of this core |",
        "| `slow` | 2.00 | - | - | 200 | 1.00% of this core |",
    ]
    # At 20 Hz four actions last 200 ms. A token pair's draft is another policy; a flow policy has none.
    assert found["metaworld-tokens"]["chunk_ms"] == 200.0 and found["metaworld-flow"]["draft_ms"] is None
    # Which is faster is for a quiet machine to say.
    assert all(pair["target_ms"] > 0.0 for pair in found.values())
    assert {name for name, pair in found.items() if pair["draft_ms"] is None} == {
        "ball-chase-flow", "pusht-flow", "metaworld-flow", "kitchen-tokens", "relocate-tokens",
    }  # fmt: skip
