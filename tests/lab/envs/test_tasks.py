"""Tasks are found by name, and what is missing is said."""

import os
import sys

import numpy as np
import pytest

from specact.errors import ConfigError, MissingExtraError
from specact.lab.envs import TASKS, load_task


@pytest.mark.parametrize("name", TASKS)
def test_every_name_leads_to_the_task_of_that_name(name: str) -> None:
    try:
        task = load_task(name)
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert task.name == name
    assert task.rate_hz > 0 and task.max_steps > 0


@pytest.mark.skipif(os.environ.get("MUJOCO_GL") not in ("egl", "osmesa"), reason="set MUJOCO_GL to egl or osmesa")
@pytest.mark.parametrize("name", ["kitchen", "relocate", "peg", "metaworld"])
def test_what_mujoco_draws_is_an_image(name: str) -> None:
    try:
        env = load_task(name).make(render_mode="rgb_array")
    except MissingExtraError as error:
        pytest.skip(str(error))
    env.reset(seed=0)
    image = env.render()
    assert isinstance(image, np.ndarray)
    assert image.dtype == np.uint8 and image.shape == (480, 480, 3) and image.std() > 0
    env.close()


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown environment 'push'; did you mean 'pusht'"):
        load_task("push")


def test_a_missing_simulator_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "specact.lab.envs.pusht", raising=False)
    monkeypatch.setitem(sys.modules, "gym_pusht.envs.pusht", None)
    with pytest.raises(MissingExtraError, match=r"'gym_pusht'.*specact\[sim\]"):
        load_task("pusht")


@pytest.mark.parametrize("name", TASKS)
def test_every_task_says_how_its_robot_holds_still(name: str) -> None:
    """Within the action space, and for displacements and velocities nothing but what the last action has to keep."""
    try:
        task = load_task(name)
    except MissingExtraError as error:
        pytest.skip(str(error))
    last = (
        task.make().action_space.sample() if name in ("ball", "ball-chase", "pusht") else np.full(30, 0.5, np.float32)
    )
    assert task.hold is not None
    held = task.hold(last)
    assert held.dtype == np.float32 and held.shape == last.shape
    if name in ("peg", "metaworld"):
        assert held[3:].tolist() == last[3:].tolist() and not held[:3].any()
    elif name in ("ball", "ball-chase", "relocate"):
        assert held.tolist() == last.tolist()
    else:
        assert not held.any()
