"""The learned gate of chunks, tokens and flows: it learns where the target differs, and is tied to its pair."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from scipy import stats
from tests.lab.train.test_drafters import write_target
from tests.tiny import quiet

from specact.bundle.bundle import find_bundle
from specact.errors import BundleError, ConfigError, DataError
from specact.families.chunks import PairSettings
from specact.families.chunks.pair import chunk_distance
from specact.families.chunks.policy import Chunk
from specact.families.chunks.sources import Inputs, chunk_policy
from specact.gates import LearnedDistance
from specact.gates.calibration import calibrated_gate
from specact.gates.learned import DistanceHead
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.data.episodes import Episodes
from specact.lab.evaluation.offline import calibrate_offline
from specact.lab.evaluation.run import Evaluation, evaluate
from specact.lab.rollout.distillation import collector
from specact.lab.rollout.methods import HYBRID
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import Shard, run_shard
from specact.lab.train.head import HeadRecipe, demonstrated_lessons, train_head
from specact.load import load_pair, make_pair
from specact.observation import Window
from specact.pair import Pair

SMALL, LARGE = f"{__name__}:small", f"{__name__}:large"
FEW = HeadRecipe(hidden=32, steps=300, batch=128, rounds=1)


LOW, HIGH = (-1.0, -1.0), (1.0, 1.0)


@chunk_policy(
    observation={"state": (8,)}, chunk=4, actions=2, rate_hz=20.0, seeded=True, fingerprint="small", low=LOW, high=HIGH
)
def small(inputs: Inputs, rngs: Sequence[np.random.Generator]) -> Chunk:
    """Stands still, nearly."""
    return np.stack([rng.normal(0.0, 0.01, (4, 2)) for rng in rngs]).astype(np.float32)


@chunk_policy(observation={"state": (8,)}, chunk=4, actions=2, rate_hz=20.0, fingerprint="large", low=LOW, high=HIGH)
def large(inputs: Inputs) -> Chunk:
    """Goes back to the middle."""
    return np.repeat(-0.5 * inputs["state"][:, -1:, :2], 4, axis=1).astype(np.float32)


def shown(episodes: int, seed: int) -> Episodes:
    rng = np.random.default_rng(seed)
    state = rng.uniform(-1.0, 1.0, (25 * episodes, 8)).astype(np.float32)
    return Episodes({"state": state}, np.zeros((len(state), 2), np.float32), 25 * np.arange(1, episodes + 1), 20.0)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Pair[Any]:
    """A pair with a head."""
    folder = tmp_path_factory.mktemp("learned") / "pair"
    make_pair(folder, SMALL, LARGE, PairSettings(execute=2, env="ball"))
    pair = load_pair(folder, draft=SMALL, target=LARGE)
    lessons = demonstrated_lessons(pair, shown(60, 0), 1500, folder / "gate", quiet)
    train_head(pair, FEW, lambda *_: lessons, folder / "gate", quiet)
    shutil.rmtree(folder / "gate")
    return load_pair(folder, draft=SMALL, target=LARGE)


def test_its_score_is_how_far_the_targets_actions_are(learned: Pair[Any]) -> None:
    gate, rng = gate_settings("learned", learned).build(learned), np.random.default_rng(0)
    judged = demonstrated_lessons(learned, shown(8, 1), 200, Path(), quiet)  # the head was not taught these
    drafts = [
        replace(learned.drafter().propose(Window({"state": state}), rng), actions=drafted)
        for state, drafted in zip(np.asarray(judged.observation["state"]), judged.outputs["drafted"], strict=True)
    ]
    scores = [gate.score(draft, rng) for draft in drafts]
    assert stats.spearmanr(scores, judged.outputs["drafted_distance"]).statistic > 0.9
    head, zeros = DistanceHead.of(learned), np.zeros((4, 2), np.float32)
    near, far = (head.estimate(Window({"state": np.full((1, 8), at, np.float32)}), zeros) for at in (0.05, 0.9))
    assert near < 0.15 < 0.35 < far < 0.55  # the target's actions are .025 and .45 away


def test_it_is_calibrated_and_kept_like_any_other_gate(learned: Pair[Any], tmp_path: Path) -> None:
    path = Path(shutil.copytree(learned.path or "", tmp_path / "pair"))
    pair = load_pair(path, draft=SMALL, target=LARGE)
    with Pool(1) as pool:
        made = calibrate_offline(pair, gate_settings("learned", pair), 0.4, shown(20, 2), pool, quiet)
    assert made.held_out["rate"] == pytest.approx(0.4, abs=0.15) and made.model["spearman"] > 0.8
    made.save(path / "calibration")
    assert calibrated_gate(pair, "learned", 0.4).threshold == made.settings.threshold
    file = path / "calibration" / "learned-0.40.json"
    file.write_text(file.read_text().replace(dict(made.settings.options)["weights"], "0123456789abcdef"))
    with pytest.raises(BundleError, match=r"gate\.onnx has fingerprint \w+, but the gate was calibrated for 0123"):
        calibrated_gate(pair, "learned", 0.4)


def test_what_it_cannot_be_for_is_refused(learned: Pair[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'chunks'"):
        gate_settings("learned_action", learned)
    monkeypatch.chdir(Path(__file__).parents[1] / "thirdparty")
    pair = load_pair("my_family:pair")
    with Pool(1) as pool, pytest.raises(ConfigError, match="family"):
        train_head(pair, FEW, collector(10, pool, quiet), tmp_path, quiet)
    with pytest.raises(ConfigError, match="lessons"):
        demonstrated_lessons(learned, shown(2, 0), 0, tmp_path, quiet)
    with pytest.raises(DataError, match="two demonstrations"):
        demonstrated_lessons(learned, shown(1, 0), 10, tmp_path, quiet)
    blind = replace(shown(2, 0), observation={"joints": shown(2, 0).numbers("state")})
    with pytest.raises(ConfigError, match="state"):
        demonstrated_lessons(learned, blind, 10, tmp_path, quiet)


# A target's bundle, its environment, and the decoding whose proposals the gate judges.
TARGETS = {"tokens": ("ball", "strict_last"), "flow": ("ball-chase", "flash_last")}


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("target") / "policy"
    made = write_target(folder.parent / "run").path if request.param == "tokens" else find_bundle("ball-chase-flow")
    shutil.copytree(made, folder)
    return folder, *TARGETS[request.param]


def test_it_learns_from_what_a_decoding_proposes(target: tuple[Path, str, str]) -> None:
    path, env, decoding = target
    pair = load_pair(path, decoding=decoding)
    shard = Shard.of(pair, env, HYBRID, GateSettings("random", threshold=0.5), (0, 1), 0)
    _, table = run_shard(replace(shard, learning=True))
    assert table["drafted"].shape == (len(table["step"]), pair.execute, len(pair.units.centre))
    # What is learned is the distance of the proposal, not of what was executed, which is 0 on verified steps.
    assert table["drafted_distance"][table["transmitted"]].max() > 0.01
    # One step later the same proposal would be at another distance.
    wanted, drafted = table["wanted"][:, : pair.execute], table["drafted"]
    distances = [chunk_distance(*both) for both in zip(drafted, wanted, strict=True)]
    np.testing.assert_allclose(table["drafted_distance"], distances, atol=1e-6)
    shifted = [chunk_distance(*both) for both in zip(drafted[:-1], wanted[1:], strict=True)]
    assert np.abs(table["drafted_distance"][:-1] - shifted).max() > 0.01


def test_it_stands_before_token_and_flow_policies(target: tuple[Path, str, str], tmp_path: Path) -> None:
    path, env, decoding = target
    folder = Path(shutil.copytree(path, tmp_path / "policy"))
    with Pool(1) as pool:
        recipe = structs.replace(FEW, steps=200, rates=(0.5,))
        roll = collector(400, pool, quiet, env)
        metrics = train_head(load_pair(folder, decoding=decoding), recipe, roll, folder / "gate", quiet)
        shutil.rmtree(folder / "gate")
        what = Evaluation(
            str(folder), env=env, methods=("draft", "random_learned", "learned"), episodes=4, rate=0.5,
            calibration_episodes=4, decoding=decoding,
        )  # fmt: skip
        rows = evaluate(what, tmp_path / "run", quiet, pool)["methods"]
        if env == "ball":  # over real sockets, too
            real = replace(what, methods=("learned",), episodes=1, realtime=True, link="loopback")
            served = evaluate(real, tmp_path / "real", quiet, pool)["methods"]["learned"]
            assert served["missed"] == 0.0 < served["sent"] < 1.0
    assert metrics["spearman"] > 0.1  # a head of 200 steps; a trained one has 0.9 above
    assert rows["draft"]["sent"] == 0.0 < rows["learned"]["sent"] < 1.0
    assert rows["learned"]["sent"] == pytest.approx(rows["random_learned"]["sent"], abs=0.2)
    assert rows["learned"]["cost"]["head_parameters"] > 0 < rows["learned"]["cost"]["head_ms"]
    # Its calibration belongs to this decoding.
    shutil.copytree(tmp_path / "run" / "calibration", folder / "calibration")
    stored = f"learned-0.50-{decoding}"
    assert isinstance(calibrated_gate(load_pair(folder, decoding=decoding), "learned", 0.5), LearnedDistance)
    with pytest.raises(ConfigError, match=stored):
        calibrated_gate(load_pair(folder), "learned", 0.5)
    # So does its head.
    variant = load_pair(folder, decoding="last" if decoding == "strict_last" else "flash")
    with pytest.raises(BundleError, match=f"'{decoding}'.* --retrain"):
        gate_settings("learned", variant).build(variant)
    (folder / "calibration" / f"{stored}.json").rename(folder / "calibration" / "learned-0.50.json")
    with pytest.raises(BundleError, match=f"'{decoding}'"):
        calibrated_gate(load_pair(folder), "learned", 0.5)
