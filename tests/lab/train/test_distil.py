"""A distilled draft: same architecture, same target, closer to it; of codes, of chunks, and with a camera."""

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
from tests.lab.train.dots import demonstrations
from tests.lab.train.test_encoder import RECIPE, SEEING, SMALL
from tests.tiny import KilledError, kill_at, quiet

from specact.bundle.manifest import fingerprint_of
from specact.errors import ConfigError
from specact.families.chunks.pair import ChunkParts, PairSettings
from specact.families.codes.pair import PARTS
from specact.files import write_json
from specact.gates.learned import TargetHead
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.data.frames import FrameWindows
from specact.lab.data.readers import Source
from specact.lab.rollout.distillation import Collect, DistillationData, collector, join
from specact.lab.rollout.pool import Pool
from specact.lab.train.distil import DistilRecipe, distil, draft_encoders
from specact.lab.train.head import HeadRecipe, train_head
from specact.lab.train.loop import Progress
from specact.lab.train.recipe import ChunkRecipe
from specact.lab.train.train import train
from specact.load import load_pair, make_pair
from specact.observation import Window
from specact.pair import Pair

FEW = DistilRecipe(rates=(0.0, 0.5), steps=600, batch=128)


def teach(bundle: Path, out: Path, progress: Progress = quiet) -> Pair[Any]:
    with Pool(1) as pool:

        def roll(pair: Pair[Any], gates: Sequence[GateSettings], number: int) -> DistillationData:
            return collector(1500, pool, quiet)(pair, gates, number)

        return load_pair(distil(load_pair(bundle), FEW, roll, out, progress))


@pytest.fixture(scope="module")
def distilled(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair[Any], Path]:
    out = tmp_path_factory.mktemp("distilled")
    return teach(tiny_bundle, out), out


def rejection(bundle: Pair[Any], states: DistillationData) -> float:
    """Mean total variation of draft and target over states and codebooks."""
    windows = [
        Window({name: np.asarray(values)[row] for name, values in states.observation.items()})
        for row in range(len(states))
    ]
    draft, target = (policy.infer_batch(windows) for policy in (bundle.parts.draft, bundle.parts.target))
    return float(np.mean([0.5 * np.abs(q.probs - p.probs).sum(-1) for q, p in zip(draft, target, strict=True)]))


def test_it_is_closer_to_the_target_where_the_gated_policy_goes(
    tiny_bundle: Path, distilled: tuple[Pair[Any], Path]
) -> None:
    """On the states of either pair, none of which it was taught on."""
    original, made = load_pair(tiny_bundle), distilled[0]
    for pair in (original, made):
        with Pool(1) as pool:
            states = collector(500, pool, quiet)(pair, [GateSettings("random", threshold=0.5)], 7)
        assert rejection(made, states) < 0.7 * rejection(original, states)


def test_only_the_draft_is_new(tiny_bundle: Path, distilled: tuple[Pair[Any], Path]) -> None:
    original, made = load_pair(tiny_bundle), distilled[0]
    for part in ("target", "tokenizer"):
        assert fingerprint_of(made.parts.path / PARTS[part]) == fingerprint_of(original.parts.path / PARTS[part])
    assert made.name == "tiny-distilled"
    assert made.parts.spec == original.parts.spec
    assert made.parts.manifest.distilled["from"] == original.fingerprint
    assert made.fingerprint != original.fingerprint
    assert not (made.parts.path / "calibration").exists()  # the old thresholds are not for this draft


def test_a_stopped_run_ends_like_one_that_was_not(
    tiny_bundle: Path, distilled: tuple[Pair[Any], Path], tmp_path: Path
) -> None:
    with pytest.raises(KilledError):
        teach(tiny_bundle, tmp_path, kill_at("distilled-1", 270))
    rerun = teach(tiny_bundle, tmp_path)
    assert fingerprint_of(rerun.parts.path / PARTS["draft"]) == fingerprint_of(distilled[0].parts.path / PARTS["draft"])


def test_a_bundle_that_does_not_say_how_its_draft_was_made_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["policies"]
    write_json(copy / "manifest.json", manifest)
    with pytest.raises(ConfigError, match="does not say how its draft was made"):
        teach(copy, tmp_path / "out")


# --- drafts of chunks ---


LARGE = "tests.lab.rollout.chunk_policies:large"
DRAFT = ChunkRecipe(
    kind="regression", bundle="small", env="ball", generate_episodes=6, window=2, chunk=4, layers=1, heads=2,
    width=16, dropout=0.0, steps=250, batch=64, learning_rate=4e-3, warmup=20, average=0.9, bfloat16=False,
)  # fmt: skip
FEW_CHUNKS = DistilRecipe(rates=(0.0, 0.5), rounds=2)


def lessons(pair: Pair[Any], number: int, wanted: int = 400) -> DistillationData:
    with Pool(1) as pool:
        return collector(wanted, pool, quiet)(pair, [GateSettings("random", threshold=0.5)], number)


def teach_chunks(pair: Pair[Any], out: Path, *, shuffled: bool = False) -> Pair[Any]:
    def roll(now: Pair[Any], gates: Sequence[GateSettings], number: int) -> DistillationData:
        data = lessons(now, number)
        if not shuffled:
            return data
        rows = np.random.default_rng(0).permutation(len(data))
        return replace(data, outputs={**data.outputs, "wanted": data.outputs["wanted"][rows]})

    made = load_pair(distil(pair, FEW_CHUNKS, roll, out, quiet), target=LARGE)
    assert isinstance(made.parts, ChunkParts)
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair[Any]:
    """A draft of the expert's demonstrations before a target that acts by another law."""
    folder = tmp_path_factory.mktemp("chunks")
    made = train(DRAFT, folder, folder / "run", quiet)
    return make_pair(folder / "pair", str(made.bundles[0]), LARGE, PairSettings(execute=2, env="ball"))


@pytest.mark.nightly
def test_it_is_closer_to_the_target_where_the_gated_pair_goes(pair: Pair[Any], tmp_path: Path) -> None:
    """On states of either pair that nobody was taught on; with answers to other states it is not."""
    made, wrong = teach_chunks(pair, tmp_path / "right"), teach_chunks(pair, tmp_path / "wrong", shuffled=True)
    mean = {student.name: float(lessons(student, 7).outputs["drafted_distance"].mean()) for student in (pair, made)}
    assert mean[made.name] < 0.5 * mean[pair.name]
    assert mean[made.name] < 0.5 * float(lessons(wrong, 7).outputs["drafted_distance"].mean())
    # The same command again finds its rounds finished, and ends with the same draft.
    assert teach_chunks(pair, tmp_path / "right").fingerprint == made.fingerprint != wrong.fingerprint
    assert made.name == "pair-distilled" and made.parts.draft.spec == pair.parts.draft.spec
    assert (made.execute, made.env, made.fingerprint != pair.fingerprint) == (2, "ball", True)


def test_a_draft_of_unknown_making_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    made = make_pair(tmp_path / "pair", f"{tiny_bundle}#draft", f"{tiny_bundle}#target", PairSettings(env="ball"))
    with pytest.raises(ConfigError, match=r'the draft of pair is no bundle .* kind = "regression" or "flow"'):
        distil(made, FEW_CHUNKS, lambda *_: lessons(made, 0), tmp_path / "out", quiet)


# --- a draft with a camera, and its gate's head ---


DOTS = "tests.lab.train.dots:TASK"
FEW_HEAD = HeadRecipe(hidden=16, steps=40, batch=32, rounds=2, rates=(0.5,))


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
    return collector(100, pool, quiet, DOTS, folder)


def test_frames_are_on_disk_and_each_window_is_the_one_that_the_draft_saw(made: Path, tmp_path: Path) -> None:
    bundle = load_pair(made / "dots")
    with Pool(1) as pool:
        data, more = (roll(pool, tmp_path)(bundle, [GateSettings("always")], number) for number in (0, 1))
    both = join([data, more])
    for part, first in ((data, 0), (more, len(data))):
        windows, joined = part.observation["image"], both.observation["image"]
        assert isinstance(windows, FrameWindows) and isinstance(joined, FrameWindows)
        assert not windows.frames.in_memory and list(tmp_path.glob("image-*.npy"))
        for row in (0, 7, len(part) - 1):
            frames = np.asarray(windows[np.array([row])])[0]
            assert frames.shape == (2, 32, 32, 3)
            assert np.array_equal(frames, np.asarray(joined[np.array([first + row])])[0])
            probs = bundle.parts.draft.infer(Window({"image": frames})).probs
            assert np.abs(probs - part.outputs["draft_probs"][row]).max() < 1e-5
    train_part, held_out = both.split(every=4)
    assert len(train_part) + len(held_out) == len(both) > len(held_out) > 0


def test_the_head_looks_with_the_drafts_encoder(made: Path, tmp_path: Path) -> None:
    bundle = load_pair(made / "dots")
    with Pool(1) as pool:
        metrics = train_head(bundle, FEW_HEAD, roll(pool, tmp_path / "frames"), bundle.parts.path / "gate", quiet)
    assert np.isfinite(metrics["loss"])
    taught = load_pair(made / "dots")
    head, gate = TargetHead.of(taught), gate_settings("learned", taught).build(taught)
    frames = demonstrations().frames("image")
    windows = [Window({"image": frames[np.array(rows)]}) for rows in ((0, 0), (50, 50))]
    drafts = taught.parts.draft.infer_batch(windows)
    first, second = (head.estimate(window, drafts[0]) for window in windows)
    assert np.abs(first - second).max() > 1e-4  # the same proposal, another frame
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
