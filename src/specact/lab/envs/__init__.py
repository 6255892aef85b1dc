"""Environments, one file each, brought to the same terms: see :class:`specact.lab.envs.task.Task`."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from specact.errors import MissingExtraError, RenderError, unknown_name
from specact.lab.envs.drawing import cannot_draw

if TYPE_CHECKING:
    from specact.lab.envs.task import Task

# Modules are imported only when asked for: each needs a simulator of its own.
TASKS = {
    "ball": "specact.lab.envs.ball",
    "ball-chase": "specact.lab.envs.ball_chase",
    "swarm": "specact.lab.envs.swarm",
    "pusht": "specact.lab.envs.pusht",
    "pusht-camera": "specact.lab.envs.pusht_camera",
    "kitchen": "specact.lab.envs.kitchen",
    "relocate": "specact.lab.envs.adroit",
    "peg": "specact.lab.envs.metaworld",
}


def load_task(name: str) -> Task:
    """The task of this name.

    Raises:
        ConfigError: if there is none.
        MissingExtraError: if its simulator is not installed.
        RenderError: if MUJOCO_GL names a renderer that MuJoCo cannot load.
    """
    if name not in TASKS:
        raise unknown_name("environment", name, TASKS)
    try:
        module = import_module(TASKS[name])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "specact"):  # a fault of ours, not of the installation
            raise
        raise MissingExtraError(package, "sim") from error
    except (ImportError, AttributeError, RuntimeError) as error:
        # What importing MuJoCo raises where MUJOCO_GL names a renderer that is not there.
        if not os.environ.get("MUJOCO_GL"):
            raise
        raise RenderError(f"{cannot_draw(error)}, or unset it if nothing is rendered") from error
    task: Task = module.TASK
    return task
