"""Training of a corrector: an example is a step with the chunk of some steps before, and what is learned is now's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lab.train.dots import demonstrations
from tests.tiny import quiet

pytest.importorskip("mujoco")

from specact.errors import BundleError, ConfigError
from specact.families.chunks.policy import Chunk
from specact.families.chunks.sources import Inputs, chunk_policy
from specact.files import write_json
from specact.gates.audit import AuditEstimator
from specact.gates.gate import Periodic
from specact.lab.evaluation.calibrate import calibrate
from specact.lab.train.corrector import Steps, example_of
from specact.lab.train.fit import TrainingResult
from specact.lab.train.recipe import CorrectorRecipe, load_recipe
from specact.lab.train.train import train
from specact.load import load_exchange, load_pair
from specact.observation import Field, Window
from specact.policy import SpeculativePolicy
from specact.systems.corrector import CorrectorSpec, age_features, base

TARGET, EPISODES = f"{__name__}:chaser", 20


@chunk_policy(
    observation={"state": Field((8,), history=1), "goal": Field((2,), history=0)}, chunk=6, actions=2, rate_hz=20.0,
    low=(-1.0, -1.0), high=(1.0, 1.0), fingerprint="c",
)  # fmt: skip
def chaser(inputs: Inputs) -> Chunk:
    """Where the ball should roll, six times the same: what it says now, an observation of now alone tells."""
    state = inputs["state"][:, -1]
    action = 1.5 * (inputs["goal"] - state[:, :2]) - 1.5 * state[:, 2:4]
    return np.repeat(np.clip(action, -1.0, 1.0)[:, None], 6, axis=1)


@chunk_policy(
    observation={"state": Field((8,), history=1), "goal": Field((2,), history=0)}, chunk=6, actions=2, rate_hz=20.0,
    low=(-1.0, -1.0), high=(1.0, 1.0), fingerprint="another",
)  # fmt: skip
def another(inputs: Inputs) -> Chunk:
    return chaser.infer_batch([], [])  # type: ignore[return-value]


def recipe(method: Any = "corrector", **changes: Any) -> CorrectorRecipe:
    few = {"bundle": "c", "target": TARGET, "env": "ball", "episodes": EPISODES, "most_delay": 3, "steps": 250,
           "batch": 128}  # fmt: skip
    return CorrectorRecipe(kind="corrector", method=method, hidden=32, **{**few, **changes})


@chunk_policy(
    observation={"agent": Field((2,), history=1), "image": Field((96, 96, 3), "uint8", history=0)},
    chunk=4, actions=2, rate_hz=10.0, low=(0.0, 0.0), high=(512.0, 512.0), fingerprint="pushing",
)  # fmt: skip
def pusher(inputs: Inputs) -> Chunk:
    """Where the agent is, without looking."""
    return np.repeat(256.0 + 100.0 * inputs["agent"][:, -1:], 4, axis=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    return train(recipe(), Path(), tmp_path_factory.mktemp("corrector"), quiet)


def held_out(result: TrainingResult) -> dict[str, float]:
    metrics: dict[str, float] = result.metrics["corrector"]["held_out"]
    return metrics


def test_an_example_shows_the_chunk_of_before_and_its_action_for_now() -> None:
    chunk = np.arange(5 * 4, dtype=np.float32).reshape(5, 4, 1)
    steps = Steps({}, np.arange(5), chunk, chunk[:, 0])
    based, index = example_of(steps, np.array([4, 3, 2]), np.array([3, 0, 1]))
    for row, (at, age) in enumerate([(4, 3), (3, 0), (2, 1)]):
        np.testing.assert_array_equal(based[row], base(chunk[at - age], age))
        np.testing.assert_array_equal(index[row], age_features(age, 4))


def test_it_learns_what_the_target_would_say_now(trained: TrainingResult) -> None:
    errors = held_out(trained)
    # What an old chunk lacks is more than the bound allows.
    assert errors["corrected"] < 0.6 * errors["aligned"] and errors["drafted"] < 0.3


def test_what_was_seen_then_tells_where_the_target_wanted_to_go(tmp_path: Path) -> None:
    errors = {}
    for method in ("corrector", "newest"):  # neither sees the goal
        result = train(recipe(method, sees=("state",), steps=400, without=0.0), Path(), tmp_path / method, quiet)
        errors[method] = held_out(result)["corrected"]
    assert errors["corrector"] < 0.75 * errors["newest"]


def test_a_damaged_rollout_is_named(tmp_path: Path) -> None:
    damaged = tmp_path / "rollouts" / "00000.safetensors"
    damaged.parent.mkdir()
    damaged.write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"00000\.safetensors.*delete it"):
        train(recipe(), Path(), tmp_path, quiet)


def test_the_controls_are_the_same_network(trained: TrainingResult, tmp_path: Path) -> None:
    results = {}
    for method in ("draft", "newest"):
        results[method] = train(recipe(method), Path(), tmp_path / method, quiet)
    sizes = {json.loads((result.bundles[0] / "manifest.json").read_text())["parameters"]["corrector"]
             for result in (trained, *results.values())}  # fmt: skip
    assert len(sizes) == 1
    assert load_pair(results["draft"].bundles[0]).corrects == 0
    assert load_pair(results["newest"].bundles[0]).corrects == 6


def test_the_bundle_is_a_pair_within_the_bound_whose_target_is_named(trained: TrainingResult) -> None:
    with pytest.raises(BundleError, match="--target"):
        load_pair(trained.bundles[0]).parts.target  # noqa: B018 - a manifest names no code
    pair = load_pair(trained.bundles[0], target=TARGET)
    spec: CorrectorSpec = pair.parts.spec
    assert pair.execute == 1 and pair.corrects == 6 and spec.target == "c" and pair.env == "ball"
    policy, rng = SpeculativePolicy(pair, Periodic(4)), np.random.default_rng(0)
    seen = [{"state": rng.normal(size=8) * 0.3, "goal": rng.normal(size=2) * 0.3} for _ in range(8)]
    actions = [policy.act(observation) for observation in seen]
    for step, action in enumerate(actions):
        assert (np.abs(action - actions[step - step % 4]) <= np.array(spec.bound[step % 4]) + 1e-6).all()
    wrong = load_pair(trained.bundles[0], target=f"{__name__}:another")
    with pytest.raises(BundleError, match="target"):
        wrong.parts.target  # noqa: B018
    assert load_exchange(str(trained.bundles[0]), target=TARGET).contract.fingerprint == "c"


def test_its_gate_is_calibrated_and_audited_as_every_other(trained: TrainingResult) -> None:
    pair = load_pair(trained.bundles[0], target=TARGET)
    calibration = calibrate(pair, "staleness", 0.3, episodes=4, rounds=3)
    assert calibration.settings.name == "staleness" and abs(calibration.held_out["rate"] - 0.3) < 0.15
    gate, audits = calibration.settings.build(pair), AuditEstimator()
    gate.audit_rate = 0.5
    policy, rng = SpeculativePolicy(pair, gate), np.random.default_rng(1)
    for _ in range(40):
        policy.act({"state": rng.normal(size=8) * 0.1, "goal": rng.normal(size=2) * 0.1})
        assert policy.record is not None
        audits.take(policy.record)
    assert audits.estimate().count > 5 and audits.missed == 0


def test_a_manifest_that_names_code_is_refused(trained: TrainingResult, tmp_path: Path) -> None:
    for file in trained.bundles[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    write_json(tmp_path / "manifest.json", manifest | {"sources": {"target": "os:system"}})
    with pytest.raises(BundleError, match=r"no code.*--target"):
        load_pair(tmp_path).parts.target  # noqa: B018


def test_a2c2_learns_demonstrated_actions_without_a_bound(tiny_flow: Path, tmp_path: Path) -> None:
    result = train(recipe("a2c2", target=str(tiny_flow), env=None), Path(), tmp_path, quiet)
    pair, errors = load_pair(result.bundles[0]), held_out(result)
    assert errors["corrected"] < errors["aligned"]
    assert pair.parts.spec.bound == ((2.0, 2.0),) * 6 and not pair.parts.spec.drafts
    assert pair.parts.target.spec.chunk == 6


def test_a2c2_may_have_a_camera(tmp_path: Path) -> None:
    dots = demonstrations()
    seen: dict[str, Any] = {"image": np.asarray(dots.frames("image")), "place": dots.numbers("place")}
    np.savez(tmp_path / "dots.npz", **seen, action=dots.action, episode_ends=dots.ends)
    (tmp_path / "flow.toml").write_text(
        'kind = "flow"\nbundle = "dots"\nenv = "tests.lab.train.dots:TASK"\ndata = ["dots.npz"]\nwindow = 1\n'
        'chunk = 2\nsees = ["image"]\nlayers = 1\nheads = 1\nwidth = 16\nsteps = 20\nbatch = 32\nbfloat16 = false\n'
        '[observations]\nimage = "image"\nplace = "place"\n[encoder]\nchannels = [8, 8]\nkeypoints = 8\nwidth = 16\n'
    )
    flow = train(load_recipe(tmp_path / "flow.toml"), tmp_path, tmp_path / "flow", quiet).bundles[0]
    learns = recipe("a2c2", target=str(flow), env="tests.lab.train.dots:TASK", sees=("image",), steps=300, batch=32)
    errors = held_out(train(learns, tmp_path, tmp_path / "run", quiet))
    assert errors["corrected"] < 0.5 * errors["aligned"], "the frame of now shows where to go"


def test_a_device_may_have_a_camera_and_a_chunk_be_shorter_than_the_longest_delay(tmp_path: Path) -> None:
    seen = recipe(target=f"{__name__}:pusher", env="pusht-camera", sees=("image",), most_delay=8, steps=3, batch=8)
    stored = set[Path]()
    pair = load_pair(train(seen, Path(), tmp_path, lambda *_: stored.update(tmp_path.iterdir())).bundles[0])
    assert (folder := tmp_path / "frames") in stored and not folder.exists(), "on disk while it is trained"
    assert list(pair.parts.spec.observation.fields) == ["image"]
    spec, chunk = pair.parts.spec.chunks, np.zeros((4, 2), np.float32)
    frames = [np.full((2, 96, 96, 3), value, np.uint8) for value in (0, 255)]
    answers = [pair.parts.network.run(Window({"image": rgb}), base(chunk, 1), age_features(1, 4)) for rgb in frames]
    assert spec.chunk == 4 and not np.array_equal(answers[0][1], answers[1][1]), "the draft looks at the frame"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sees": ("image",)}, "image"), ({"method": "a2c2"}, "demonstrations"), ({"episodes": 25}, "episodes"),
        ({"target": "tests.lab.rollout.chunk_policies:small"}, "range"), ({"played_by": "ball"}, "ball is none"),
        ({"played_by": "ball", "method": "a2c2"}, "played_by"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_before_anything_is_recorded(
    changes: dict[str, Any], error: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=error):
        train(recipe(**changes), Path(), tmp_path / "run", quiet)
    assert not (tmp_path / "run").exists()
