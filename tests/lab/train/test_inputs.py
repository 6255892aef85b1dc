"""Recipes and data that cannot be used are refused in one sentence, before the output folder exists."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import quiet

from specact.errors import ConfigError, DataError
from specact.lab.data.episodes import Episodes
from specact.lab.data.generate import save
from specact.lab.train.chunk_recipe import load_any_recipe, load_chunk_recipe
from specact.lab.train.chunk_train import train_chunks
from specact.lab.train.drafters import is_drafters, load_drafter_recipe
from specact.lab.train.flash import is_flash, load_flash_recipe
from specact.lab.train.recipe import load_recipe
from specact.lab.train.train import train

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))

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


def demonstrations() -> Episodes:
    """Six episodes with the widths of ball."""
    rng = np.random.default_rng(0)
    steps = 60
    return Episodes(
        {
            "state": rng.normal(size=(steps, 8)).astype(np.float32),
            "goal": rng.uniform(-1, 1, (steps, 2)).astype(np.float32),
        },
        rng.uniform(-1, 1, (steps, 2)).astype(np.float32),
        ends=np.arange(10, steps + 1, 10),
        rate_hz=20.0,
    )


def attempt(folder: Path, recipe: str, episodes: Episodes | None = None) -> Path:
    """``specact train``, from a recipe's text and a file of demonstrations; returns ``--out``."""
    save(folder / "made.npz", demonstrations() if episodes is None else episodes)
    path, out = folder / "recipe.toml", folder / "out"
    path.write_text(recipe)
    if recipe.startswith("kind"):
        train_chunks(load_chunk_recipe(path), folder, out, quiet)
    else:
        train(load_recipe(path), folder, out, quiet)
    return out


def with_line(line: str, table: str = "") -> str:
    """The good recipe with a line more at the top, or in a table."""
    key = line.partition("=")[0].strip()
    lines = [old for old in GOOD.splitlines() if old.partition("=")[0].strip() != key or table]
    at = lines.index(f"[{table}]") + 1 if table else 0
    return "\n".join([*lines[:at], line, *lines[at:]])


def in_target(line: str) -> str:
    key = line.partition("=")[0].strip()
    kept = [old for old in POLICIES.splitlines() if old.partition("=")[0].strip() != key]
    kept.insert(kept.index("[policies.target]") + 1, line)
    return TOP + TOKENIZER + "\n".join(kept) + "\n" + BUNDLES


def in_tokenizer(line: str) -> str:
    key = line.partition("=")[0].strip()
    kept = [old for old in TOKENIZER.splitlines() if old.partition("=")[0].strip() != key]
    return TOP + "\n".join([*kept, line]) + "\n" + POLICIES + BUNDLES


def with_bundles(line: str) -> str:
    return TOP + TOKENIZER + POLICIES + "[bundles]\n" + line


BROKEN_RECIPES = [
    (with_line("window = 0"), "window must be at least 1 and at most 1048576, got 0"),
    (with_line("chunk = -1"), "chunk must be at least 1 and at most 1048576, got -1"),
    (with_line("execute = 3"), "execute must lie between 1 and chunk = 2, got 3"),
    (with_line("held_out = 1.5"), "held_out must be at least 0 and below 1, got 1.5"),
    (with_line("held_out = nan"), "held_out must be a finite number, got nan"),
    (with_line("temperature = 0.0"), "temperature must be above 0, got 0.0"),
    (with_line("temperature = inf"), "temperature must be a finite number, got inf"),
    (with_line("seed = -1"), "seed must be at least 0"),
    (with_line('seed = "one"'), "seed must be an integer, got a string: 'one'"),
    (with_line("window = true"), "window must be an integer, got a boolean: True"),
    (with_line("window = 1.5"), "window must be an integer, got a number: 1.5"),
    (in_target("sequential = 1"), "policies.target.sequential must be true or false, got an integer: 1"),
    (in_target('sees = "state"'), "policies.target.sees must be a list of strings, got a string: 'state'"),
    (in_target('sees = ["image"]'), "unknown observation of policy 'target' 'image'"),
    (in_target('sees = ["goal"]'), "policy 'target' needs at least one observation with a history of 1 or more"),
    (in_target("history = { state = -1 }"), "[policies.target]: history.state must be at least 0, got -1"),
    (in_target("history = { stat = 1 }"), "unknown observation of policy 'target' 'stat'; did you mean 'state'?"),
    (with_line('observations = { state = "stat" }'), "unknown key of this dataset 'stat'; did you mean 'state'?"),
    (
        with_line('observations = { state = { size = [4, 4] } }'),
        "the observation 'state' is not made of camera frames, so it has no size and no crop",
    ),
    (
        with_line('observations = { state = { size = [4] } }'),
        "observations.state.size must be a list of 2 integers, got [4]",
    ),
    (with_line("rate_hz = 20.0"), "either env = \"NAME\", whose control rate is known, or rate_hz = HZ"),
    (
        GOOD.replace('env = "ball"\ndata = ["made.npz"]', "rate_hz = 20.0\ngenerate_episodes = 3"),
        "generate_episodes lets an environment's expert demonstrate",
    ),
    (GOOD.replace('env = "ball"', "rate_hz = 30.0"), "was recorded at 20 Hz, but the recipe says rate_hz = 30"),
    (GOOD.replace('env = "ball"', "rate_hz = 0.0"), "rate_hz must be above 0, got 0.0"),
    (with_line('data = "made.npz"'), "data must be a list of strings, got a string: 'made.npz'"),
    (with_line("data = [1]"), "data must be a list of strings, got [1]"),
    (with_line("generate_episodes = 5"), "either data = [...] or generate_episodes = N, and not both"),
    (with_line('env = "bal"'), "unknown environment 'bal'; did you mean 'ball'?"),
    (with_line('windw = 3'), "unknown key in the recipe 'windw'; did you mean 'window'?"),
    (with_line('overlap = "avrage"'), "unknown value of overlap 'avrage'; did you mean 'average'?"),
    (with_line('gates = "deviation"'), "gates must be a table, got a string: 'deviation'"),
    (with_line('gates = { reading = "zscor" }'), "unknown value of the gate choice 'reading' 'zscor'; did you mean"),
    (with_line("gates = { max_skips = -1 }"), 'max_skips must be an integer of at least 0, or "unlimited", got -1'),
    (with_line("gates = { alpha = nan }"), "alpha must be a number above 0 and at most 1, got nan"),
    (GOOD.replace('env = "ball"\n', ""), "a recipe needs either env = \"NAME\", whose control rate is known"),
    (GOOD.replace('data = ["made.npz"]', 'data = ["other.npz"]'), "there is nothing at"),
    (in_tokenizer("steps = 0"), "[tokenizer]: steps must be at least 1, got 0"),
    (with_line("window = 2000000"), "window must be at least 1 and at most 1048576, got 2000000"),
    (with_line("seed = " + "1" * 400), "seed has more digits than any number of use"),
    (in_tokenizer("codes = 1000000\ncodebooks = 1000000"), "1000000^1000000 tuples; the device keeps a table"),
    (in_tokenizer("codes = 0"), "[tokenizer]: codes must be at least 1 and at most 1048576, got 0"),
    (in_tokenizer("codebooks = 12"), "are 4^12 tuples"),
    (in_tokenizer("dead_share = -0.1"), "[tokenizer]: dead_share must be at least 0 and below 1, got -0.1"),
    (with_line("tokenizer = 3").replace(TOKENIZER, ""), "tokenizer must be a table, got an integer: 3"),
    (in_target("steps = 0"), "[policies.target]: steps must be at least 1, got 0"),
    (in_target("steps = -5"), "[policies.target]: steps must be at least 1, got -5"),
    (in_target("heads = 0"), "[policies.target]: heads must be at least 1 and at most 1048576, got 0"),
    (in_target("heads = 3"), "[policies.target]: width 4 must be a multiple of heads 3"),
    (in_target("batch = 0"), "[policies.target]: batch must be at least 1 and at most 1048576, got 0"),
    (in_target("learning_rate = 0.0"), "[policies.target]: learning_rate must be above 0, got 0.0"),
    (in_target("learning_rate = nan"), "[policies.target]: learning_rate must be a finite number, got nan"),
    (in_target("dropout = 1.0"), "[policies.target]: dropout must be at least 0 and below 1, got 1.0"),
    (in_target("average = 1.0"), "[policies.target]: average must be at least 0 and below 1, got 1.0"),
    (in_target("state_noise = inf"), "[policies.target]: state_noise must be a finite number, got inf"),
    (in_target("snapshot = 2.0"), "[policies.target]: snapshot must be at least 0 and at most 1, got 2.0"),
    (in_target("snapshot = 0.1"), "snapshot 0.1 of 2 steps is before the first one"),
    (in_target('steps = "many"'), "policies.target.steps must be an integer, got a string: 'many'"),
    (in_target("stpes = 3"), "unknown key in [policies.target] 'stpes'; did you mean 'steps'?"),
    (GOOD.replace('like = "target"', "like = 3"), "unknown policy in like of 'draft' '3'"),
    (GOOD.replace('like = "target"', 'like = "draft"'), "the policy 'draft' also uses like"),
    (TOP + "policies = 3\n" + TOKENIZER + BUNDLES, "policies must be a table, got an integer: 3"),
    (TOP + TOKENIZER + "[policies]\ntarget = 3\n" + BUNDLES, "policies.target must be a table, got an integer: 3"),
    (TOP + TOKENIZER + POLICIES, "makes no bundle; add [bundles]"),
    (with_bundles('mine = ["target"]'), "bundles.mine must be a list of 2 strings, got ['target']"),
    (with_bundles('mine = "target"'), "bundles.mine must be a list of 2 strings, got a string: 'target'"),
    (with_bundles("mine = [1, 2]"), "bundles.mine must be a list of 2 strings, got [1, 2]"),
    (with_bundles('mine = ["target", "drft"]'), "unknown policy of a bundle 'drft'; did you mean 'draft'?"),
    (with_bundles('mine = ["target", "draft@snapshot"]'), "unknown policy of a bundle 'draft@snapshot'"),
    ("env = ", "is not valid TOML"),
    (FLOW + "steps = 3\n", "is not valid TOML"),
    (FLOW.replace("steps = 2", "steps = 0"), "steps must be at least 1, got 0"),
    (FLOW + "held_out = 1.5\n", "held_out must be at least 0 and below 1, got 1.5"),
    (FLOW + "heads = 3\n", "width 16 must be an even multiple of heads 3"),
    (FLOW.replace('["made.npz"]', '"made.npz"'), "data must be a list of strings, got a string: 'made.npz'"),
    (FLOW.replace('"ball"', '"bal"'), "unknown environment 'bal'; did you mean 'ball'?"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "sentence"), BROKEN_RECIPES, ids=[sentence for _, sentence in BROKEN_RECIPES])
def test_a_broken_recipe_is_refused_before_the_folder_is_made(tmp_path: Path, recipe: str, sentence: str) -> None:
    with pytest.raises((ConfigError, DataError)) as refused:
        attempt(tmp_path, recipe)
    assert sentence in str(refused.value)
    assert not (tmp_path / "out").exists()


def spoiled(name: str, row: int, column: int, value: float) -> Episodes:
    made = demonstrations()
    (made.action if name == "action" else made.numbers(name))[row, column] = value
    return made


def wide(name: str, width: int) -> Episodes:
    made = demonstrations()
    rows = np.zeros((made.steps, width), np.float32)
    return (
        replace(made, action=rows) if name == "action" else replace(made, observation={**made.observation, name: rows})
    )


def one_episode() -> Episodes:
    return demonstrations().select(np.array([0]))


BROKEN_DATA: list[tuple[Callable[[], Episodes], str]] = [
    (
        lambda: spoiled("state", 13, 4, np.nan),
        "1 values of state are NaN or infinite; the first is in episode 1, step 3, dimension 4. Repair",
    ),
    (
        lambda: spoiled("action", 59, 0, -np.inf),
        "1 values of action are NaN or infinite; the first is in episode 5, step 9, dimension 0. Repair",
    ),
    (
        lambda: spoiled("goal", 0, 1, np.inf),
        "1 values of goal are NaN or infinite; the first is in episode 0, step 0, dimension 1. Repair",
    ),
    (lambda: spoiled("state", 13, 4, 3e38), "values so large that their range or standard deviation overflows"),
    (lambda: wide("state", 5), "has action width 2, goal width 2, state width 5; the task 'ball' needs"),
    (lambda: wide("action", 3), "needs action width 2, goal width 2, state width 8"),
    (lambda: wide("goal", 1), "has action width 2, goal width 1, state width 8"),
    (lambda: demonstrations().only("state"), "has action width 2, state width 8; the task 'ball' needs"),
    (
        lambda: replace(demonstrations(), rate_hz=30.0),
        "was recorded at 30 Hz, but the task 'ball' runs at 20 Hz; resample",
    ),
    (one_episode, "there is only one episode; at least two are needed"),
]


@pytest.mark.parametrize(("made", "sentence"), BROKEN_DATA, ids=[sentence for _, sentence in BROKEN_DATA])
@pytest.mark.parametrize("recipe", [GOOD, FLOW], ids=["pair", "flow"])
def test_data_that_cannot_be_used_are_refused_before_the_folder_is_made(
    tmp_path: Path, recipe: str, made: Callable[[], Episodes], sentence: str
) -> None:
    with pytest.raises(DataError) as refused:
        attempt(tmp_path, recipe, made())
    assert sentence in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recipe", [GOOD, FLOW], ids=["pair", "flow"])
def test_a_chunk_longer_than_every_demonstration_is_refused(tmp_path: Path, recipe: str) -> None:
    longest = int(np.diff(demonstrations().ends, prepend=0).max())
    line = next(line for line in recipe.splitlines() if line.startswith("chunk = "))
    with pytest.raises(DataError, match=rf"the longest demonstration has {longest} actions, fewer than chunk = "):
        attempt(tmp_path, recipe.replace(line, f"chunk = {longest + 1}"))
    assert not (tmp_path / "out").exists()
    assert (attempt(tmp_path, recipe.replace(line, f"chunk = {longest}")) / "bundles").is_dir()


def test_a_message_about_data_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"made\.npz: 1 values of state"):
        attempt(tmp_path, GOOD, spoiled("state", 0, 0, np.nan))


def test_the_swarm_refuses_other_widths_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the task 'swarm' needs action width 10, goal width 10, state width 20"):
        attempt(tmp_path, GOOD.replace('"ball"', '"swarm"'), replace(demonstrations(), rate_hz=None))
    assert not (tmp_path / "out").exists()


def test_files_of_other_widths_cannot_be_joined() -> None:
    from specact.lab.data.episodes import concatenate

    with pytest.raises(DataError, match=r"a state of \(5,\) and of \(8,\); they cannot be joined"):
        concatenate([demonstrations(), wide("state", 5)])


def test_a_repaired_recipe_runs_where_a_broken_one_failed(tmp_path: Path) -> None:
    for broken in (in_target("steps = 0"), with_line('env = "bal"'), with_bundles('mine = ["target"]')):
        with pytest.raises(ConfigError):
            attempt(tmp_path, broken)
    with pytest.raises(DataError):
        attempt(tmp_path, GOOD, spoiled("state", 0, 0, np.nan))
    assert (attempt(tmp_path, GOOD) / "bundles" / "mine" / "manifest.json").is_file()


def test_a_file_in_the_place_of_the_folder_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match=r"out is a file, but .* must be a folder"):
        attempt(tmp_path, GOOD)
    assert (tmp_path / "out").read_text() == "mine"


def test_a_large_share_held_out_leaves_an_episode_to_train_on() -> None:
    train_part, held_out = demonstrations().split(0.99, seed=0)
    assert (len(train_part), len(held_out)) == (1, 5)


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_the_committed_recipes_are_accepted(path: Path) -> None:
    if is_drafters(path):
        assert load_drafter_recipe(path).target
    elif is_flash(path):
        assert load_flash_recipe(path).target
    else:
        assert load_any_recipe(path)[0].env
