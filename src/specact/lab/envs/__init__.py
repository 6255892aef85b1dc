"""Environments, one file each, with a common interface: see :class:`specact.lab.envs.task.Task`."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from specact.errors import ConfigError, MissingExtraError, RenderError, unknown_name
from specact.imports import is_plugin, load_object
from specact.lab.envs.drawing import cannot_draw

if TYPE_CHECKING:
    from specact.lab.envs.task import Task
    from specact.observation import ObservationSpec

# Modules are imported lazily, because each needs its own simulator.
TASKS = {
    "ball": "specact.lab.envs.ball",
    "ball-chase": "specact.lab.envs.ball_chase",
    "swarm": "specact.lab.envs.swarm",
    "pusht": "specact.lab.envs.pusht",
    "pusht-camera": "specact.lab.envs.pusht_camera",
    "kitchen": "specact.lab.envs.kitchen",
    "relocate": "specact.lab.envs.adroit",
    "peg": "specact.lab.envs.peg",
    "metaworld": "specact.lab.envs.metaworld",
}


def load_task(name: str, sees: ObservationSpec | None = None) -> Task:
    """The task of this name: a built-in one, or ``MODULE:TASK``, an instance of :class:`~specact.lab.envs.task.Task`.

    Args:
        name: of a task; ``NAME/TASK`` for one task of a suite.
        sees: the observations that are needed, for its cameras; None for the environment's default, see
            :meth:`~specact.lab.envs.task.Task.seeing`.

    Raises:
        ConfigError: if there is none, or it cannot be imported.
        MissingExtraError: if its simulator is not installed.
        RenderError: if MUJOCO_GL names a renderer that MuJoCo cannot load.
    """
    suite, _, part = name.partition("/")
    task = _load(suite)
    if part:
        task = task.only(part)
    return task if sees is None else task.seeing(sees.fields)


def _load(name: str) -> Task:
    if name not in TASKS and not is_plugin(name):
        raise unknown_name("environment", name, TASKS, plugins=True)
    try:
        from specact.lab.envs.task import Task

        if is_plugin(name):
            own: Task = load_object(name, "Task, see specact.lab.envs.task", lambda found: isinstance(found, Task))
            return own
        module = import_module(TASKS[name])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "specact"):  # a bug, not a missing package
            raise
        raise MissingExtraError(package, "sim") from error
    except (ImportError, AttributeError, RuntimeError) as error:
        # Raised by the import of MuJoCo if MUJOCO_GL names a missing renderer.
        if not os.environ.get("MUJOCO_GL"):
            raise
        raise RenderError(f"{cannot_draw(error)}, or unset it if nothing is rendered") from error
    task: Task = module.TASK
    return task


class MadeFor(Protocol):
    """A pair or a policy that was made for an environment."""

    @property
    def env(self) -> str:
        """The environment's name; may be empty."""
        ...


def env_of(bundle: MadeFor, given: str | None) -> str:
    """The environment that a bundle was made for.

    A bundle must not be able to run code: if its environment is ``MODULE:TASK``, the user has to name it too.

    Args:
        bundle: the pair or policy.
        given: the environment that the user named, or None.

    Raises:
        ConfigError: if the bundle's is ``MODULE:TASK`` and the user named another or none; or neither names one.
    """
    if not bundle.env and given is None:
        raise ConfigError(
            "these policies were made for no environment that has a name; give it with --env, or work along "
            "demonstrations with specact offline"
        )
    if is_plugin(bundle.env) and bundle.env != given:
        raise ConfigError(
            f"this bundle was made for the environment {bundle.env!r}, which is code that does not come "
            f"with specact; if you trust it, name it yourself: --env {bundle.env}"
        )
    return bundle.env
