"""A pair that is told what to do and looks through two cameras: trained, exported, gated, distilled and served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.lab.train.told import TASK, WAYS
from tests.tiny import quiet

from specact.errors import BundleError, ConfigError
from specact.families.codes.policy import CodePolicy, OnnxPolicy
from specact.gates.learned import TargetHead
from specact.lab.data.generate import generate
from specact.lab.rollout.distillation import collector
from specact.lab.rollout.pool import Pool
from specact.lab.train.codes import specs_of
from specact.lab.train.distil import DistilRecipe, distil, draft_encoders, encoded
from specact.lab.train.head import HeadRecipe, TargetHeadNetwork, demonstrated_lessons, train_head
from specact.lab.train.recipe import CodesRecipe, EncoderRecipe, PolicyRecipe, TokenizerRecipe
from specact.lab.train.train import train
from specact.lab.train.variants import prune_history
from specact.load import load_pair
from specact.observation import Window
from specact.pair import Pair

ENV = "tests.lab.train.told:TASK"
LEFT, RIGHT = WAYS
TARGET = PolicyRecipe(
    sees=("image.front", "image.top", "state"), history={"image.front": 1, "image.top": 1}, instruction=True,
    encoder=EncoderRecipe(tokens="patches", channels=(4, 8), shift=1),
    layers=1, heads=2, width=32, head_width=0, dropout=0.0, steps=200, batch=64, warmup=10, learning_rate=3e-3,
)  # fmt: skip
DRAFT = structs.replace(
    TARGET, sees=("image.front", "state"), history={}, encoder=EncoderRecipe(channels=(4, 8), keypoints=4, width=8)
)
RECIPE = CodesRecipe(
    env=ENV,
    generate_episodes=40,
    window=2,
    chunk=2,
    temperature=0.2,
    tokenizer=TokenizerRecipe(codes=4, latent=4, hidden=16, steps=200, batch=64),
    policies={"target": TARGET, "draft": DRAFT},
    bundles={"told": ("target", "draft")},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("told")
    train(RECIPE, folder, folder / "run", quiet)
    return folder / "run"


@pytest.fixture(scope="module")
def pair(run: Path) -> Pair[Any]:
    return load_pair(run / "bundles" / "told")


@pytest.fixture
def copy(pair: Pair[Any], tmp_path: Path) -> Path:
    shutil.copytree(pair.parts.path, tmp_path / "told")
    return tmp_path / "told"


def windows(told: str | None, number: int = 8) -> list[Window]:
    """As the device makes them, at places where either way may be the right one."""
    made, env = [], TASK.make(render_mode=None)
    for seed in range(number):
        seen, _ = env.reset(seed=seed)
        arrays = {name: np.stack([value] * 2) for name, value in seen.items() if name != "instruction"}
        made.append(Window(arrays, told))
    return made


def way(pair: Pair[Any], policy: CodePolicy, seen: Sequence[Window]) -> np.ndarray:
    """Mean of the likeliest actions."""
    said = policy.infer_batch(seen)
    return np.array([pair.parts.tokenizer.decode(draft.probs.argmax(-1), draft.offsets).mean() for draft in said])


@pytest.mark.parametrize("role", ["draft", "target"])
def test_it_goes_where_it_is_told_and_the_wrong_way_when_told_wrongly(pair: Pair[Any], role: str) -> None:
    policy: OnnxPolicy = getattr(pair.parts, role)
    assert (way(pair, policy, windows(LEFT)) < -0.3).all()
    assert (way(pair, policy, windows(RIGHT)) > 0.3).all()
    # The same words in any case.
    assert np.array_equal(
        way(pair, policy, windows(RIGHT)), way(pair, policy, windows(RIGHT.upper().replace(" ", ", ") + "!"))
    )


def test_words_that_it_does_not_know_say_nothing(pair: Pair[Any]) -> None:
    told = [pair.parts.target.infer_batch(windows(text)) for text in ("fly to the moon", "crawl to the sun", LEFT)]
    for first, second, known in zip(*told, strict=True):
        assert np.isfinite(first.probs).all() and np.array_equal(first.probs, second.probs)
        assert not np.allclose(first.probs, known.probs)


def test_a_manifest_without_words_is_refused(copy: Path) -> None:
    file = copy / "manifest.json"
    manifest = json.loads(file.read_text())
    assert manifest.pop("words") == {"vocabulary": ["go", "left", "right", "the", "to"], "length": 4}
    file.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="must say which words it knows"):
        load_pair(copy)
    # More words than the network was made for.
    file.write_text(json.dumps(manifest | {"words": {"vocabulary": ["go", "left"], "length": 5}}))
    with pytest.raises(BundleError, match="they do not match"):
        load_pair(copy)


def test_fewer_observations_leave_the_words(pair: Pair[Any], tmp_path: Path) -> None:
    pruned = prune_history(pair.parts, 1, tmp_path / "draft.onnx", role="draft")
    shorter = pair.parts.draft.observation.shortened(1)
    assert shorter.instruction
    policy = OnnxPolicy(pruned, pair.parts.spec, shorter, words=pair.parts.manifest.words)
    assert (way(pair, policy, windows(LEFT)) < way(pair, policy, windows(RIGHT)) - 0.5).all()


def test_a_head_and_a_distilled_draft_are_told_as_well(copy: Path, tmp_path: Path) -> None:
    pair = load_pair(copy)
    few = HeadRecipe(hidden=16, steps=60, batch=32, rounds=2, rates=(0.5,))
    with Pool(1) as pool:
        collect = collector(300, pool, quiet, ENV, tmp_path / "frames")
        assert np.isfinite(train_head(pair, few, collect, copy / "gate", quiet)["loss"])
        made = distil(pair, DistilRecipe(rates=(0.5,), rounds=1, steps=300, batch=64), collect, tmp_path / "run", quiet)
    taught, distilled = load_pair(copy), load_pair(made)
    head, drafts = TargetHead.of(taught), taught.parts.draft.infer_batch(windows(LEFT))
    left, right = (head.estimate_batch(windows(told), drafts) for told in (LEFT, RIGHT))
    assert np.abs(left - right).max() > 0.01
    assert distilled.parts.manifest.words == pair.parts.manifest.words
    assert (
        way(distilled, distilled.parts.draft, windows(LEFT)) < way(distilled, distilled.parts.draft, windows(RIGHT))
    ).all()


def test_a_head_looks_at_the_patches_of_its_draft(copy: Path, tmp_path: Path) -> None:
    """The target in the place of the draft, which reads patches of two cameras."""
    manifest = json.loads((copy / "manifest.json").read_text())
    for part in ("policies", "spec", "fingerprints"):
        manifest[part]["draft"] = manifest[part]["target"]
    for ending in ("onnx", "safetensors"):
        shutil.copyfile(copy / f"target.{ending}", copy / f"draft.{ending}")
        manifest["files"][f"draft.{ending}"] = manifest["files"][f"target.{ending}"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    pair = load_pair(copy)
    data, looks = (
        demonstrated_lessons(pair, generate(TASK, 6, 1, 0.0), 20, tmp_path, quiet),
        draft_encoders(pair.parts),
    )
    features = encoded(data, looks)
    assert np.asarray(features.observation["image.front"]).shape == (20, 1, 4 * 32)
    network = TargetHeadNetwork(
        pair.parts.spec, HeadRecipe(hidden=16), features, looks, pair.parts.manifest.words
    ).eval()
    with torch.no_grad():
        outputs, frames = (
            network({name: torch.from_numpy(np.asarray(values)) for name, values in part.observation.items()},
                    torch.from_numpy(part.outputs["draft_probs"]))
            for part in (features, data)
        )  # fmt: skip
    torch.testing.assert_close(outputs, frames)


def test_demonstrated_lessons_demonstrations_hold_the_instruction(pair: Pair[Any], tmp_path: Path) -> None:
    shown = generate(TASK, 6, seed=1, noise=0.0)
    data = demonstrated_lessons(pair, shown, 20, tmp_path, quiet)
    told = np.asarray(data.observation["instruction"])
    assert pair.parts.manifest.words is not None and shown.instructions is not None
    assert np.array_equal(
        told, pair.parts.manifest.words.numbers([shown.instructions[episode] for episode in data.episode])
    )
    # What the target says is what it says to that instruction.
    first = demonstrated_lessons(pair, replace(shown, instructions=(LEFT,) * 6), 20, tmp_path, quiet).outputs[
        "target_probs"
    ]
    assert not np.allclose(first, data.outputs["target_probs"])
    with pytest.raises(ConfigError, match="needs an instruction, and these demonstrations do not say"):
        demonstrated_lessons(pair, replace(shown, instructions=None), 20, tmp_path, quiet)


@pytest.mark.parametrize("history", [{"image.front": 2, "image.top": 1}, {"image.front": 0, "image.top": 1}])
def test_patches_need_a_history_of_one(history: dict[str, int]) -> None:
    """They come before the window: with more, an older observation would see a newer frame."""
    shown = generate(TASK, 3, seed=1, noise=0.0)
    recipe = structs.replace(RECIPE, policies={"target": structs.replace(TARGET, history=history), "draft": DRAFT})
    with pytest.raises(ConfigError, match="give every camera a history of 1"):
        specs_of(recipe, shown)
