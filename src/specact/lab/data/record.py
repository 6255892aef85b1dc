"""Demonstrations of a scripted expert, recorded on several processes as a LeRobot dataset; goes on after a stop.

Every episode has a number, and what it holds follows from that and the seed alone. So neither the number of processes
nor a stop changes the dataset, apart from what the renderer does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from specact.errors import ConfigError, DataError
from specact.files import write_json
from specact.lab.data.generate import MOST_TRIES, check_generation, demonstrate
from specact.lab.data.lerobot_writing import Written, finish, finished, part, write_part
from specact.lab.envs import load_task
from specact.lab.envs.task import Task
from specact.locks import locked
from specact.observation import Field

ORDER = "recording.json"
# Works on the numbers of episodes, on several processes.
Each = Callable[[Callable[[int], None], Iterable[int]], Iterator[tuple[int, None]]]


@dataclass(frozen=True)
class Order:
    """What is to be recorded, in plain values.

    Attributes:
        env: name of a task with an expert.
        seed: of everything random here.
        noise: see :func:`~specact.lab.data.generate.generate`.
        pixels: height and width of camera frames; 0 for none.

    Raises:
        ConfigError: for a number of pixels below 0.
    """

    env: str
    seed: int
    noise: float
    pixels: int

    def __post_init__(self) -> None:
        if self.pixels < 0:
            raise ConfigError(f"pixels must be at least 0, got {self.pixels}")

    def task(self) -> Task:
        """The task, seen through its cameras."""
        task = load_task(self.env)
        cameras = task.cameras if self.pixels else ()
        return task.seeing({name: Field((self.pixels, self.pixels, 3), "uint8") for name in cameras})


def record(order: Order, out: Path, episodes: int, each: Each, progress: Callable[[int, int], None]) -> Written:
    """Records episodes that succeed until there are so many of every task; failed ones are dropped.

    Args:
        order: what.
        out: the dataset's folder. What it holds stays; it may be of the same order alone.
        episodes: how many, of a suite how many of each task.
        each: runs the work, such as :meth:`Pool.each <specact.lab.rollout.pool.Pool.each>`.
        progress: called with (episodes recorded, total).

    Raises:
        ConfigError: if the task has no expert, a number is out of range, the folder holds something else or is in use.
        DataError: if the expert fails nearly always.
        RenderError: if this machine cannot draw.
    """
    task = order.task()
    check_generation(task, episodes, order.seed, order.noise)
    env = task.make(render_mode=None)
    env.reset(seed=0)  # what cannot be drawn is told before anything is written
    env.close()
    total = episodes * max(1, len(task.tasks))
    with locked(out):
        _claim(order, out)
        done = finished(out)
        if done > total:
            raise ConfigError(f"{out} holds {done} episodes, more than the {total} wanted; choose another --out")
        missing = [number for number in range(done, total) if not part(out, number).exists()]
        recorded = total - len(missing)
        progress(recorded, total)
        for _ in each(partial(_record_episode, order, out), missing):
            recorded += 1
            progress(recorded, total)
        return finish(out, total)


def _claim(order: Order, out: Path) -> None:
    wanted = vars(order)
    try:
        found: Any = json.loads((out / ORDER).read_text())
    except FileNotFoundError:
        found = None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out / ORDER} cannot be read ({error}); choose another --out") from error
    if found is None and (out / "meta").exists():
        raise ConfigError(f"{out} holds a dataset that was not recorded by this command; choose another --out")
    if found is not None and found != wanted:
        raise ConfigError(f"{out} holds a recording of {found}, not of {wanted}; choose another --out")
    write_json(out / ORDER, wanted)


def _record_episode(order: Order, out: Path, number: int) -> None:
    """Writes one episode."""
    task, env = _task_and_env(order)
    kind = number % max(1, len(task.tasks))
    for attempt in range(MOST_TRIES):
        shown = demonstrate(task, env, np.random.default_rng([order.seed, number, attempt]), order.noise, number)
        if shown.success:
            made = shown.episode(task.rate_hz)
            name = task.name if made.instructions is None else made.instructions[0]
            write_part(out, number, made, task=name, task_index=kind, tried=attempt + 1)
            return
    what = task.tasks[kind] if task.tasks else task.name
    raise DataError(
        f"the expert of {what!r} succeeded in none of {MOST_TRIES} episodes; use less noise than {order.noise}"
    )


@cache
def _task_and_env(order: Order) -> tuple[Task, gym.Env[Any, Any]]:
    """Of this process, kept between episodes: some take a second to build."""
    task = order.task()
    return task, task.make(render_mode=None)
