"""The image encoder: it tells where things are, alone or with its policy, and what it learned reaches the bundle."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.lab.train.dots import demonstrations, dots
from torch import nn

from specact.errors import ConfigError
from specact.lab.data.episodes import Episodes
from specact.lab.data.readers import Source
from specact.lab.train import loop
from specact.lab.train.codes import rebuild, specs_of
from specact.lab.train.dataset import Dataset, prepare
from specact.lab.train.encoder import (
    ImageEmbedding,
    ImageEncoder,
    PatchEmbedding,
    Smaller,
    encoder_stage,
    learned,
    shifted,
)
from specact.lab.train.loop import run
from specact.lab.train.recipe import CodesRecipe, EncoderRecipe, PolicyRecipe, TokenizerRecipe
from specact.lab.train.train import train
from specact.load import load_pair
from specact.observation import Window

SMALL = EncoderRecipe(
    channels=(8, 16), keypoints=8, width=16, learns="place", steps=250, batch=32, learning_rate=1e-2, average=0.9
)
SEEING = PolicyRecipe(
    sees=("image",), history={"image": 2}, encoder=SMALL,
    layers=1, heads=1, width=16, head_width=0, dropout=0.0, steps=5, batch=8, warmup=2,
)  # fmt: skip
RECIPE = CodesRecipe(
    env="tests.lab.train.dots:TASK",
    data=("dots.npz",),
    chunk=2,
    tokenizer=TokenizerRecipe(codes=4, latent=4, hidden=8, steps=20, batch=32),
    policies={"sees": SEEING, "knows": structs.replace(SEEING, sees=("place",), history={}, encoder=EncoderRecipe())},
    bundles={"dots": ("sees", "knows")},
)


def dataset(recipe: CodesRecipe = RECIPE) -> Dataset:
    return prepare(demonstrations(), recipe)


def trained(tmp_path: Path, recipe: EncoderRecipe = SMALL, task: Any = None) -> nn.Sequential:
    stage = encoder_stage("sees.image", recipe, "image", dataset(), task, 0)
    stage.module.load_state_dict(run(stage, tmp_path, lambda done: None))
    assert isinstance(stage.module, nn.Sequential)
    return stage.module.eval()


def error(telling: nn.Sequential) -> float:
    """Mean distance along an axis of dots it has not seen, in the units of their places."""
    seen, (mean, std) = dots(100, seed=7), dataset().statistics["place"]
    with torch.no_grad():
        told = telling(torch.from_numpy(seen["image"])) * std + mean
    return float((told - torch.from_numpy(seen["place"])).abs().mean())


def test_it_learns_where_a_dot_is(tmp_path: Path) -> None:
    """A guess of the middle is off by 0.5; a pixel is 0.083."""
    assert error(trained(tmp_path)) < 0.15


@pytest.mark.parametrize("shape", [(12, 12, 3), (32, 32, 3), (37, 52, 3), (96, 96, 3)])
def test_frames_of_any_size_but_the_smallest(shape: tuple[int, int, int]) -> None:
    frames = torch.zeros((2, *shape), dtype=torch.uint8)
    assert ImageEncoder(EncoderRecipe(), shape)(frames).shape == (2, 256)
    with pytest.raises(ConfigError, match="11 x 40 are too small"):
        ImageEncoder(EncoderRecipe(), (11, 40, 3))


def test_frames_of_a_window_are_moved_alike_and_in_training_alone() -> None:
    embedding = ImageEmbedding(structs.replace(SMALL, learns="", shift=3), (32, 32, 3), 5)
    frames = torch.from_numpy(dots(8)["image"])[:, None].expand(-1, 4, -1, -1, -1)
    with torch.no_grad():
        still, moved = embedding.eval()(frames), embedding.train()(frames)
        assert torch.equal(embedding.eval()(frames), still)
        # Four times the same frame, moved alike; every sample in its own way.
        torch.testing.assert_close(moved, moved[:, :1].expand(-1, 4, -1))
        assert not torch.allclose(moved, still)
        features = embedding.encoder(frames.flatten(0, 1)).unflatten(0, (8, 4))
        torch.testing.assert_close(embedding.train()(features), still)


def test_a_moved_frame_is_a_crop_of_the_frame_with_its_edges_replicated() -> None:
    frames = np.random.default_rng(0).integers(256, size=(64, 9, 7, 3), dtype=np.uint8)
    moved = shifted(torch.from_numpy(frames), 2).numpy()
    corners = set()
    for frame, after in zip(frames, moved, strict=True):
        padded = np.pad(frame, ((2, 2), (2, 2), (0, 0)), mode="edge")
        crops = {(y, x): padded[y : y + 9, x : x + 7] for y in range(5) for x in range(5)}
        corners |= {corner for corner, crop in crops.items() if np.array_equal(crop, after)}
    # All that is missing of 25 corners after 64 draws: 2 expected, more than 10 in one run of 10^5.
    assert len(corners) > 14


def test_half_of_a_batch_are_random_scenes(tmp_path: Path) -> None:
    """Dots in the demonstrations stay in one place, so only the scenes can teach where others are."""
    counts: list[int] = []

    def scenes(number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        counts.append(number)
        return dots(number, int(rng.integers(1000)))

    task: Any = SimpleNamespace(scenes=scenes)
    still = dots(1)
    episodes = Episodes(
        {name: np.repeat(values, 40, 0) for name, values in still.items()}, np.zeros((40, 2), np.float32),
        np.array([20, 40]),
    )  # fmt: skip
    poor = replace(prepare(episodes, RECIPE), statistics=dataset().statistics)
    made = {}
    for number in (0, 300):
        recipe = structs.replace(SMALL, scenes=number)
        stage = encoder_stage(f"sees.{number}", recipe, "image", poor, task, 0)
        stage.module.load_state_dict(run(stage, tmp_path, lambda done: None))
        assert isinstance(stage.module, nn.Sequential)
        made[number] = error(stage.module.eval())
    assert made[300] < 0.2 < made[0]
    assert counts == [300]


def test_encoder_and_policies_reach_the_bundle(tmp_path: Path) -> None:
    made = demonstrations()
    np.savez(
        tmp_path / "dots.npz", image=np.asarray(made.frames("image")), place=made.numbers("place"), action=made.action,
        episode_ends=made.ends,
    )  # fmt: skip
    # Half of the pixels: what downsamples is no weight, and the graph can be rebuilt all the same.
    short = structs.replace(SEEING, encoder=structs.replace(SMALL, scenes=50, steps=20, pixels=16))
    recipe = structs.replace(
        RECIPE,
        observations={name: Source(name) for name in ("image", "place")},
        policies={**RECIPE.policies, "sees": short, "shares": structs.replace(short, width=8)},
    )
    told: list[str] = []
    trained = train(recipe, tmp_path, tmp_path / "run", lambda stage, done, total: told.append(stage))
    stages_told = [stage for stage in dict.fromkeys(told) if stage in trained.metrics]
    assert stages_told == ["tokenizer", "sees.image", "sees", "knows", "shares"]  # one encoder for two policies
    shared, _ = loop.read_tensors(tmp_path / "run" / "shares.safetensors")
    seen, _ = loop.read_tensors(tmp_path / "run" / "sees.safetensors")
    inside = [name for name in shared if ".encoder." in name]
    assert inside and all(torch.equal(shared[name], seen[name]) for name in inside)
    bundle = load_pair(trained.bundles[0])
    assert tuple(bundle.parts.spec.target.fields) == ("image",) and tuple(bundle.parts.spec.draft.fields) == ("place",)
    # The target's graph begins with the encoder as it was trained.
    model = rebuild(bundle.parts, "target", 2)
    frames = dots(2)["image"]
    with torch.no_grad():
        features = model.get_submodule("embed_image.encoder")(torch.from_numpy(frames))
        logits, _ = model({"image": torch.from_numpy(frames)[None]})
    weights, _ = loop.read_tensors(tmp_path / "run" / "sees.image.safetensors")
    encoder = ImageEncoder(short.encoder, (32, 32, 3))
    encoder.load_state_dict(
        {name[8:]: value.half().float() for name, value in weights.items() if name.startswith("encoder.")}
    )
    torch.testing.assert_close(encoder(torch.from_numpy(frames)).detach(), features)
    answer = bundle.parts.target.infer(Window({"image": frames}))
    np.testing.assert_allclose(answer.probs, logits[0].softmax(-1).numpy(), atol=1e-4)


# --- what cannot be ---


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (structs.replace(SEEING, encoder=structs.replace(SMALL, learns="plaice")), "did you mean 'place'"),
        (structs.replace(SEEING, encoder=structs.replace(SMALL, learns="image")), "encoder.learns"),
        (structs.replace(SEEING, sees=("place",), history={}), "'sees' has encoder.learns, but sees no camera"),
        (structs.replace(SEEING, encoder=structs.replace(SMALL, scenes=5)), "encoder.scenes needs"),
    ],
)  # fmt: skip
def test_what_an_encoder_cannot_learn_is_told(policy: PolicyRecipe, message: str) -> None:
    recipe = structs.replace(RECIPE, policies={**RECIPE.policies, "sees": policy})
    episodes = demonstrations()
    with pytest.raises(ConfigError, match=message):
        learned(recipe, specs_of(recipe, episodes), episodes, None)


# --- smaller frames ---


def test_a_smaller_frame_holds_the_mean_over_what_each_pixel_covers() -> None:
    """Exactly: 64 to 48 is every pixel three times, and of that the mean of four by four."""
    images = torch.rand(2, 3, 64, 96)
    made = Smaller(64, 96, 48)(images)
    assert made.shape == (2, 3, 48, 48)
    fine = images.repeat_interleave(3, 2)
    torch.testing.assert_close(made, torch.nn.functional.avg_pool2d(fine, (4, 2)), rtol=0, atol=1e-6)
    torch.testing.assert_close(Smaller(64, 64, 64)(images[..., :64]), images[..., :64], rtol=0, atol=1e-6)


def test_an_encoder_of_smaller_frames_makes_fewer_patches_of_all_of_a_frame() -> None:
    torch.manual_seed(0)
    recipe = EncoderRecipe(tokens="patches", channels=(4, 8, 8))
    whole, less = (PatchEmbedding(kind, (64, 64, 3), 4).eval() for kind in (recipe, structs.replace(recipe, pixels=48)))
    assert (whole.grid, less.grid) == ((4, 4), (3, 3))
    frame = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    far = frame.clone()
    far[0, -8:, -8:] = 255  # cut off, it would not be seen
    with torch.no_grad():
        assert not torch.equal(less(far), less(frame))


@pytest.mark.parametrize(("pixels", "said"), [(65, "at most 64 for frames of 64 x 96, got 65"), (4, "pixels out")])
def test_smaller_frames_that_cannot_be_made_are_refused(pixels: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PatchEmbedding(EncoderRecipe(tokens="patches", channels=(4, 8, 8), pixels=pixels), (64, 96, 3), 4)
