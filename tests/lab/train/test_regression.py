"""A policy by regression: one pass of the flow's networks, one graph in the bundle, a draft for any chunk target."""

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from specact.families.chunks.sources import load_regression
from specact.lab.train import loop
from specact.lab.train.recipe import load_recipe
from specact.lab.train.train import train
from specact.observation import Window

SIDE = 0.5
RECIPE = """
kind = "regression"
bundle = "line"
data = ["demos.npz"]
rate_hz = 10.0
held_out = 0.1
window = 2
chunk = 4
layers = 1
heads = 2
width = 16
dropout = 0.0
steps = 300
batch = 64
learning_rate = 5e-3
warmup = 20
average = 0.95
bfloat16 = false
"""


def write_demos(folder: Path) -> None:
    """The action is minus half the position, whichever of two equally likely noises was added to it."""
    rng = np.random.default_rng(0)
    state = rng.uniform(-1.0, 1.0, (600, 1)).astype(np.float32)
    noise = rng.choice([-0.1, 0.1], state.shape)
    np.savez(
        folder / "demos.npz",
        state=np.repeat(state, 2, 0),
        action=np.repeat(-SIDE * state + noise, 2, 0).astype(np.float32),
        episode_ends=np.arange(12, 1201, 12),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regression")
    write_demos(folder)
    (folder / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(folder / "recipe.toml")
    train(recipe, folder, folder / "run", lambda *_: None)
    return folder / "run"


def test_it_answers_with_the_middle_of_what_was_demonstrated(run: Path) -> None:
    """The state is held for two steps, so the chunk's first action is known and its last is not."""
    policy = load_regression(run / "bundles" / "line").policy
    states = np.linspace(-0.8, 0.8, 9, dtype=np.float32)
    windows = [Window({"state": np.full((2, 1), state, np.float32)}) for state in states]
    rng = np.random.default_rng(0)
    first = np.array([chunk[0, 0] for chunk in policy.infer_batch(windows, [rng] * len(windows))])
    # Within the noise, which an answer independent of the state exceeds at both ends.
    assert np.abs(first + SIDE * states).max() < 0.2 < SIDE * states.max()
    twice = policy.infer_batch(windows, [np.random.default_rng(7)] * len(windows))
    np.testing.assert_array_equal(first, [chunk[0, 0] for chunk in twice], "it draws nothing")


def test_its_actions_stay_in_the_demonstrated_range(run: Path) -> None:
    bundle = load_regression(run / "bundles" / "line")
    units = bundle.policy.units
    assert units is not None
    far = Window({"state": np.full((2, 1), 1e4, np.float32)})
    chunk = bundle.policy.infer(far, np.random.default_rng(0))
    assert (np.abs(chunk - units.centre) <= units.scale * (1.0 + 1e-6)).all()


def test_bundles_are_kept_on_the_way(run: Path, tmp_path: Path) -> None:
    """They change nothing about how it ends."""
    recipe = structs.replace(load_recipe(run.parent / "recipe.toml"), snapshots=2)
    made = train(recipe, run.parent, tmp_path / "run", lambda *_: None)
    assert [path.name for path in made.bundles] == ["line-100", "line-200", "line"]
    window = Window({"state": np.full((2, 1), 0.4, np.float32)})

    def answer(path: Path) -> np.ndarray:
        return load_regression(path).policy.infer(window, np.random.default_rng(0))

    np.testing.assert_array_equal(answer(made.bundles[2]), answer(run / "bundles" / "line"), "it ends as without them")
    assert not np.array_equal(answer(made.bundles[0]), answer(made.bundles[1]))
    weights = [loop.read_tensors(tmp_path / "run" / f"regression@{step}.safetensors")[0] for step in (100, 200)]
    assert weights[0].keys() == weights[1].keys()
