"""Checks of demonstrations and pairs against the task, before training and evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specact.errors import ConfigError, DataError
from specact.lab.data.episodes import Episodes
from specact.lab.data.info import not_finite
from specact.lab.envs.task import Task
from specact.observation import Field
from specact.pair import Pair

_RATE_TOLERANCE = 1e-3  # relative, for rates that were rounded to float32


def convert_to_task(task: Task, episodes: Episodes, source: str) -> Episodes:
    """Converts demonstrations, as a reader returns them, to a task; ``source`` is their origin, for messages.

    Raises:
        DataError: for non-finite values, a recorded rate that is not the task's, and observations and actions that do
            not fit the environment.
    """
    _check_finite(episodes, source)
    _check_rate(episodes, task.rate_hz, source, f"the task {task.name!r} runs at")
    try:
        fitted = task.features(episodes)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    _check_finite(fitted, f"{source}, in the terms of the task {task.name!r}")
    return _checked(task, fitted, source)


def as_recorded(episodes: Episodes, rate_hz: float, source: str) -> Episodes:
    """Demonstrations of a robot without an environment, unconverted, at the control rate of the policies.

    Raises:
        DataError: for non-finite values, and another recorded rate.
    """
    _check_finite(episodes, source)
    _check_rate(episodes, rate_hz, source, "the recipe says rate_hz =")
    return replace(episodes, rate_hz=rate_hz)


def _check_rate(episodes: Episodes, rate_hz: float, source: str, who: str) -> None:
    recorded = episodes.rate_hz
    if recorded is not None and not math.isclose(recorded, rate_hz, rel_tol=_RATE_TOLERANCE):
        raise DataError(
            f"{source} was recorded at {recorded:g} Hz, but {who} {rate_hz:g}; resample the demonstrations, or choose "
            "the rate they were recorded at"
        )


def _check_finite(episodes: Episodes, source: str) -> None:
    warnings = not_finite(episodes)
    if warnings:
        raise DataError(f"{source}: {warnings[0]}. Repair or remove these steps; specact data info lists what it finds")


def _checked(task: Task, episodes: Episodes, source: str) -> Episodes:
    """Checks shapes, and drops cameras that the environment does not have.

    Numeric observations must be exactly the environment's; cameras of the environment may be missing.
    """
    cameras = episodes.cameras
    # Cameras that are rendered on request have frames of any size.
    seen = {name: Field(episodes.frames(name).shape[1:], "uint8") for name in cameras}
    hidden = {name: Field(array.shape[1:]) for name, array in episodes.observation.items() if name in task.privileged}
    available = task.seeing(seen | hidden).shapes()
    kept = [name for name in episodes.observation if name in available or name not in cameras]
    shapes = {"action": episodes.action.shape[1:]}
    shapes |= {name: episodes.observation[name].shape[1:] for name in sorted(kept)}
    wanted = {name: shape for name, shape in available.items() if name in shapes or len(shape) == 1}
    if shapes != wanted:
        raise DataError(
            f"{source} has {shapes_in_words(shapes)}; the task {task.name!r} needs {shapes_in_words(wanted)}"
        )
    return replace(episodes.only(*kept), rate_hz=task.rate_hz)


def check_fit(bundle: Pair[Any], task: Task) -> None:
    """Checks that a pair's observations and actions are the task's; it may use a subset of them.

    Raises:
        ConfigError: if a shape differs.
    """
    seen = bundle.observation.fields
    wanted = task.seeing(seen).shapes()
    shapes = {"action": bundle.units.centre.shape, **{name: field.shape for name, field in seen.items()}}
    if any(wanted.get(name) != shape for name, shape in shapes.items()):
        raise ConfigError(
            f"the bundle {bundle.name!r} has {shapes_in_words(shapes)}, but the task {task.name!r} has "
            f"{shapes_in_words(wanted)}; the bundle was made for the task {bundle.env!r}"
        )


def shapes_in_words(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Shapes, as :meth:`~specact.lab.envs.task.Task.shapes` gives them, for a message."""
    return ", ".join(
        f"{name} width {shape[0]}" if len(shape) == 1 else f"{name} {' x '.join(map(str, shape))}"
        for name, shape in shapes.items()
    )
