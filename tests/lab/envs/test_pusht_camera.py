"""PushT through a camera: the frames are gym-pusht's, and everything else is PushT."""

import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gym_pusht")

from gym_pusht.envs.pusht import PushTEnv
from gymnasium.utils.env_checker import check_env

from specact.lab.data.episodes import Episodes
from specact.lab.data.readers import read
from specact.lab.envs import pusht
from specact.lab.envs.pusht_camera import TASK, features, roll_forward, scenes

DATA = Path(os.environ.get("SPECACT_DATA", Path(__file__).parents[4] / "shared" / "data"))
RECORDED = DATA / "pusht" / "pusht_cchi_v7_replay.zarr"
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (20, 2)).astype(np.float32)


@pytest.mark.filterwarnings("error")
def test_keeps_gymnasiums_contract() -> None:
    check_env(TASK.make(), skip_render_check=True)


def test_episodes_are_those_of_pusht() -> None:
    camera, plain = TASK.make(), pusht.TASK.make()
    seen, known = camera.reset(seed=3)[0], plain.reset(seed=3)[0]
    assert set(seen) == {"state", "image", "agent"} and set(known) == {"state"}
    for action in ACTIONS:
        assert np.array_equal(seen["state"], known["state"])
        assert np.array_equal(seen["agent"], seen["state"][:2])
        seen, known = camera.step(action)[0], plain.step(action)[0]


def test_a_frame_is_the_one_that_gym_pusht_shows() -> None:
    env, theirs = TASK.make(), PushTEnv(obs_type="pixels", render_mode="rgb_array")
    seen, wanted = env.reset(seed=3)[0], theirs.reset(seed=3)[0]
    for action in ACTIONS:
        assert np.array_equal(seen["image"], wanted)
        seen = env.step(action)[0]
        wanted = theirs.step(np.array(env.unwrapped._target))[0]  # type: ignore[attr-defined]


def test_a_frame_shows_the_state_that_an_episode_is_started_in() -> None:
    """As recorded, but for single pixels where an edge falls between two of them."""
    if not RECORDED.exists():
        pytest.skip(f"there are no PushT frames at {RECORDED}; set SPECACT_DATA to the folder of recorded data")
    recorded, env = read(RECORDED), TASK.make()
    for step in (0, 1000, 20_000):
        seen, _ = env.reset(seed=0, options={"state": recorded.numbers("state")[step]})
        away = np.abs(seen["image"].astype(int) - recorded.frames("image")[step]).max(-1)
        assert (away > 30).sum() < 30 and away.mean() < 0.5  # another pose changes hundreds of pixels


def test_demonstrations_have_the_agents_position_and_keep_their_frames() -> None:
    raw = np.array([[100.0, 200.0, 300.0, 150.0, 1.0]] * 3, np.float32)
    image = np.arange(3 * 48, dtype=np.uint8).reshape(3, 4, 4, 3)
    fitted = features(Episodes({"state": raw, "image": image}, np.zeros((3, 2), np.float32), np.array([3])))
    assert np.array_equal(fitted.numbers("agent"), fitted.numbers("state")[:, :2])
    assert np.array_equal(np.asarray(fitted.frames("image")), image)


def test_rolled_forward_the_agents_position_is_the_states() -> None:
    seen, _ = TASK.make().reset(seed=0)
    rolled = roll_forward(seen, ACTIONS[:3])
    assert np.array_equal(rolled["agent"], rolled["state"][:2])
    assert not np.array_equal(rolled["agent"], seen["agent"])
    assert np.array_equal(rolled["image"], seen["image"])


def test_scenes_show_what_they_say_and_depend_on_their_generator_alone() -> None:
    made, again, others = (scenes(4, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert made["image"].shape == (4, 96, 96, 3) and made["image"].dtype == np.uint8
    assert made["state"].shape == (4, 26)
    for name, values in made.items():
        assert np.array_equal(values, again[name]) and not np.array_equal(values, others[name])
    blue = (made["image"] == [65, 105, 225]).all(-1)  # the agent's colour
    for seen, state in zip(blue, made["state"], strict=True):
        row, column = np.argwhere(seen).mean(0)
        expected = (state[:2] + 1) * 48  # of 96 pixels, x first
        assert abs(column - expected[0]) < 2 and abs(row - expected[1]) < 2
