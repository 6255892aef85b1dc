"""Recipes and data that cannot be used are refused before the output folder exists."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from tests.tiny import write_npz

from specact.errors import ConfigError, DataError
from specact.lab.data.episodes import Episodes
from specact.lab.train.dataset import prepare
from specact.lab.train.recipe import ChunkRecipe, CodesRecipe, Recipe, load_recipe
from specact.lab.train.train import train

TOP = 'env = "ball"\ndata = ["made.npz"]\nwindow = 1\nchunk = 2\n'
TOKENIZER = "[tokenizer]\ncodes = 4\nlatent = 4\nhidden = 8\nsteps = 2\nbatch = 8\n"
POLICIES = """
[policies.target]
layers = 1
heads = 1
width = 4
head_width = 0
steps = 2
batch = 8
bfloat16 = false

[policies.draft]
like = "target"
"""
BUNDLES = '[bundles]\nmine = ["target", "draft"]\n'
GOOD = TOP + TOKENIZER + POLICIES + BUNDLES
FLOW = 'kind = "flow"\nbundle = "b"\nenv = "ball"\ndata = ["made.npz"]\nwidth = 16\nchunk = 2\nsteps = 2\n'
FLASH = 'kind = "flash"\nbundle = "b"\nexecute = 2\ntarget = "pusht-flow"\n'


def demonstrations() -> Episodes:
    """Six episodes with the widths of ball."""
    rng, steps = np.random.default_rng(0), 60
    state, goal = rng.normal(size=(steps, 8)).astype(np.float32), rng.uniform(-1, 1, (steps, 2)).astype(np.float32)
    action = rng.uniform(-1, 1, (steps, 2)).astype(np.float32)
    return Episodes({"state": state, "goal": goal}, action, ends=np.arange(10, steps + 1, 10), rate_hz=20.0)


def attempt(folder: Path, recipe: str, episodes: Episodes | None = None) -> Path:
    """A training run from a recipe's text and a file of demonstrations; returns its folder."""
    write_npz(folder / "made.npz", demonstrations() if episodes is None else episodes)
    path, out = folder / "recipe.toml", folder / "out"
    path.write_text(recipe)
    train(load_recipe(path), folder, out, lambda stage, done, total: None)
    return out


def with_line(line: str, table: str = "", recipe: str = GOOD) -> str:
    """The recipe with this line in a table, in place of one with the same key."""
    key, lines = line.partition("=")[0].strip(), recipe.splitlines()
    first = lines.index(f"[{table}]") + 1 if table else 0
    end = next((i for i, old in enumerate(lines) if i >= first and old.startswith("[")), len(lines))
    kept = [old for old in lines[first:end] if old.partition("=")[0].strip() != key]
    return "\n".join([*lines[:first], line, *kept, *lines[end:]])


BROKEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "more executed than predicted": (with_line("execute = 3"), ("execute", "3")),
    "an unknown observation": (with_line('sees = ["image"]', "policies.target"), ("'target'", "'image'")),
    "nothing with a history": (with_line('sees = ["goal"]', "policies.target"), ("'target'", "history")),
    "an unknown history": (with_line("history = { stat = 1 }", "policies.target"), ("'stat'", "'state'")),
    "an unknown key of the data": (with_line('observations = { state = "stat" }'), ("'stat'", "'state'")),
    "sizes of numbers": (with_line("observations = { state = { size = [4, 4] } }"), ("'state'", "camera")),
    "a rate beside an environment": (with_line("rate_hz = 20.0"), ("rate_hz", "env")),
    "neither rate nor environment": (GOOD.replace('env = "ball"\n', ""), ("rate_hz", "env")),
    "another rate than recorded": (GOOD.replace('env = "ball"', "rate_hz = 30.0"), ("20 Hz", "30")),
    "an expert without environment": (
        GOOD.replace('env = "ball"\ndata = ["made.npz"]', "rate_hz = 20.0\ngenerate_episodes = 3"),
        ("generate_episodes", "env"),
    ),
    "two origins": (with_line("generate_episodes = 5"), ("generate_episodes", "data")),
    "an unknown environment": (with_line('env = "bal"'), ("'bal'", "'ball'")),
    "an unknown key": (with_line("windw = 3"), ("'windw'", "'window'")),
    "a missing file": (GOOD.replace("made.npz", "other.npz"), ("other.npz",)),
    "too many tuples": (with_line("codebooks = 12", "tokenizer"), ("4^12",)),
    "heads that do not divide": (with_line("heads = 3", "policies.target"), ("width 4", "heads 3")),
    "a snapshot before the first step": (with_line("snapshot = 0.1", "policies.target"), ("snapshot",)),
    "a text for a number": (with_line('steps = "many"', "policies.target"), ("policies.target.steps", "'many'")),
    "like a number": (GOOD.replace('like = "target"', "like = 3"), ("like", "'draft'", "'3'")),
    "like itself": (GOOD.replace('like = "target"', 'like = "draft"'), ("'draft'", "like")),
    "policies that are no table": (TOP + "policies = 3\n" + TOKENIZER + BUNDLES, ("policies", "a table")),
    "a policy that is no table": (TOP + TOKENIZER + "[policies]\ntarget = 3\n" + BUNDLES, ("policies.target",)),
    "no bundle": (TOP + TOKENIZER + POLICIES, ("[bundles]",)),
    "a bundle of one": (with_line('mine = ["target"]', "bundles"), ("bundles.mine", "length 2")),
    "an unknown policy": (with_line('mine = ["target", "drft"]', "bundles"), ("'drft'", "'draft'")),
    "a snapshot that is not taken": (with_line('mine = ["target", "draft@snapshot"]', "bundles"), ("@snapshot",)),
    "an unknown kind": (FLOW.replace('"flow"', '"flo"'), ("kind", "'flow'")),
    "an odd width per head": (FLOW + "heads = 3\n", ("width 16", "heads 3")),
    "an unknown auxiliary": (FLOW + 'auxiliary = "stat"\n', ("auxiliary", "'stat'", "'state'")),
    "snapshots of no step": (FLOW + "snapshots = 2\n", ("snapshots 2", "steps 2")),
    "smooth labels of a flow": (FLOW + "smooth = 2.0\n", ("smooth",)),
    "too little": ('kind = "flow"\n', ("'bundle'",)),
    "nobody knows the target's data": (FLASH.replace("pusht-flow", "lerobot:a@20"), ("lerobot:a@20", "data = ")),
    "data beside a bundle": (FLASH + 'data = ["made.npz"]', ("recipe of pusht-flow", "leave out data")),
    "a share beside a bundle": (FLASH + "held_out = 0.1", ("recipe of pusht-flow", "held_out")),
    "names beside a bundle": (FLASH + '[observations]\nstate = "state"', ("recipe of pusht-flow", "[observations]")),
    "half a file of rollouts": ('kind = "drafters"\nbundle = "b"\ntarget = "ball"\nepisodes = 15', ("episodes", "15")),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_recipe_is_refused_before_the_folder_is_made(tmp_path: Path, case: str) -> None:
    recipe, words = BROKEN[case]
    with pytest.raises((ConfigError, DataError)) as refused:
        attempt(tmp_path, recipe)
    assert all(word in str(refused.value) for word in words), refused.value
    assert not (tmp_path / "out").exists()


def spoiled(name: str, row: int, column: int, value: float) -> Episodes:
    made = demonstrations()
    (made.action if name == "action" else made.numbers(name))[row, column] = value
    return made


BROKEN_DATA: dict[str, tuple[Episodes, str]] = {
    "NaN": (spoiled("state", 13, 4, np.nan), r"made\.npz.*state.*episode 1, step 3, dimension 4"),
    "a range that overflows": (spoiled("state", 13, 4, 3e38), "overflows"),
    "another action": (replace(demonstrations(), action=np.zeros((60, 3), np.float32)), "action width 3.*'ball'"),
    "a goal less": (demonstrations().only("state"), "'ball' needs .*goal"),
    "another rate": (replace(demonstrations(), rate_hz=30.0), "30 Hz.*'ball'.* 20"),
    "one episode": (demonstrations().select(np.array([0])), "one episode"),
}


@pytest.mark.parametrize("case", BROKEN_DATA)
def test_data_that_cannot_be_used_are_refused_before_the_folder_is_made(tmp_path: Path, case: str) -> None:
    made, match = BROKEN_DATA[case]
    for recipe in (GOOD, FLOW):
        with pytest.raises(DataError, match=match):
            attempt(tmp_path, recipe, made)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recipe", [GOOD, FLOW], ids=["pair", "flow"])
def test_a_chunk_longer_than_every_demonstration_is_refused(tmp_path: Path, recipe: str) -> None:
    longest = 10
    with pytest.raises(DataError, match=f"{longest} actions.*chunk"):
        attempt(tmp_path, recipe.replace("chunk = 2", f"chunk = {longest + 1}"))
    assert not (tmp_path / "out").exists()
    settings = structs.replace(load_recipe(tmp_path / "recipe.toml", Recipe), chunk=longest)
    assert prepare(demonstrations(), settings).train.chunks.shape[1] == longest


def test_a_file_in_the_place_of_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "out"))):
        attempt(tmp_path, GOOD)
    assert (tmp_path / "out").read_text() == "mine"


def test_a_recipe_of_another_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "flow.toml").write_text(FLOW)
    with pytest.raises(ConfigError, match="CodesRecipe"):
        load_recipe(tmp_path / "flow.toml", CodesRecipe)
    assert structs.asdict(load_recipe(tmp_path / "flow.toml", ChunkRecipe))["width"] == 16


def test_the_committed_recipes_are_accepted() -> None:
    assert [load_recipe(path) for path in (Path(__file__).parents[3] / "recipes").glob("*.toml")]
