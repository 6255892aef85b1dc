"""Policies that see different things of the same demonstrations, and demonstrations that no environment belongs to."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.lab import cameras
from tests.tiny import KilledError, quiet

from specact import SpeculativePolicy, load_pair
from specact.errors import ConfigError, DataError
from specact.gates import Always
from specact.lab.data.episodes import Episodes
from specact.lab.train.attention import unknown
from specact.lab.train.codes import policy_graph, rebuild, specs_of
from specact.lab.train.dataset import observation_of
from specact.lab.train.recipe import CodesRecipe, PolicyRecipe, load_recipe
from specact.lab.train.train import train
from specact.lab.train.variants import prune_history
from specact.lab.train.vqbet import Shapes, VQBeT
from specact.observation import Field, ObservationSpec

# The target sees a camera, the draft does not; one tokenizer for both.
PAIR = """
rate_hz = 10
data = ["lerobot-v3.0"]
window = 3
chunk = 2
execute = 2

[observations]
state = "observation.state"
hand = { key = "observation.gripper", history = 1 }
image.front = { key = "observation.images.front", crop = [0, 8, 32, 32], size = [16, 16] }
goal.place = "observation.gripper"

[tokenizer]
codes = 4
latent = 4
hidden = 8
steps = 2
batch = 8

[policies.target]
sees = ["state", "image.front", "goal.place"]
history = { "image.front" = 2 }
layers = 1
heads = 1
width = 8
head_width = 0
steps = 3
batch = 4
bfloat16 = false

[policies.draft]
like = "target"
sees = ["hand"]
history = {}
state_noise = 0.1

[bundles]
mine = ["target", "draft"]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset and the recipe."""
    folder = tmp_path_factory.mktemp("named")
    cameras.write_lerobot(folder)
    (folder / "pair.toml").write_text(PAIR)
    return folder


@pytest.fixture(scope="module")
def made(data: Path) -> Path:
    """The folder of a finished run of the pair."""
    train(load_recipe(data / "pair.toml"), data, data / "run", quiet)
    return data / "run"


def test_draft_and_target_see_what_the_recipe_says(made: Path) -> None:
    bundle = load_pair(made / "bundles" / "mine")
    state, hand, image = Field((3,), "float32", 3), Field((1,), "float32", 1), Field((16, 16, 3), "uint8", 2)
    assert bundle.parts.spec.draft == ObservationSpec({"hand": hand})
    seen = {"state": state, "image.front": image, "goal.place": replace(hand, history=0)}
    assert bundle.parts.spec.target == ObservationSpec(seen)
    assert (bundle.env, bundle.parts.spec.rate_hz) == ("", 10.0)
    recorded = bundle.parts.manifest.recipe["observations"]["image.front"]
    assert recorded == {"key": "observation.images.front", "size": [16, 16], "crop": [0, 8, 32, 32], "history": None}
    policy = SpeculativePolicy(bundle, Always())
    for step in range(3):
        frame = np.full((16, 16, 3), 40 * step, np.uint8)
        observation = {"state": cameras.STATE[step], "hand": cameras.GRIPPER[step : step + 1], "image.front": frame}
        assert policy.act(observation | {"goal.place": cameras.GRIPPER[step : step + 1]}).shape == (2,)


def test_a_stopped_run_finds_its_decoded_frames_and_ends_like_another(made: Path, data: Path, tmp_path: Path) -> None:
    recipe, told = load_recipe(data / "pair.toml"), list[str]()

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("target", 2):
            raise KilledError

    with pytest.raises(KilledError):
        train(recipe, data, tmp_path / "run", stop)
    assert [path.name for path in (tmp_path / "run" / "frames").iterdir()] == ["image.front.npy"]
    train(recipe, data, tmp_path / "run", lambda stage, done, total: told.append(stage))
    assert not any(stage.startswith("frames") for stage in told)
    for run in (tmp_path / "run", made):
        assert [path.name for path in run.iterdir() if path.is_dir()] == ["bundles"], "no decoded frames are left"
    for part in ("target.onnx", "draft.onnx"):
        ours, theirs = (run / "bundles" / "mine" / part for run in (tmp_path / "run", made))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_camera_that_cannot_be_read_is_told_before_the_folder_is_made(data: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(data / "lerobot-v3.0", tmp_path / "lerobot-v3.0"))
    shutil.rmtree(copy / "videos")
    with pytest.raises(DataError, match=r"\.mp4 is damaged or missing"):
        train(load_recipe(data / "pair.toml"), tmp_path, tmp_path / "run", quiet)
    assert not (tmp_path / "run").exists()
    draft = load_recipe(data / "pair.toml", CodesRecipe)
    draft = structs.replace(draft, policies={"draft": draft.policies["draft"]}, bundles={})
    train(draft, tmp_path, tmp_path / "run", quiet)  # nobody needs the camera


def episodes() -> Episodes:
    rng = np.random.default_rng(0)
    seen = {"state": rng.normal(size=(20, 3)), "goal": rng.normal(size=(20, 2)), "pair": rng.normal(size=(20, 2, 2))}
    arrays = {name: values.astype(np.float32) for name, values in seen.items()}
    frames = rng.integers(0, 255, (20, 16, 16, 3), dtype=np.uint8)
    return Episodes({**arrays, "image": frames}, rng.normal(size=(20, 2)).astype(np.float32), np.array([10, 20]), 10.0)


RECIPE = CodesRecipe(rate_hz=10.0, data=("given",), window=3)


def test_without_a_word_a_policy_sees_everything_but_cameras() -> None:
    spec = observation_of(PolicyRecipe(), RECIPE, episodes(), "it")
    assert {name: field.history for name, field in spec.fields.items()} == {"state": 3, "goal": 0, "pair": 3}
    spec = observation_of(PolicyRecipe(history={"goal": 1}), RECIPE, episodes(), "it")
    assert spec["goal"].history == 1
    with pytest.raises(ConfigError, match="hold camera frames alone"):
        observation_of(PolicyRecipe(), RECIPE, episodes().only("image"), "it")
    with pytest.raises(ConfigError, match="unknown observation of it 'hand'"):
        observation_of(PolicyRecipe(history={"hand": 1}), RECIPE, episodes(), "it")


def test_a_goal_needs_numbers_to_be_concatenated_to() -> None:
    recipe = structs.replace(RECIPE, goal="concatenate", policies={"p": PolicyRecipe(sees=("image", "goal"))})
    with pytest.raises(ConfigError, match='sees no numbers with a history that goal = "concatenate" could add to'):
        specs_of(recipe, episodes())
    assert specs_of(structs.replace(recipe, goal="token"), episodes())["p"].history == 3


def test_only_positions_that_see_everything_predict() -> None:
    """Of five states and two frames two positions predict; the first of them does not see the later frame."""
    fields = {"state": Field((3,), "float32", 5), "image": Field((16, 16, 3), "uint8", 2)}
    shapes = Shapes(ObservationSpec(fields), codebooks=2, codes=3, chunk=1, actions=2, goal_mode="token")
    torch.manual_seed(0)
    model = VQBeT(shapes, PolicyRecipe(layers=1, heads=1, width=8, head_width=0), unknown(fields)).eval()
    seen = policy_graph(model).example(4)["observation"]
    with torch.no_grad():
        before = model.predictions(seen).offsets
        assert before.shape[:2] == (4, 2)
        newest = seen["image"].clone()
        newest[:, 1] = 255 - newest[:, 1]
        after = model.predictions(seen | {"image": newest}).offsets
        assert torch.equal(before[:, 0], after[:, 0]) and not torch.equal(before[:, 1], after[:, 1])
        oldest = seen["state"].clone()
        oldest[:, 0] += 1.0
        assert not torch.equal(model.predictions(seen | {"state": oldest}).offsets[:, 0], before[:, 0])


def test_histories_that_differ_cannot_be_cut(made: Path, tmp_path: Path) -> None:
    bundle = load_pair(made / "bundles" / "mine")
    with pytest.raises(ConfigError, match="differ in history"):
        prune_history(bundle.parts, 2, tmp_path / "2.onnx")
    whole = rebuild(bundle.parts, "target", 3)
    assert whole.length == 3 and whole.predicting == 2
