"""The swarm environment and its expert."""

import numpy as np
import pytest

from specact.lab.envs.swarm import DRAG, HALF_SIZE, OVERLAP, RADIUS, SLIP, TASK, SwarmEnv, SwarmExpert

ROUNDING = 1e-12  # many times the rounding of the few operations behind a distance or an energy
STILL = np.zeros(10, np.float32)
COAST = (1 - DRAG * 0.02) ** 5  # what drag leaves of a velocity in a control period


def run(env: SwarmEnv, env_seed: int, expert: SwarmExpert) -> tuple[int, bool]:
    """Steps, and success."""
    env.reset(seed=env_seed)
    expert.reset(env)
    steps = 0
    while steps < TASK.max_steps:
        _, _, terminated, _, info = env.step(expert.act(env))
        steps += 1
        if terminated:
            break
    return steps, info["success"]


def nearest(position: np.ndarray) -> float:
    """Least distance between two drones [m]."""
    first, second = np.triu_indices(len(position), 1)
    return float(np.linalg.norm(position[first] - position[second], axis=1).min())


def head_on() -> SwarmEnv:
    """Drones 0 and 1 on a line facing each other, the others far from it."""
    env = SwarmEnv()
    env.reset(seed=0)
    env.position = np.array([[-0.5, 0.0], [0.5, 0.0], [-1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    env.velocity = np.zeros((5, 2))
    return env


def test_the_expert_succeeds_and_passes_on_both_sides_from_the_same_start() -> None:
    env, sides = SwarmEnv(), set()
    results = [run(env, seed, SwarmExpert(seed)) for seed in range(8)]
    assert sum(success for _, success in results) >= 7
    assert np.mean([steps for steps, _ in results]) < 60
    for seed in range(10):
        env = head_on()
        env.target = env.position[[1, 0, 2, 3, 4]]
        expert = SwarmExpert(seed)
        expert.reset(env)
        while env.position[0, 0] < env.position[1, 0]:
            env.step(expert.act(env))
        assert nearest(env.position) > 2 * RADIUS
        sides.add(bool(env.position[0, 1] > env.position[1, 1]))
    assert sides == {True, False}


def test_a_lone_push_follows_the_equation_of_motion() -> None:
    env, action = head_on(), np.zeros((5, 2), np.float32)
    action[0, 1] = -1.0
    for _ in range(5):
        env.step(action.ravel())
    assert env.velocity[0, 1] == pytest.approx(-1.5 / DRAG * (1 - np.exp(-DRAG * 0.5)), rel=0.01)


@pytest.mark.parametrize("drones", [2, 7])
def test_no_drone_is_ever_inside_another_or_a_wall_and_contacts_add_no_energy(drones: int) -> None:
    """Over many swarms, thrown at each other and then pushed into one place: a wall, a corner or the middle."""
    env, contacts = SwarmEnv(drones=drones), 0
    for seed in range(8):
        env.reset(seed=seed)
        assert min(nearest(env.position), nearest(env.target)) > 4 * RADIUS
        random = np.random.default_rng(seed)
        env.velocity = random.normal(0.0, 3.0, (drones, 2))
        energy = (env.velocity**2).sum()
        env.step(np.zeros(2 * drones, np.float32))
        assert (env.velocity**2).sum() <= energy * (1 + ROUNDING)
        place = random.uniform(-1.3, 1.3, 2)
        for _ in range(30):
            push = np.clip(random.uniform(1.0, 20.0) * (place - env.position), -1.0, 1.0)
            env.step(push.astype(np.float32).ravel())
            contacts += nearest(env.position) < 2 * RADIUS + OVERLAP
            assert nearest(env.position) >= 2 * RADIUS - OVERLAP - ROUNDING
            assert np.abs(env.position).max() <= HALF_SIZE - RADIUS
    assert contacts > 0, "nothing met, so nothing was tested"


def test_a_collision_keeps_momentum_stops_closing_and_slows_sliding() -> None:
    env = head_on()
    env.velocity[0] = 2.0, 0.3
    env.position[1] = -0.29, 0.05
    before = env.velocity[:2].sum(axis=0) * COAST
    env.step(STILL)
    np.testing.assert_allclose(env.velocity[:2].sum(axis=0), before)
    env = head_on()
    env.position[:2] = (-0.1, 0.0), (0.1, 0.0)
    env.velocity[:2] = (1.0, 1e-3), (-0.5, 0.0)
    env.step(STILL)
    closing = env.velocity[0] - env.velocity[1]
    np.testing.assert_allclose(closing, [0.0, SLIP * 1e-3], atol=1e-4)
    np.testing.assert_allclose(env.velocity[:2].mean(axis=0), [0.25 * COAST, 0.5e-3 * COAST], atol=1e-12)
