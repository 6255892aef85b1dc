"""Training on another device than the CPU: PyTorch's meta device refuses what is not all in one place, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.lab.train.dots import dots

from specact.errors import ConfigError
from specact.families.chunks.policy import ChunkSpec
from specact.lab.data.episodes import Episodes
from specact.lab.train import loop
from specact.lab.train.chunks import demonstrated_stage
from specact.lab.train.codes import policy_stage, specs_of
from specact.lab.train.dataset import observation_of, prepare
from specact.lab.train.loop import Stage, accelerator
from specact.lab.train.recipe import ChunkRecipe, CodesRecipe, EncoderRecipe, PolicyRecipe, TokenizerRecipe
from specact.lab.train.vqbet import ResidualVQ

META = torch.device("meta")
CHUNKS = ChunkRecipe(
    kind="flow", bundle="dots", rate_hz=10.0, data=("dots",), sees=("image", "place"), instruction=True, window=1,
    chunk=2, layers=1, heads=2, width=16, steps=4, batch=8, warmup=1, state_noise=0.1, bfloat16=False,
    encoder=EncoderRecipe(tokens="patches", channels=(4, 4), shift=2),
)  # fmt: skip
CODES = CodesRecipe(
    rate_hz=10.0, data=("dots",), window=1, chunk=2, tokenizer=TokenizerRecipe(codes=4, latent=4, hidden=8, steps=5),
    policies={
        "target": PolicyRecipe(
            sees=("image", "place"), instruction=True, layers=1, heads=2, width=16, head_width=0, steps=4, batch=8,
            state_noise=0.1, offset_on="sampled", bfloat16=False, encoder=CHUNKS.encoder,
        )
    },
)  # fmt: skip


def shows() -> Episodes:
    seen = dots(200)
    return Episodes(seen, seen["place"].copy(), np.arange(20, 201, 20), 10.0, instructions=("look",) * 10)


def chunks(**changed: Any) -> Stage:
    recipe, shown = structs.replace(CHUNKS, **changed), shows()
    spec = ChunkSpec(observation_of(recipe, recipe, shown, "the policy"), recipe.chunk, 2, 10.0)
    return demonstrated_stage(prepare(shown, recipe), recipe, spec)


def codes() -> Stage:
    data = prepare(shows(), CODES)
    tokenizer = ResidualVQ(CODES.tokenizer, CODES.chunk, 2)
    spec = specs_of(CODES, shows())["target"]
    return policy_stage("target", data, CODES, tokenizer, spec)


@pytest.mark.parametrize("kind", ["flow", "regression", "tokens", "codes"])
def test_a_step_happens_where_the_network_is(kind: str) -> None:
    stage = codes() if kind == "codes" else chunks(kind=kind)
    stage.module.to(META).train()
    loss, parts = stage.update(0)
    loss.backward()
    assert loss.device == META and all(part.device == META for part in parts.values())
    assert all(p.grad is None or p.grad.device == META for p in stage.module.parameters())
    assert any(p.grad is not None for p in stage.module.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_the_command_says_so() -> None:
    with pytest.raises(ConfigError, match="CUDA device"):
        accelerator("cuda")


def stop_after_two(done: int) -> None:
    if done == 2:
        raise KeyboardInterrupt


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return float(sum((weights[name].double() - others[name].double()).square().sum() for name in weights) ** 0.5)


def same_training(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether weights differ by a small part of what training changed; rounding after two steps makes 2e-4 of it."""
    return distance(found, wanted) < 0.02 * distance(wanted, chunks().module.state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_moves_between_both(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        loop.run(chunks(), tmp_path, stop_after_two, every=1, on="cuda")
    kept, _ = loop.read_tensors(tmp_path / "flow.checkpoint")
    assert {value.device.type for value in kept.values()} == {"cpu"}, "a checkpoint does not say where it was made"
    there = loop.run(chunks(), tmp_path / "there", lambda done: None, on="cuda")
    assert {value.device.type for value in there.values()} == {"cpu"}
    halfway = loop.run(chunks(), tmp_path, lambda done: None, every=1)
    never = loop.run(chunks(), tmp_path / "never", lambda done: None, every=1)
    assert same_training(halfway, never)
