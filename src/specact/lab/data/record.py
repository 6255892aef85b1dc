"""Records demonstrations of a scripted expert as a LeRobot dataset, in several processes; resumable.

An episode is determined by its number and the seed. So neither the number of processes nor a resume changes the
dataset, apart from the renderer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from msgspec import structs

from specact.errors import ConfigError, DataError
from specact.files import write_json
from specact.lab.data.generate import MOST_TRIES, check_generation, demonstrate
from specact.lab.data.lerobot_writing import Written, finish, finished, part, write_part
from specact.lab.data.locks import locked
from specact.lab.envs import load_task
from specact.lab.envs.task import Task
from specact.observation import Field
from specact.records import NotNegative, Record, Seed, WholeNumber

ORDER = "recording.json"
# Runs a function on the numbers of episodes, in several processes.
Each = Callable[[Callable[[int], None], Iterable[int]], Iterator[tuple[int, None]]]


class Order(Record, frozen=True):
    """The settings of a recording.

    Attributes:
        env: name of a task with an expert.
        seed: random seed.
        noise: see :func:`~specact.lab.data.generate.generate`.
        pixels: height and width of camera frames; 0 for none.
        privileged: whether the task's privileged observations are recorded.
    """

    env: str
    seed: Seed
    noise: NotNegative
    pixels: WholeNumber
    privileged: bool = False

    def task(self) -> Task:
        """The task, with its cameras."""
        task = load_task(self.env)
        if self.privileged and not task.privileged:
            raise ConfigError(f"task {task.name!r} has no privileged observations; leave out --privileged")
        cameras = task.cameras if self.pixels else ()
        frames = {name: Field((self.pixels, self.pixels, 3), "uint8") for name in cameras}
        return task.seeing(frames | dict.fromkeys(task.privileged if self.privileged else (), Field((1,))))


def record(settings: Order, out: Path, episodes: int, each: Each, progress: Callable[[int, int], None]) -> Written:
    """Records successful episodes, up to a number per task; failed ones are dropped.

    Args:
        settings: the settings.
        out: the dataset's folder; an existing dataset of the same settings is extended.
        episodes: their number, per task of a suite.
        each: runs the work, such as :meth:`Pool.each <specact.lab.rollout.pool.Pool.each>`.
        progress: called with (episodes recorded, total).

    Raises:
        ConfigError: if the task has no expert, a number is out of range, the folder holds something else or is locked.
        DataError: if the expert fails nearly always.
        RenderError: if this machine cannot render.
    """
    task = settings.task()
    check_generation(task, episodes, settings.seed, settings.noise)
    env = task.make(render_mode=None)
    env.reset(seed=0)  # rendering errors are raised before anything is written
    env.close()
    total = episodes * max(1, len(task.tasks))
    with locked(out):
        _claim(settings, out)
        done = finished(out)
        if done > total:
            raise ConfigError(f"{out} holds {done} episodes, more than the {total} wanted; choose another --out")
        missing = [number for number in range(done, total) if not part(out, number).exists()]
        recorded = total - len(missing)
        progress(recorded, total)
        for _ in each(partial(_record_episode, settings, out), missing):
            recorded += 1
            progress(recorded, total)
        return finish(out, total)


def _claim(settings: Order, out: Path) -> None:
    request = structs.asdict(settings)
    try:
        stored: Any = json.loads((out / ORDER).read_text())
    except FileNotFoundError:
        stored = None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out / ORDER} cannot be read ({error}); choose another --out") from error
    if stored is None and (out / "meta").exists():
        raise ConfigError(f"{out} holds a dataset that was not recorded by this command; choose another --out")
    if stored is not None and stored != request:
        raise ConfigError(f"{out} holds a recording of {stored}, not of {request}; choose another --out")
    write_json(out / ORDER, request)


def _record_episode(settings: Order, out: Path, number: int) -> None:
    """Writes one episode."""
    task, env = _task_and_env(settings)
    task_index = number % max(1, len(task.tasks))
    for attempt in range(MOST_TRIES):
        demonstration = demonstrate(
            task, env, np.random.default_rng([settings.seed, number, attempt]), settings.noise, number
        )
        if demonstration.success:
            episode = demonstration.episode(task.rate_hz)
            name = task.name if episode.instructions is None else episode.instructions[0]
            write_part(out, number, episode, task=name, task_index=task_index, tried=attempt + 1)
            return
    what = task.tasks[task_index] if task.tasks else task.name
    raise DataError(
        f"the expert of {what!r} succeeded in none of {MOST_TRIES} episodes; use less noise than {settings.noise}"
    )


@cache
def _task_and_env(settings: Order) -> tuple[Task, gym.Env[Any, Any]]:
    """The task and environment of this process, cached across episodes because some take a second to build."""
    task = settings.task()
    return task, task.make(render_mode=None)
