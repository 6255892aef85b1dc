"""Drafters that learn from a token policy's own rollouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.tiny import quiet

from specact.errors import BundleError, ConfigError, DataError
from specact.families.chunks.flow import FlowUnits
from specact.families.chunks.policy import ChunkSpec
from specact.families.tokens.policy import TokenBundle, causal, load_tokens
from specact.families.tokens.speculative import Candidates, TreeDrafter, relaxed
from specact.lab.rollout.distillation import TokenRollouts, read_rollouts
from specact.lab.rollout.statistics import wilson
from specact.lab.rollout.steps import SHARD
from specact.lab.train.attention import unknown
from specact.lab.train.chunks import write_chunk_bundle
from specact.lab.train.drafters import (
    DrafterHead,
    accepted_tokens,
    bigram_of,
    fit_skip,
    head_loss,
    least_worthwhile,
    output_layer,
)
from specact.lab.train.fit import TrainingResult
from specact.lab.train.flow import TokenModel
from specact.lab.train.loop import Progress
from specact.lab.train.recipe import ChunkRecipe, DrafterRecipe
from specact.lab.train.train import train
from specact.observation import vectors
from specact.systems.heisd import SkipRule
from specact.systems.tokens import load_drafters

SPEC = ChunkSpec(vectors(1, goal=2, state=8), 3, 2, 20.0)
LENGTH, WIDTH = 6, 32
TARGET = ChunkRecipe(
    kind="tokens", bundle="small", env="ball", generate_episodes=1, window=1, chunk=3, layers=2, heads=2, width=WIDTH,
    dropout=0.0,
)  # fmt: skip
RECIPE = DrafterRecipe(
    kind="drafters", bundle="drafted", target="", episodes=2 * SHARD, strict=(1,), heads=2, ahead=3, steps=300,
    batch=32, learning_rate=3e-3, warmup=10, average=0.98, bfloat16=False,
)  # fmt: skip


def train_drafters(recipe: DrafterRecipe, out: Path, progress: Progress, *, jobs: int = 1) -> TrainingResult:
    return train(recipe, Path(), out, progress, jobs=jobs, every=50)


def write_target(folder: Path, seed: int = 0) -> TokenBundle:
    """A token policy with random weights: it drives badly, but what it says depends on what it sees and wrote."""
    torch.manual_seed(seed)
    model = TokenModel(SPEC, TARGET, unknown(SPEC.observation.fields), None)
    with torch.no_grad():
        model.embedding.weight.normal_()
        model.decoder.write.weight.normal_()
    whole = np.ones(2, np.float32)
    units = FlowUnits(np.zeros(2, np.float32), whole, -whole, whole)
    write_chunk_bundle(folder, {"name": "small", "env": "ball"}, TARGET, model, units)
    return load_tokens(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TokenBundle:
    return write_target(tmp_path_factory.mktemp("target") / "small")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TokenBundle:
    return write_target(tmp_path_factory.mktemp("other") / "small", seed=5)


@pytest.fixture(scope="module")
def run(target: TokenBundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drafters") / "run"
    train_drafters(recipe_for(target), out, quiet)
    return out


def recipe_for(target: TokenBundle) -> DrafterRecipe:
    return structs.replace(RECIPE, target=str(target.path))


def rollouts(run: Path) -> TokenRollouts:
    return read_rollouts(sorted((run / "rollouts").iterdir()))


def untrained(target: TokenBundle) -> DrafterHead:
    torch.manual_seed(1)
    embedding = torch.randn(256, WIDTH)
    return DrafterHead(embedding, output_layer(target.path / "decoder.onnx"), LENGTH, 2, 0.0).eval()


def test_what_is_recorded_is_what_the_target_writes_and_reads_it_from(target: TokenBundle, run: Path) -> None:
    made = rollouts(run)
    assert made.tokens.shape[1:] == (LENGTH,) and made.features.shape[1:] == (LENGTH, WIDTH)
    assert len(np.unique(made.episode)) == 2 * SHARD and (made.step % SPEC.chunk == 0).all()
    logits = output_layer(target.path / "decoder.onnx")(torch.from_numpy(made.features).float()).detach().numpy()
    best = np.sort(logits, -1)
    clear = best[..., -1] - best[..., -2] > 0.1  # more than half precision takes away
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(logits.argmax(-1)[clear], made.tokens[clear])
    assert made.seen.shape[1:] == (WIDTH,)


def test_it_learns(target: TokenBundle, run: Path) -> None:
    made = rollouts(run)
    rows = made.episode >= made.episode.min() + SHARD
    shown = torch.from_numpy(made.tokens[rows]).long(), torch.from_numpy(made.features[rows]).float()
    with torch.no_grad():
        _, before = head_loss(untrained(target), *shown, RECIPE, 0.0)
    after = json.loads((run / "log.jsonl").read_text().splitlines()[-1])["held_out"]
    assert after["agreement"] > 2.0 * before["agreement"] + 0.05
    assert after["cross_entropy"] < 0.8 * before["cross_entropy"] and after["feature_l1"] < before["feature_l1"]


def test_unrolled_is_what_reading_one_token_after_the_other_gives(target: TokenBundle) -> None:
    """In float64, where both agree to many digits: the target's features up to a place, then the head's own."""
    head = untrained(target).double()
    tokens, features = torch.randint(256, (2, LENGTH)), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        predictions = head.unrolled(tokens, features, 4)
        for behind in range(4):
            for place in range(behind, LENGTH - 1):
                read = features.clone()
                for index in range(place - behind, place + 1):
                    among = torch.from_numpy(causal(2, index + 1).copy())
                    inputs = tokens[:, : index + 1], read[:, : index + 1], torch.arange(index + 1)[None], among
                    predicted, _ = head.predicted(*inputs, None)
                    read[:, index + 1] = predicted[:, -1]
                torch.testing.assert_close(predictions[behind][:, place], read[:, place + 1])


def test_drafters_of_another_target_are_refused(run: Path, stranger: TokenBundle) -> None:
    with pytest.raises(BundleError, match="made for the target"):
        load_drafters(run / "bundles" / "drafted", stranger)
    with pytest.raises(BundleError, match="drafters"):
        load_tokens(run / "bundles" / "drafted")


def test_bigrams_are_frequencies_and_of_unseen_tokens_the_places_own() -> None:
    tokens = np.array([[1, 5, 7], [1, 5, 8], [1, 6, 8], [2, 6, 8]], np.uint8)
    table = bigram_of(tokens, 3)
    assert table["tokens"].shape == (2, 256, 3)
    # After 1: 5 twice, 6 once; and as one more, half of each.
    np.testing.assert_array_equal(table["tokens"][0, 1, :2], [5, 6])
    np.testing.assert_allclose(np.exp(table["log_probs"][0, 1, :2].astype(float)), [2.5 / 4, 1.5 / 4], rtol=1e-3)
    # Nothing ever came after 200 in the second place: 8 three times of four.
    np.testing.assert_array_equal(table["tokens"][1, 200, :2], [8, 7])
    np.testing.assert_allclose(np.exp(table["log_probs"][1, 200, :2].astype(float)), [0.75, 0.25], rtol=1e-3)


@pytest.mark.parametrize(("changed", "said"), [({"strict": (2,)}, "strict"), ({"heads": 3}, "heads must divide")])
def test_a_recipe_that_does_not_fit_its_target_is_refused(
    target: TokenBundle, tmp_path: Path, changed: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train_drafters(structs.replace(recipe_for(target), **changed), tmp_path / "run", quiet)
    assert not (tmp_path / "run").exists()


# --- HeiSD's boundary ---


def test_the_memory_drafts_where_more_of_its_tokens_are_accepted() -> None:
    """Of chunks of 8; as whole chunks of it are never accepted, a boundary fitted to these would leave it out."""
    rng = np.random.default_rng(0)
    speeds = rng.uniform(size=2000)
    memory, head = rng.binomial(7, np.where(speeds > 0.6, 0.7, 0.2)), rng.binomial(7, 0.4, 2000)
    assert least_worthwhile(speeds, memory - head) == pytest.approx(0.6, abs=0.02)
    assert least_worthwhile(speeds, np.where(memory == 8, 1, -1)) > speeds.max()
    assert least_worthwhile(speeds, memory + 1) == speeds.min()


def test_accepted_tokens_are_what_is_left_of_a_chunk_without_its_passes() -> None:
    rng = np.random.default_rng(0)
    wanted = rng.integers(20, 230, (40, 6))
    columns = {name: np.zeros((40, 6 * (name == "features"), 2)) for name in ("features", "seen", "state")}
    known = np.arange(40)
    made = TokenRollouts(known, known, wanted.astype(np.uint8), success=known > 0, **columns)  # type: ignore[arg-type]

    def accepted(bias: np.ndarray, bins: int) -> Any:
        drafts = [Candidates(chunk[None]) for chunk in wanted + bias]
        return np.unique(accepted_tokens(made, relaxed(bins, 6, 2), TreeDrafter(), drafts)).tolist()

    # Two passes for the first and the last token; none drafted; only the first two before one that is too far away.
    assert accepted(np.zeros(6, int), 0) == [4] and accepted(np.full(6, 5), 4) == [0]
    assert accepted(np.array([0, 5, 5, 6, 0, 0]), 5) == [2] and accepted(np.full(6, 5), 5) == [4]


def test_only_the_bounds_of_drafters_are_fitted_again(target: TokenBundle, run: Path, tmp_path: Path) -> None:
    """As of drafters whose boundary is wrong; the networks, and what else was fitted, stay."""
    wrong = tmp_path / "wrong"
    shutil.copytree(run / "bundles" / "drafted", wrong)
    manifest = json.loads((wrong / "manifest.json").read_text())
    right = manifest["spec"]["settings"] | {}
    manifest["spec"]["settings"] |= {"fast": 99.0, "scale": 7.0}
    (wrong / "manifest.json").write_text(json.dumps(manifest))
    train_drafters(structs.replace(recipe_for(target), keeps=str(wrong)), tmp_path / "again", quiet)
    refit = load_drafters(tmp_path / "again" / "bundles" / "drafted", target)
    old = load_drafters(run / "bundles" / "drafted", target)
    assert refit.fingerprint == old.fingerprint and refit.settings.scale == 7.0
    assert refit.settings.fast == right["fast"] and refit.settings.filters == old.settings.filters
    assert refit.manifest.training["boundary"] == old.manifest.training["boundary"]
    assert len(list((tmp_path / "again" / "rollouts").iterdir())) == 1, "only what is held out is recorded"


# --- HeiSD's verify-skip ---


def arcs(angles: np.ndarray) -> np.ndarray:
    """Features whose cosines are those of the angles between them."""
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_the_least_similarity_that_is_safe_is_found() -> None:
    # Steps turn by up to 0.6; what comes after a turn of less than 0.2 is safe, and nothing else is.
    rng = np.random.default_rng(0)
    turns = rng.uniform(0.0, 0.6, (40, 60))
    features = [arcs(np.cumsum(turn)) for turn in turns]
    rule = fit_skip(features, [turn < 0.2 for turn in turns], 1)
    assert rule.distance == 1
    # With 5 % of unsafe pairs among them, less what Wilson's bound wants.
    assert np.cos(0.2 / 0.95) < rule.similarity < np.cos(0.195)
    # One that is a little less similar is not safe enough.
    safe = turns[:, 1:] < 0.2
    for less, enough in ((1e-6, True), (0.004, False)):
        among = safe[np.cos(turns[:, 1:]) >= rule.similarity - less]
        assert (wilson(int(among.sum()), len(among)).low >= 0.95) == enough


@pytest.mark.parametrize("reach", [1, 3, 5])
def test_the_distance_ends_where_it_is_no_longer_safe(reach: int) -> None:
    # In half of the episodes all steps look alike, and are safe. In the others the last step looks like the first one,
    # one step further away, and is not; those between look like nothing else.
    apart = np.eye(reach + 2)
    apart[-1] = apart[0]
    episodes = [(np.tile(apart[:1], (reach + 1, 1)), True), (apart, False)] * 100
    features, safe = zip(*[(seen, np.full(len(seen), fine)) for seen, fine in episodes], strict=True)
    rule = fit_skip(features, safe, 8)
    assert rule == SkipRule(1.0, reach)


def test_where_nothing_is_safe_enough_it_never_skips() -> None:
    rng = np.random.default_rng(3)
    features = [rng.normal(size=(50, 3)) for _ in range(20)]
    rule = fit_skip(features, [rng.random(50) < 0.8 for _ in range(20)], 6)
    assert rule == SkipRule() and rule.distance == 0
    # A few pairs say too little, though all are safe: 72 are too few for the bound, 73 are not.
    few = [arcs(np.zeros(73)), arcs(np.zeros(74))]
    assert [fit_skip([arc], [np.ones(len(arc), np.bool_)], 1).distance for arc in few] == [0, 1]


def test_pairs_are_of_one_episode() -> None:
    # Between the episodes everything changes, and what comes after that is unsafe.
    features = [arcs(np.full(5, angle)) for angle in np.linspace(0.0, 1.0, 60)]
    safe = [np.array([False, True, True, True, True])] * 60
    rule = fit_skip(features, safe, 3)
    assert rule.distance == 3


def test_episodes_without_pairs_are_refused() -> None:
    for features in ([], [np.ones((1, 3))]):
        with pytest.raises(DataError, match="at least two steps"):
            fit_skip(features, [np.ones(len(episode), np.bool_) for episode in features], 3)
