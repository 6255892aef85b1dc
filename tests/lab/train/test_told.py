"""Chunk policies that look through a camera and are told what to do, by flow matching and by regression."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.lab.train.dots import dots

from specact.errors import ConfigError
from specact.families.chunks.flow import load_flow
from specact.families.chunks.policy import ChunkPolicy, ChunkSpec
from specact.families.chunks.sources import load_regression
from specact.lab.data.episodes import Episodes
from specact.lab.train.chunks import chunk_labels, demonstrated_stage, units_of, write_chunk_bundle
from specact.lab.train.dataset import observation_of, prepare
from specact.lab.train.encoder import PatchEmbedding, shifted
from specact.lab.train.flow import Flow
from specact.lab.train.freqcache import add_refresh
from specact.lab.train.loop import run
from specact.lab.train.recipe import ChunkRecipe, EncoderRecipe, plain
from specact.observation import Window
from specact.systems.freqcache import FREQCACHE

TOLD = ("open the gripper", "close the gripper")
RECIPE = ChunkRecipe(
    kind="flow", bundle="dots", rate_hz=10.0, data=("dots",), sees=("image",), instruction=True, window=2, chunk=3,
    layers=2, heads=2, width=32, dropout=0.0, steps=700, batch=64, learning_rate=4e-3, warmup=20, average=0.98,
    bfloat16=False, encoder=EncoderRecipe(tokens="patches", channels=(16, 32)),
)  # fmt: skip


def told() -> Episodes:
    """The action's first number is the dot's row, the second says what the episode's instruction says."""
    seen, side = dots(1200), np.repeat(np.arange(240) % 2, 5)
    return Episodes(
        {"image": seen["image"]},
        wanted(seen["place"], side),
        np.arange(5, 1201, 5),
        instructions=tuple(TOLD[number % 2] for number in range(240)),
    )


def wanted(place: np.ndarray, side: np.ndarray | int) -> np.ndarray:
    return np.stack([place[:, 0], np.broadcast_to(1.0 - 2.0 * np.asarray(side), len(place))], -1).astype(np.float32)


def trained(recipe: ChunkRecipe, folder: Path) -> ChunkPolicy:
    shows = told()
    data = prepare(shows, recipe)
    spec = ChunkSpec(observation_of(recipe, recipe, shows, "the policy"), recipe.chunk, 2, 10.0)
    torch.set_num_threads(1)
    stage = demonstrated_stage(data, recipe, spec)
    stage.module.load_state_dict(run(stage, folder / "run", lambda done: None))
    assert isinstance(stage.module, Flow)
    manifest = {"name": "dots", "env": "", "recipe": plain(recipe)}
    write_chunk_bundle(folder / "made", manifest, recipe, stage.module, units_of(data, recipe.kind))
    if recipe.kind == "flow":
        return load_flow(folder / "made").policy(4)
    return load_regression(folder / "made").policy


@pytest.mark.parametrize(("kind", "tokens"), [("flow", "patches"), ("regression", "keypoints")])
def test_it_looks_and_follows_the_instruction(kind: Any, tokens: Any, tmp_path: Path) -> None:
    recipe = structs.replace(RECIPE, kind=kind, encoder=structs.replace(RECIPE.encoder, tokens=tokens))
    policy = trained(recipe, tmp_path)
    assert policy.spec.observation.instruction
    scenes = dots(60, seed=9)

    def far(said: int, done: int, blank: bool = False) -> float:
        """Mean distance of the first action from what is to be done, where something is said."""
        windows = [
            Window({"image": np.repeat(frame[None] * (not blank), 2, 0)}, TOLD[said]) for frame in scenes["image"]
        ]
        rngs = [np.random.default_rng(row) for row in range(len(windows))]
        first = np.array([chunk[0] for chunk in policy.infer_batch(windows, rngs)])
        return float(np.abs(first - wanted(scenes["place"], done)).mean())

    right = max(far(0, 0), far(1, 1))
    assert right < 0.2
    assert far(0, 0, blank=True) > right + 0.1, "it must look"
    assert far(0, 1) > 0.6, "it must listen"


def test_patches_of_no_whole_pixels_are_not_reused(tmp_path: Path) -> None:
    recipe = structs.replace(RECIPE, window=1, steps=2, warmup=1, encoder=structs.replace(RECIPE.encoder, pixels=24))
    trained(recipe, tmp_path)
    with pytest.raises(ConfigError, match="32 x 32 pixels in 3 x 3 patches, which are no whole pixels"):
        add_refresh(load_flow(tmp_path / "made"))
    assert not (tmp_path / "made" / FREQCACHE).exists()


def test_actions_beyond_a_disturbance_do_not_count_where_the_recipe_says_so() -> None:
    shows = replace(told(), disturbed=np.arange(1200) % 5 == 2)
    data = prepare(shows, RECIPE)
    units = units_of(data, "flow")
    _, every = chunk_labels(data.train, data, units, skip_disturbed=False)
    _, some = chunk_labels(data.train, data, units, skip_disturbed=True)
    np.testing.assert_array_equal(some, data.train.episodes.followed(RECIPE.chunk))
    assert every[:5].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert some[:5].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]]


def test_a_frame_is_moved_by_at_most_so_many_pixels_and_in_training_only() -> None:
    frames = torch.randint(0, 256, (200, 9, 9, 3), dtype=torch.uint8)
    torch.manual_seed(0)
    moved, found = shifted(frames, 2), set()
    for before, after in zip(frames, moved, strict=True):
        fits = [
            (down, right)
            for down in range(-2, 3)
            for right in range(-2, 3)
            if torch.equal(after[2:7, 2:7], before[2 + down : 7 + down, 2 + right : 7 + right])
        ]
        assert len(fits) == 1
        found.add(fits[0])
    assert len(found) == 25, "200 draws of 25 moves miss one in 1 of 100 seeds; this is seed 0"


def test_patches_come_row_by_row() -> None:
    embedding = PatchEmbedding(EncoderRecipe(tokens="patches", channels=(8, 8)), (32, 32, 3), 4).eval()
    assert embedding.patches == 16
    black = torch.zeros(1, 2, 32, 32, 3, dtype=torch.uint8)
    lit = black.clone()
    lit[:, 1, 24:, :6] = 255
    with torch.no_grad():
        changed = (embedding(lit) - embedding(black)).abs().sum(-1)
    assert changed.shape == (1, 2, 16)
    # Last row, first column, of the newer frame; convolutions overlap with the patch beside it.
    assert changed[0, 1, 12] > 0.0 and set(changed[0, 1].nonzero().flatten().tolist()) <= {12, 13}
    assert changed[0, 0].max() == 0.0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not say"):
        observation_of(RECIPE, RECIPE, replace(told(), instructions=None), "the policy")
    with pytest.raises(ConfigError, match="learns"):
        structs.replace(RECIPE, encoder=EncoderRecipe(learns="pose"))
    for values in ({"tokens": "patches", "learns": "pose"}, {"learns": "pose", "shift": 2}, {"scenes": 10}):
        with pytest.raises(ConfigError, match=r"encoder\."):
            EncoderRecipe(**values)
    with pytest.raises(ConfigError, match="too small"):
        PatchEmbedding(EncoderRecipe(tokens="patches", channels=(8, 8, 8)), (16, 16, 3), 4)
