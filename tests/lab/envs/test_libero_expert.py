"""The scripted experts of LIBERO: one task per suite, also after a disturbance; a grasp elsewhere fails."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("libero", reason="needs LIBERO: pip install 'specact[libero]'")

from specact.errors import ConfigError
from specact.lab.data.generate import check_expert
from specact.lab.envs import load_task
from specact.lab.envs.libero_expert import Expert

TASKS = (
    "libero-spatial/pick_up_the_black_bowl_next_to_the_cookie_box_and_place_it_on_the_plate",
    "libero-object/pick_up_the_ketchup_and_place_it_in_the_basket",
    "libero-goal/put_the_cream_cheese_in_the_bowl",
)


def episode(name: str, seed: int, disturbed: range = range(0), shift: float = 0.0) -> tuple[bool, int, list[Any]]:
    """Whether the expert succeeds, in how many steps, and its own actions; some steps are replaced by a random one."""
    task = load_task(name)
    env, expert = task.make(), Expert(0)
    env.reset(seed=seed)
    expert.reset(env)
    expert._offset = expert._offset + np.array([shift, 0.0, 0.0])
    actions = list[Any]()
    push = np.random.default_rng(seed).uniform(-1.0, 1.0, 7).astype(np.float32)
    info: dict[str, Any] = {"success": False}
    while not info["success"] and len(actions) < task.max_steps:
        actions.append(expert.act(env))
        _, _, _, _, info = env.step(push if len(actions) in disturbed else actions[-1])
    env.close()
    return info["success"], len(actions), actions


@pytest.mark.parametrize("name", TASKS)
def test_the_expert_succeeds_also_after_a_disturbance_but_not_beside_the_object(name: str) -> None:
    success, steps, actions = episode(name, seed=3)
    assert success and steps < 160
    assert all(action.shape == (7,) and action.dtype == np.float32 for action in actions)
    assert np.abs(actions).max() <= 1.0
    assert {float(action[6]) for action in actions} == {-1.0, 1.0}
    # Once on the way to the object, and once with the object in the hand.
    for disturbed in (range(10, 18), range(steps - 35, steps - 29)):
        recovered, longer, _ = episode(name, 3, disturbed)
        assert recovered and longer > steps - 5
    assert not episode(name, 3, shift=0.1)[0]


def test_a_task_without_an_expert_names_those_with_one() -> None:
    goal = load_task("libero-goal")
    with pytest.raises(ConfigError, match="turn_on_the_stove") as refusal:
        check_expert(goal)
    assert all(name in str(refusal.value) for name in goal.tasks)
    with pytest.raises(ConfigError, match="turn_on_the_stove"):
        check_expert(goal.only("turn_on_the_stove"))
    for name in (*TASKS, "libero-spatial", "libero-object", "ball"):
        check_expert(load_task(name))
