"""Demonstrations are checked against the task that they are to train, before anything is trained on them."""

from __future__ import annotations

import math

from specact.errors import DataError
from specact.lab.data.episodes import Episodes
from specact.lab.data.info import not_finite
from specact.lab.envs.task import Task

_RATE_TOLERANCE = 1e-3  # relative; a rate that is stored as float32 is not the decimal that was meant


def in_terms_of(task: Task, episodes: Episodes, source: str) -> Episodes:
    """Demonstrations in the environment's terms, see :attr:`~specact.lab.envs.task.Task.features`.

    Args:
        task: the environment.
        episodes: as a reader returns them.
        source: where they are from, for messages.

    Raises:
        DataError: for values that are not finite, a recorded rate that is not the task's, and widths that are not those
            of the environment's observations and actions.
    """
    _check_finite(episodes, source)
    rate = episodes.rate_hz
    if rate is not None and not math.isclose(rate, task.rate_hz, rel_tol=_RATE_TOLERANCE):
        raise DataError(
            f"{source} was recorded at {rate:g} Hz, but the task {task.name!r} runs at {task.rate_hz:g} Hz; resample "
            "the demonstrations, or choose the task they were recorded in"
        )
    try:
        fitted = task.features(episodes)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    _check_finite(fitted, f"{source}, in the terms of the task {task.name!r}")
    _check_widths(task, fitted, source)
    return fitted


def _check_finite(episodes: Episodes, source: str) -> None:
    found = not_finite(episodes)
    if found:
        raise DataError(f"{source}: {found[0]}. Repair or remove these steps; specact data info lists what it finds")


def _check_shapes(task: Task, episodes: Episodes, source: str) -> None:
    found = {"action": episodes.action.shape[1:]}
    found |= {name: array.shape[1:] for name, array in sorted(episodes.observation.items())}
    wanted = task.shapes()
    if found != wanted:
        raise DataError(
            f"{source} has {shapes_in_words(found)}; the task {task.name!r} needs {shapes_in_words(wanted)}"
        )


def shapes_in_words(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Shapes, as :meth:`~specact.lab.envs.task.Task.shapes` gives them, for a message."""
    return ", ".join(
        f"{name} width {shape[0]}" if len(shape) == 1 else f"{name} {' x '.join(map(str, shape))}"
        for name, shape in shapes.items()
    )
