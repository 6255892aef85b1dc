"""A chunk policy learns along with an auxiliary readout, and what only a simulator knows stays out of the policy."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from msgspec import structs

from specact.families.chunks.policy import ChunkSpec
from specact.families.tokens.policy import BINS
from specact.lab.data.episodes import Episodes
from specact.lab.train.chunks import demonstrated_stage, nearest_bins, soft_bins
from specact.lab.train.dataset import observation_of, prepare
from specact.lab.train.loop import Stage, run
from specact.lab.train.recipe import ChunkRecipe

HIDDEN = "privileged.scene"
RECIPE = ChunkRecipe(
    kind="flow", bundle="b", env="ball", generate_episodes=1, auxiliary=HIDDEN, window=1, chunk=2, layers=2, heads=2,
    width=16, dropout=0.0, steps=200, batch=64, draws=1, learning_rate=5e-3, warmup=20, average=0.9, bfloat16=False,
)  # fmt: skip
Kind = Literal["flow", "regression", "tokens"]


def demonstrated(steps: int = 400) -> Episodes:
    """Actions are noise, so that whatever is learned of the hidden numbers is learned from their labels."""
    rng = np.random.default_rng(0)
    state = rng.normal(size=(steps, 2)).astype(np.float32)
    hidden = np.stack([state[:, 0] * state[:, 1], np.abs(state[:, 0]), np.full(steps, 7.0)], axis=1)
    action = rng.uniform(-1.0, 1.0, (steps, 1)).astype(np.float32)
    return Episodes(
        {"state": state, HIDDEN: hidden.astype(np.float32)}, action, np.arange(20, steps + 1, 20), rate_hz=10.0
    )


def stage_of(recipe: ChunkRecipe) -> Stage:
    episodes = demonstrated()
    spec = observation_of(recipe, recipe, episodes, "it")
    assert set(spec.fields) == {"state"}, "a policy observes it only where its recipe names it"
    return demonstrated_stage(prepare(episodes, recipe), recipe, ChunkSpec(spec, recipe.chunk, 1, 10.0))


@pytest.mark.parametrize("kind", ["regression", "tokens"])
def test_the_readout_learns_through_the_prefix(tmp_path: Path, kind: Kind) -> None:
    stage = stage_of(structs.replace(RECIPE, kind=kind))
    with torch.no_grad():
        before = stage.validate(stage.module)["auxiliary"]
        with torch.enable_grad():
            stage.module.load_state_dict(run(stage, tmp_path, lambda done: None))
        assert stage.validate(stage.module)["auxiliary"] < 0.5 * before


def test_the_readouts_error_reaches_the_encoder() -> None:
    """A readout of a detached cache would learn, too, and teach the policy nothing."""
    stage = stage_of(RECIPE)
    torch.manual_seed(0)
    for parameter in stage.module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    gradients = []
    for scale in (0.0, 1.0):
        stage.module.zero_grad()
        with torch.no_grad():
            stage.module.readout[2].weight.mul_(scale)  # type: ignore[index, union-attr]
        stage.update(0)[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in stage.module.encoder.parameters()]))  # type: ignore[union-attr]
    assert not torch.equal(*gradients)


def test_soft_labels_are_distributions_around_the_value() -> None:
    values = torch.tensor([[-1.0, -0.3, 0.01, 0.77, 1.0]])
    labels = soft_bins(values, 2.0)
    assert labels.shape == (1, 5, BINS)
    torch.testing.assert_close(labels.sum(-1), torch.ones(1, 5))
    centres = torch.linspace(-1.0, 1.0, BINS)
    torch.testing.assert_close((labels * centres).sum(-1)[:, 1:4], values[:, 1:4], atol=1e-4, rtol=0.0)
    spread = ((labels * (centres - values[..., None]).square()).sum(-1).sqrt() * (BINS - 1) / 2)[:, 1:4]
    torch.testing.assert_close(spread, torch.full((1, 3), 2.0), atol=1e-2, rtol=0.0)
    assert torch.equal(labels.argmax(-1)[:, [0, 4]], torch.tensor([[0, BINS - 1]]))
    narrow = soft_bins(values, 0.05)
    assert torch.equal(narrow.argmax(-1), nearest_bins(values)) and float(narrow.max(-1).values.min()) > 0.99
