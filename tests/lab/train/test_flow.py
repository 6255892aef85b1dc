"""A flow policy learns what was demonstrated, modes and all; its networks are what the bundle holds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from specact.errors import BundleError
from specact.families.chunks.flow import integrate
from specact.families.chunks.policy import ChunkSpec
from specact.lab.data.episodes import Episodes
from specact.lab.train import export
from specact.lab.train.chunks import chunk_labels, demonstrated_stage, units_of, write_chunk_bundle
from specact.lab.train.dataset import prepare
from specact.lab.train.flow import Flow
from specact.lab.train.loop import run
from specact.lab.train.recipe import ChunkRecipe
from specact.observation import vectors

RECIPE = ChunkRecipe(
    kind="flow", bundle="b", env="ball", generate_episodes=1, window=2, chunk=3, layers=1, heads=2, width=16,
    dropout=0.1, state_noise=0.1, steps=400, batch=64, draws=2, learning_rate=3e-3, warmup=20, average=0.98,
    bfloat16=False,
)  # fmt: skip
SPEC = ChunkSpec(vectors(2, state=1), chunk=3, actions=1, rate_hz=10.0)


def two_ways(episodes: int = 60, length: int = 12) -> Episodes:
    """Every episode goes left or goes right, all the way, and nothing in the observation tells which."""
    rng = np.random.default_rng(0)
    side = np.repeat(rng.choice([-1.0, 1.0], episodes), length)[:, None]
    return Episodes(
        {"state": rng.normal(size=(episodes * length, 1)).astype(np.float32)},
        action=(side + rng.normal(0.0, 0.05, side.shape)).astype(np.float32),
        ends=np.arange(1, episodes + 1) * length,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Flow:
    stage = demonstrated_stage(prepare(two_ways(), RECIPE), RECIPE, SPEC)
    stage.module.load_state_dict(run(stage, tmp_path_factory.mktemp("flow"), lambda done: None))
    assert isinstance(stage.module, Flow)
    return stage.module.eval()


def drawn(model: Flow, steps: int, count: int = 200) -> np.ndarray:
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((count, 3, 1), dtype=np.float32)
    with torch.no_grad():
        cache = model.cache({"state": torch.from_numpy(rng.standard_normal((count, 2, 1), dtype=np.float32))})

        def velocity(x: np.ndarray, time: float) -> np.ndarray:
            found: Tensor = model.expert(torch.from_numpy(x), torch.full((count,), time), cache)
            return np.asarray(found.numpy())

        return integrate(velocity, noise, steps)


def test_ten_steps_take_a_side_and_one_step_takes_the_middle(trained: Flow) -> None:
    """Why the number of steps is a lever: a single one answers with the mean, which nobody demonstrated.

    Each side has a probability near 1/2; fewer than 60 of 200 draws on one of them has one below 1e-8.
    """
    many, one = (drawn(trained, steps)[..., 0] for steps in (10, 1))
    assert (np.abs(np.abs(many) - 1.0) < 0.5).mean() > 0.9
    assert (np.sign(many) == np.sign(many[:, :1])).all(1).mean() > 0.9, "a chunk keeps to its side"
    assert 60 <= (many[:, 0] > 0.0).sum() <= 140
    assert np.abs(one).mean() < 0.6 < 0.9 < np.abs(many).mean()


def test_draws_of_a_window_read_its_entry_of_the_cache(trained: Flow) -> None:
    rng = np.random.default_rng(3)
    windows, draws = 4, 3
    noisy = torch.from_numpy(rng.standard_normal((draws * windows, 3, 1), dtype=np.float32))
    time = torch.from_numpy(rng.random(draws * windows, dtype=np.float32))
    with torch.no_grad():
        cache = trained.cache({"state": torch.from_numpy(rng.standard_normal((windows, 2, 1), dtype=np.float32))})
        shared = trained.expert(noisy, time, cache, draws)
        others = (1,) * (cache.dim() - 1)
        torch.testing.assert_close(shared, trained.expert(noisy, time, cache.repeat(draws, *others)))
        mixed_up = trained.expert(noisy, time, cache.repeat_interleave(draws, 0))
    assert (shared - mixed_up).abs().max() > 1e-3


def test_steps_past_an_episodes_end_do_not_count() -> None:
    episodes = two_ways(episodes=4, length=5)
    data = prepare(episodes, structs.replace(RECIPE, chunk=4))
    chunks, real = chunk_labels(data.train, data, units_of(data, "flow"), skip_disturbed=False)
    assert chunks.shape == (15, 4, 1) and real.shape == (15, 4)
    for start in (0, 5, 10):
        assert real[start : start + 5].sum(1).tolist() == [4.0, 4.0, 3.0, 2.0, 1.0]


def test_actions_have_mean_0_and_variance_1_in_the_flows_units() -> None:
    data = prepare(two_ways(), RECIPE)
    units, action = units_of(data, "flow"), data.train.episodes.action
    inside = units.to_flow(action)
    assert abs(inside.mean()) < 1e-5 and inside.std() == pytest.approx(1.0, rel=1e-5)
    np.testing.assert_allclose([units.low, units.high], [action.min(0), action.max(0)], rtol=1e-5)


def test_training_gives_the_cache_a_gradient_through_every_draw() -> None:
    """Encoder and prefix learn through the expert alone; nothing of the last layer's cache is left out."""
    stage = demonstrated_stage(prepare(two_ways(), RECIPE), RECIPE, SPEC)
    torch.manual_seed(0)
    for parameter in stage.module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    loss, _ = stage.update(0)
    loss.backward()
    silent = [n for n, p in stage.module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0.0]
    assert not silent


# --- the exported networks are the trained ones ---


def test_an_export_that_differs_is_not_kept_as_a_bundle(
    tiny_flow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepare(two_ways(), RECIPE)
    model = demonstrated_stage(data, RECIPE, SPEC).module
    assert isinstance(model, Flow)
    monkeypatch.setattr(export, "PARITY", -1.0)
    with pytest.raises(BundleError, match=r"encoder\.onnx differs from the trained network by"):
        write_chunk_bundle(tmp_path, {}, RECIPE, model, units_of(data, "flow"))
    assert not (tmp_path / "manifest.json").exists()


# --- recipes and folders ---
