"""Demonstrations and pairs are checked against the task, before anything is trained on them or judged by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from specact.errors import ConfigError, DataError
from specact.families.load import AnyPair
from specact.lab.data.episodes import Episodes
from specact.lab.data.info import not_finite
from specact.lab.envs.task import Task
from specact.observation import Field

_RATE_TOLERANCE = 1e-3  # relative; a rate that is stored as float32 is not the decimal that was meant


def in_terms_of(task: Task, episodes: Episodes, source: str) -> Episodes:
    """Demonstrations in the environment's terms, see :attr:`~specact.lab.envs.task.Task.features`.

    Args:
        task: the environment.
        episodes: as a reader returns them.
        source: where they are from, for messages.

    Raises:
        DataError: for values that are not finite, a recorded rate that is not the task's, and observations and actions
            that are not the environment's.
    """
    _check_finite(episodes, source)
    rate = episodes.rate_hz
    if rate is not None and not _same_rate(rate, task.rate_hz):
        raise DataError(
            f"{source} was recorded at {rate:g} Hz, but the task {task.name!r} runs at {task.rate_hz:g} Hz; resample "
            "the demonstrations, or choose the task they were recorded in"
        )
    try:
        fitted = task.features(episodes)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    _check_finite(fitted, f"{source}, in the terms of the task {task.name!r}")
    return _checked(task, fitted, source)


def as_recorded(episodes: Episodes, rate_hz: float, source: str) -> Episodes:
    """Demonstrations of a robot that there is no environment for, as they are.

    Args:
        episodes: as a reader returns them.
        rate_hz: control rate of the policies that they are to train.
        source: where they are from, for messages.

    Raises:
        DataError: for values that are not finite, and a recorded rate that is another one.
    """
    _check_finite(episodes, source)
    rate = episodes.rate_hz
    if rate is not None and not _same_rate(rate, rate_hz):
        raise DataError(
            f"{source} was recorded at {rate:g} Hz, but the recipe says rate_hz = {rate_hz:g}; resample the "
            "demonstrations, or set rate_hz to the rate they were recorded at"
        )
    return replace(episodes, rate_hz=rate_hz)


def _same_rate(recorded: float, wanted: float) -> bool:
    return math.isclose(recorded, wanted, rel_tol=_RATE_TOLERANCE)


def _check_finite(episodes: Episodes, source: str) -> None:
    found = not_finite(episodes)
    if found:
        raise DataError(f"{source}: {found[0]}. Repair or remove these steps; specact data info lists what it finds")


def _checked(task: Task, episodes: Episodes, source: str) -> Episodes:
    """The demonstrations, without cameras that the environment does not have.

    Numbers must be exactly the environment's; a camera of its own may be missing, for policies that do without it.
    """
    cameras = episodes.cameras
    # A camera that is drawn where it is asked for has frames of any size.
    shown = task.seeing({name: Field(episodes.frames(name).shape[1:], "uint8") for name in cameras}).shapes()
    kept = [name for name in episodes.observation if name in shown or name not in cameras]
    found = {"action": episodes.action.shape[1:]}
    found |= {name: episodes.observation[name].shape[1:] for name in sorted(kept)}
    wanted = {name: shape for name, shape in shown.items() if name in found or len(shape) == 1}
    if found != wanted:
        raise DataError(
            f"{source} has {shapes_in_words(found)}; the task {task.name!r} needs {shapes_in_words(wanted)}"
        )
    return replace(episodes.only(*kept), rate_hz=task.rate_hz)


def check_fit(bundle: AnyPair, task: Task) -> None:
    """Checks that a pair's observations and actions are the task's; a pair may do without some of the task's.

    Raises:
        ConfigError: if a shape differs.
    """
    seen = bundle.observation.fields
    wanted = task.seeing(seen).shapes()
    found = {"action": bundle.units.centre.shape, **{name: field.shape for name, field in seen.items()}}
    if any(wanted.get(name) != shape for name, shape in found.items()):
        raise ConfigError(
            f"the bundle {bundle.name!r} has {shapes_in_words(found)}, but the task {task.name!r} has "
            f"{shapes_in_words(wanted)}; the bundle was made for the task {bundle.env!r}"
        )


def shapes_in_words(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Shapes, as :meth:`~specact.lab.envs.task.Task.shapes` gives them, for a message."""
    return ", ".join(
        f"{name} width {shape[0]}" if len(shape) == 1 else f"{name} {' x '.join(map(str, shape))}"
        for name, shape in shapes.items()
    )
