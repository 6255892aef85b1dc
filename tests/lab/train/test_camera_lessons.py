"""A learned gate and a distilled draft of a pair whose draft looks through a camera."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.lab.train.dots import demonstrations
from tests.lab.train.test_encoder import RECIPE, SEEING, SMALL
from tests.tiny import quiet

from specact.gates.learned import TargetHead
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.data.sources import Source
from specact.lab.rollout.distillation import Collect, FrameWindows, collect, collector, join
from specact.lab.rollout.pool import Pool
from specact.lab.train.distil import DistilRecipe, distil, draft_encoders
from specact.lab.train.head import HeadRecipe, train_head
from specact.lab.train.train import train
from specact.load import load_pair
from specact.observation import Window

TASK = "tests.lab.train.dots:TASK"
FEW = HeadRecipe(hidden=16, steps=40, batch=32, rounds=2, rates=(0.5,))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles: of ``dots`` the draft's encoder was trained before it, of ``along`` with it."""
    folder, shown = tmp_path_factory.mktemp("dots"), demonstrations()
    arrays = {"image": np.asarray(shown.frames("image")), "place": shown.numbers("place")}
    np.savez(folder / "dots.npz", action=shown.action, episode_ends=shown.ends, **arrays)  # type: ignore[arg-type]
    encoder = structs.replace(SMALL, steps=30)
    recipe = structs.replace(
        RECIPE,
        observations={"image": Source("image"), "place": Source("place")},
        policies={
            "knows": RECIPE.policies["knows"],
            "sees": structs.replace(SEEING, encoder=encoder),
            "along": structs.replace(SEEING, encoder=structs.replace(encoder, learns="")),
        },
        bundles={"dots": ("knows", "sees"), "along": ("knows", "along")},
    )
    train(recipe, folder, folder / "run", quiet)
    return folder / "run" / "bundles"


def roll(pool: Pool, folder: Path) -> Collect:
    return collector(100, pool, quiet, TASK, folder)


def test_frames_are_on_disk_and_each_window_is_the_one_that_the_draft_saw(made: Path, tmp_path: Path) -> None:
    bundle = load_pair(made / "dots")
    with Pool(1) as pool:
        data = collect(bundle, [GateSettings("always")], 100, 0, pool, quiet, 0, TASK, tmp_path)
        more = collect(bundle, [GateSettings("always")], 100, 1, pool, quiet, 0, TASK, tmp_path)
    both = join([data, more])
    for part, first in ((data, 0), (more, len(data))):
        windows, joined = part.observation["image"], both.observation["image"]
        assert isinstance(windows, FrameWindows) and isinstance(joined, FrameWindows)
        assert not windows.frames.in_memory and list(tmp_path.glob("image-*.npy"))
        for row in (0, 7, len(part) - 1):
            frames = np.asarray(windows[np.array([row])])[0]
            assert frames.shape == (2, 32, 32, 3)
            assert np.array_equal(frames, np.asarray(joined[np.array([first + row])])[0])
            found = bundle.parts.draft.infer(Window({"image": frames})).probs
            assert np.abs(found - part.outputs["draft_probs"][row]).max() < 1e-5
    train_part, held_out = both.split(every=4)
    assert len(train_part) + len(held_out) == len(both) > len(held_out) > 0


def test_the_head_looks_with_the_drafts_encoder(made: Path, tmp_path: Path) -> None:
    bundle = load_pair(made / "dots")
    with Pool(1) as pool:
        metrics = train_head(bundle, FEW, roll(pool, tmp_path / "frames"), bundle.parts.path / "gate", quiet)
    assert np.isfinite(metrics["loss"])
    taught = load_pair(made / "dots")
    head, gate = TargetHead.of(taught), gate_settings("learned", taught).build(taught)
    frames = demonstrations().frames("image")
    windows = [Window({"image": frames[np.array(rows)]}) for rows in ((0, 0), (50, 50))]
    drafts = taught.parts.draft.infer_batch(windows)
    one, other = (head.estimate(window, drafts[0]) for window in windows)
    assert np.abs(one - other).max() > 1e-4  # the same proposal, another frame
    rng = np.random.default_rng(0)
    assert 0.0 <= gate.score(taught.drafter().propose(windows[0], rng), rng) <= 1.0


@pytest.mark.parametrize("name", ["dots", "along"])
def test_a_distilled_draft_keeps_an_encoder_that_was_trained_before_it(made: Path, tmp_path: Path, name: str) -> None:
    bundle = load_pair(made / name)
    recipe = DistilRecipe(rates=(0.5,), rounds=1, steps=10, batch=16)
    with Pool(1) as pool:
        path = distil(bundle, recipe, roll(pool, tmp_path / "frames"), tmp_path / "run", quiet)
    distilled = load_pair(path)
    kept, new = (draft_encoders(pair.parts)["image"].state_dict() for pair in (bundle, distilled))
    same = all(torch.equal(kept[key], new[key]) for key in kept)
    assert same == (name == "dots")
    assert distilled.name == f"{name}-distilled"
    assert distilled.parts.manifest.distilled["held_out"]["cross_entropy"] > 0.0
