"""Summary of a set of demonstrations, with warnings."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.lab.data.episodes import Episodes
from specact.lab.data.readers import format_of

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)


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
