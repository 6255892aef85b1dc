"""Typical observations of a policy, for calibration of quantised networks."""

from __future__ import annotations

from specact.lab.envs import load_task
from specact.lab.envs.moving import MovingWorld
from specact.lab.rollout.history import ObservationSampler
from specact.lab.rollout.rollout import EpisodeRange, episode_seed
from specact.lab.tised.drivers import CodesDriver, FlowDriver
from specact.observation import Window
from specact.rng import Role, stream


def typical_windows(driver: FlowDriver | CodesDriver, task: str, execute: int, count: int = 64) -> list[Window]:
    """Windows of a policy's inferences in rollouts in a world that waits for it.

    Args:
        driver: the policy.
        task: the world's name.
        execute: executed actions of a chunk.
        count: number of windows.
    """
    policy = driver.build()
    world = MovingWorld(load_task(task, policy.spec.observation))
    rng, windows = stream(0, Role.DRAFT), list[Window]()
    episode = int(EpisodeRange.TYPICAL)
    while len(windows) < count:
        world.reset(episode_seed(0, episode, world.task))
        sampler = ObservationSampler(world, policy.spec.observation)
        while not world.done and len(windows) < count:
            windows.append(sampler.window())
            for action in policy.infer(windows[-1], rng)[:execute]:
                sampler.play(action)
        episode += 1
    world.close()
    return windows
