"""Environments, one file each, with a common interface: see :class:`specact.lab.envs.task.Task`."""

from __future__ import annotations

import ast
import os
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from specact.errors import ConfigError, MissingExtraError, RenderError, unknown_name
from specact.imports import EXTRAS, is_plugin, load_object

if TYPE_CHECKING:
    from specact.lab.envs.task import Task
    from specact.observation import ObservationSpec

# Modules are imported lazily, because each needs its own simulator.
TASKS = {
    "ball": "specact.lab.envs.ball:TASK",
    "ball-chase": "specact.lab.envs.ball:CHASE",
    "swarm": "specact.lab.envs.swarm:TASK",
    "pusht": "specact.lab.envs.pusht:TASK",
    "pusht-camera": "specact.lab.envs.pusht:CAMERA",
    "kitchen": "specact.lab.envs.kitchen:TASK",
    "relocate": "specact.lab.envs.adroit:TASK",
    "peg": "specact.lab.envs.peg:TASK",
    "metaworld": "specact.lab.envs.metaworld:TASK",
}
# Packages with many suites, ``PACKAGE-SUITE``: a function that makes a task of such a name, and the extra it needs.
SUITES = {"libero": ("specact.lab.envs.libero:suite", "libero")}
BENCHMARK = "@benchmark"
HOW_TO_DRAW = (
    "set MUJOCO_GL=egl (Debian packages libegl1, libegl-mesa0 and libgl1-mesa-dri) or MUJOCO_GL=osmesa (libosmesa6) to "
    "draw without a display"
)


def load_task(name: str, sees: ObservationSpec | None = None) -> Task:
    """The task of this name: a built-in one, or ``MODULE:TASK``, an instance of :class:`~specact.lab.envs.task.Task`.

    With ``NAME/TASK`` one task of a suite, with ``NAME@benchmark`` the initial states that its benchmark evaluates on;
    ``sees`` are the observations that are needed, for its cameras.

    Raises:
        ConfigError: if there is none, or it cannot be imported.
        MissingExtraError: if its simulator is not installed.
        RenderError: if MUJOCO_GL names a renderer that MuJoCo cannot load.
    """
    suite, _, part = name.partition("/")
    task = _load(suite.removesuffix(BENCHMARK))
    if suite.endswith(BENCHMARK):
        if task.benchmark is None:
            raise ConfigError(f"environment {task.name!r} has no initial states of a benchmark; leave out {BENCHMARK}")
        task = task.benchmark
    if part:
        task = task.only(part)
    return task if sees is None else task.seeing(sees.fields)


def evaluated(name: str) -> str:
    """The environment to evaluate on: with the initial states of its benchmark, where it has some."""
    suite, _, part = name.partition("/")
    if suite.endswith(BENCHMARK) or load_task(name).benchmark is None:
        return name
    return f"{suite}{BENCHMARK}/{part}".removesuffix("/")


def _load(name: str) -> Task:
    package = name.partition("-")[0]
    where, extra = SUITES.get(package, (TASKS.get(name, ""), "sim"))
    if not where and not is_plugin(name):
        raise unknown_name("environment", name, [*TASKS, *(f"{known}-SUITE" for known in SUITES)], plugins=True)
    try:
        from specact.lab.envs.task import Task

        if is_plugin(name):
            plugin: Task = load_object(name, "Task, see specact.lab.envs.task", lambda value: isinstance(value, Task))
            return plugin
        module, _, attribute = where.partition(":")
        loaded = getattr(import_module(module), attribute)
        task: Task = loaded(name) if package in SUITES else loaded
        return task
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "specact"):  # a bug, not a missing package
            raise
        raise MissingExtraError(EXTRAS[extra].get(missing, missing), extra) from error
    except (ImportError, AttributeError, RuntimeError) as error:
        # Raised by the import of MuJoCo if MUJOCO_GL names a missing renderer.
        if not os.environ.get("MUJOCO_GL"):
            raise
        raise RenderError(f"{cannot_draw(error)}, or unset it if nothing is rendered") from error


def about(where: str) -> str:
    """What ``MODULE:TASK`` is, without its simulator: the text below it in its file, else the module's."""
    module, _, attribute = where.partition(":")
    spec = find_spec(module)
    tree = ast.parse(Path(spec.origin or "").read_text() if spec else "")
    for node, below in pairwise(tree.body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == attribute and isinstance(below, ast.Expr):
            return str(ast.literal_eval(below.value))
    return ast.get_docstring(tree) or ""


def cannot_draw(error: Exception) -> str:
    """The message for an error of MuJoCo or OpenGL; every renderer has its own errors."""
    try:
        why = str(error)
    except Exception:  # noqa: BLE001 - some of PyOpenGL's errors cannot be printed
        why = "no message"
    chosen = os.environ.get("MUJOCO_GL", "")
    return f"MuJoCo cannot draw with MUJOCO_GL={chosen!r} ({type(error).__name__}: {why}); {HOW_TO_DRAW}"


def env_of(stored: str, named: str | None = None) -> str:
    """The environment that a bundle was made for, or, where it has none, what the user ``named``.

    A bundle must not be able to run code: if its environment is ``MODULE:TASK``, the user has to name it too.

    Raises:
        ConfigError: if the bundle's is ``MODULE:TASK`` and the user named another or none; or neither names one.
    """
    if not stored and named is None:
        raise ConfigError(
            "these policies were made for no environment that has a name; give it with --env, or work along "
            "demonstrations with specact offline"
        )
    if is_plugin(stored) and stored != named:
        raise ConfigError(
            f"this bundle was made for the environment {stored!r}, which is code that does not come "
            f"with specact; if you trust it, name it yourself: --env {stored}"
        )
    return stored or str(named)
