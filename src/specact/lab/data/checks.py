"""Checks of demonstrations: a description with warnings, and whether they fit a task, a robot and a pair."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, DataError
from specact.lab.data.episodes import Episodes
from specact.lab.data.readers import format_of
from specact.observation import Field
from specact.pair import Pair

if TYPE_CHECKING:  # describing needs no simulator
    from specact.lab.envs.task import Task

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
_RATE_TOLERANCE = 1e-3  # relative, for rates that were rounded to float32


def describe(episodes: Episodes, source: Path | str) -> dict[str, Any]:
    """Describes demonstrations that were read from ``source``, as plain values. Reads one frame of every camera.

    ``format`` is a key of :data:`specact.lab.data.readers.READERS`, or ``memory``; ``shapes`` and ``cameras`` are of
    actions and observations, ``instructions`` the distinct ones; ``length_*`` count the steps of an episode;
    ``action_*`` are over all finite values of each action dimension, None without one, the quantiles by their names
    (``"0.01"``); ``warnings`` are sentences on possible defects.
    """
    lengths = np.diff(episodes.ends, prepend=0)
    arrays = {"action": episodes.action, **episodes.observation}
    return {
        "source": str(source),
        "format": format_of(source) if Path(source).exists() else "memory",
        "episodes": len(episodes),
        "steps": episodes.steps,
        "rate_hz": episodes.rate_hz,
        "shapes": {name: [int(n) for n in array.shape] for name, array in arrays.items()},
        "cameras": list(episodes.cameras),
        "instructions": sorted(set(episodes.instructions or ())),
        "length_min": int(lengths.min()),
        "length_median": float(np.median(lengths)),
        "length_max": int(lengths.max()),
        "action_min": _quantile(episodes.action, 0),
        "action_max": _quantile(episodes.action, 1),
        "action_quantiles": {str(q): _quantile(episodes.action, q) for q in QUANTILES},
        "warnings": [
            *not_finite(episodes),
            *_outside(episodes.action),
            *_constant("action", episodes.action),
            *(text for name, values in _numbers(episodes).items() for text in _constant(name, values)),
            *_unreadable(episodes),
            *_lengths(lengths),
            *_duplicates(episodes),
        ],
    }


def _quantile(values: NDArray[np.float32], q: float) -> list[float | None]:
    finite = (column[np.isfinite(column)] for column in values.T)
    return [float(np.quantile(column, q)) if column.size else None for column in finite]


def not_finite(episodes: Episodes) -> list[str]:
    """A sentence on each array with NaN or infinite numbers, with the first position; empty if there are none."""
    sentences = []
    for name, values in {**_numbers(episodes), "action": episodes.action}.items():
        positions = np.argwhere(~np.isfinite(values.reshape(len(values), -1)))
        if len(positions):
            row, dimension = positions[0].tolist()
            episode = int(np.searchsorted(episodes.ends, row, side="right"))
            sentences.append(
                f"{len(positions)} values of {name} are NaN or infinite; the first is in episode {episode}, "
                f"step {row - int(episodes.starts[episode])}, dimension {dimension}"
            )
    return sentences


def _numbers(episodes: Episodes) -> dict[str, NDArray[np.float32]]:
    """The observations that are not camera frames."""
    return {name: array for name, array in episodes.observation.items() if isinstance(array, np.ndarray)}


def _unreadable(episodes: Episodes) -> list[str]:
    """Cameras whose first frame cannot be read."""
    sentences = []
    for name in episodes.cameras:
        try:
            episodes.frames(name)[0]
        except (DataError, ModuleNotFoundError) as error:
            sentences.append(f"the camera {name} cannot be read: {error}")
    return sentences


def _outside(action: NDArray[np.float32]) -> list[str]:
    """Actions outside [-1, 1] where most are inside: a robot that clips would not execute the recorded ones."""
    share = float(np.mean(np.abs(action[np.isfinite(action)]) > 1)) if np.isfinite(action).any() else 0.0
    if not 0 < share < 0.5:
        return []
    text = (
        f"{100 * share:.2g} % of the action values lie outside [-1, 1]: if the robot or environment clips actions, "
        f"it will not do what was recorded; if these are physical units, ignore this"
    )
    return [text]


def _constant(name: str, values: NDArray[np.float32]) -> list[str]:
    # Dimensions with NaN compare unequal to themselves; not_finite reports them.
    values = values.reshape(len(values), -1)
    constant = np.flatnonzero((values == values[:1]).all(axis=0)) if len(values) > 1 else np.zeros(0, np.int64)
    text = f"{len(constant)} of {values.shape[1]} {name} dimensions never change: {_some(constant)}"
    return [text] if len(constant) else []


def _lengths(lengths: NDArray[np.int64]) -> list[str]:
    """Too short to hold a transition, or beyond Tukey's outer fences (with a spread of at least a tenth)."""
    short = np.flatnonzero(lengths < 2)
    low, middle, high = np.quantile(lengths, [0.25, 0.5, 0.75])
    margin = 3 * max(high - low, 0.1 * middle)
    odd = np.flatnonzero((lengths < low - margin) | (lengths > high + margin))
    sentences = [f"{len(short)} episodes are shorter than 2 steps: {_some(short)}"] if len(short) else []
    if len(odd):
        sentences.append(
            f"{len(odd)} episodes are far shorter or longer than the others (half have {low:g} to {high:g} "
            f"steps): {', '.join(f'{e} ({lengths[e]} steps)' for e in odd[:5])}{' ...' if len(odd) > 5 else ''}"
        )
    return sentences


def _duplicates(episodes: Episodes) -> list[str]:
    """Episodes with the same numeric observations and actions; camera frames are not compared."""
    first: dict[bytes, int] = {}
    pairs = []
    arrays = [*_numbers(episodes).values(), episodes.action]
    for number, span in enumerate(episodes.slices()):
        digest = hashlib.blake2b(b"".join(array[span].tobytes() for array in arrays)).digest()
        earlier = first.setdefault(digest, number)
        if earlier != number:
            pairs.append(f"{number} (as {earlier})")
    return [f"{len(pairs)} episodes repeat an earlier one exactly: {_some(pairs)}"] if pairs else []


def _some(items: Any) -> str:
    return ", ".join(str(item) for item in items[:10]) + (" ..." if len(items) > 10 else "")


def convert_to_task(task: Task, episodes: Episodes, source: str) -> Episodes:
    """Converts demonstrations, as a reader returns them, to a task; ``source`` is their origin, for messages.

    Raises:
        DataError: for non-finite values, a recorded rate that is not the task's, and observations and actions that do
            not fit the environment.
    """
    recorded = as_recorded(episodes, task.rate_hz, source, f"the task {task.name!r} runs at")
    try:
        fitted = task.features(recorded)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    _check_finite(fitted, f"{source}, in the terms of the task {task.name!r}")
    return _checked(task, fitted, source)


def as_recorded(episodes: Episodes, rate_hz: float, source: str, who: str = "the recipe says rate_hz =") -> Episodes:
    """Demonstrations of a robot without an environment, unconverted, at the control rate of the policies.

    Raises:
        DataError: for non-finite values, and another recorded rate.
    """
    _check_finite(episodes, source)
    recorded = episodes.rate_hz
    if recorded is not None and not math.isclose(recorded, rate_hz, rel_tol=_RATE_TOLERANCE):
        raise DataError(
            f"{source} was recorded at {recorded:g} Hz, but {who} {rate_hz:g}; resample the demonstrations, or choose "
            "the rate they were recorded at"
        )
    return replace(episodes, rate_hz=rate_hz)


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
        raise DataError(f"{source} has {_in_words(shapes)}; the task {task.name!r} needs {_in_words(wanted)}")
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
            f"the bundle {bundle.name!r} has {_in_words(shapes)}, but the task {task.name!r} has "
            f"{_in_words(wanted)}; the bundle was made for the task {bundle.env!r}"
        )


def _in_words(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(
        f"{name} width {shape[0]}" if len(shape) == 1 else f"{name} {' x '.join(map(str, shape))}"
        for name, shape in shapes.items()
    )
