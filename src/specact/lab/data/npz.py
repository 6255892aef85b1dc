"""Reader of ``.npz`` demonstrations, and the known names of flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.lab.data.decoding import reading
from specact.lab.data.episodes import Observed
from specact.lab.data.frames import as_frames, check_frames
from specact.lab.data.sources import Recording

STATE = ("state", "obs", "observation")
ACTION = ("action", "actions")
GOAL = ("goal", "current_subtask")
IMAGE = ("image", "img")


def read_npz(path: Path) -> Recording:
    """Reads the demonstrations of an .npz archive into memory.

    ``state|obs|observation``, ``action|actions``, ``episode_ends``; ``goal|current_subtask``, ``image|img``, further
    ones such as ``image.front``, and ``rate_hz`` where present. The earlier name is preferred; other arrays are read
    only on request.

    Raises:
        DataError: for damaged files, missing arrays, arrays of objects (they would have to be unpickled, which can run
            any code) and lengths that contradict each other.
    """
    with _opened(path) as arrays:
        recording = from_columns(arrays, tuple(arrays), partial(_load, path))
        # Read now, so that damage is detected early.
        loaded = {key: observed(key, arrays[key]) for key in recording.names.values()}
    return replace(recording, load=lambda key: loaded[key] if key in loaded else _load(path, key))


def _load(path: Path, key: str) -> Observed:
    with _opened(path) as arrays:
        return observed(key, arrays[key])


@contextmanager
def _opened(path: Path) -> Iterator[Mapping[str, NDArray[Any]]]:
    try:
        # Opened here, because numpy does not close files that are no archives.
        with reading("this npz archive"), path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if isinstance(arrays, np.ndarray):
                raise DataError("this is not an npz archive; write it with numpy.savez_compressed")
            with arrays:
                yield arrays
    except DataError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            "this file holds pickled objects, which are refused because unpickling can run any code; "
            "save plain numeric arrays, concatenated over episodes, with 'episode_ends'"
        ) from error


def from_columns(
    columns: Mapping[str, NDArray[Any]], stored: tuple[str, ...], load: Callable[[str], Observed]
) -> Recording:
    """Demonstrations from named flat arrays, ``[N, ...]`` each, and ``episode_ends`` ``[E]`` (exclusive).

    Args:
        columns: with the actions and ``episode_ends``, if present.
        stored: names of all arrays.
        load: reads an observation.
    """
    rate = columns.get("rate_hz")
    found = {name: first_of(stored, known) for name, known in {"state": STATE, "goal": GOAL, "image": IMAGE}.items()}
    several = {key: key for key in sorted(stored) if key.partition(".")[0] in found and "." in key}
    names = {name: key for name, key in found.items() if key is not None} | several
    action, ends = _needed(columns, stored, ACTION), _needed(columns, stored, ("episode_ends",))
    return Recording(
        names=names,
        keys=tuple(key for key in stored if key not in (*ACTION, "episode_ends", "rate_hz")),
        load=load,
        action=matrix("actions", columns[action]),
        ends=indices("episode_ends", columns[ends]),
        rate_hz=None if rate is None else positive_rate(rate),
    )


def observed(key: str, value: NDArray[Any]) -> Observed:
    """The observation from the array ``key``: camera frames ``[N, H, W, 3]``, or numbers ``[N, ...]``."""
    if is_camera(key, value.shape):
        return as_frames(frames(value))
    return matrix("observations", value) if key in STATE else rows(key, value)


def is_camera(key: str, shape: tuple[int, ...]) -> bool:
    """Whether an array is camera frames, by its name or else by its shape."""
    return key.partition(".")[0] in IMAGE or (len(shape) == 4 and shape[-1] == 3)


def first_of(columns: Collection[str], names: tuple[str, ...]) -> str | None:
    """The first of ``names`` that exists."""
    return next((name for name in names if name in columns), None)


def _needed(columns: Mapping[str, Any], stored: Collection[str], names: tuple[str, ...]) -> str:
    found = first_of(columns, names)
    if found is None:
        raise DataError(
            f"there is no {' or '.join(map(repr, names))}; found: {', '.join(sorted(stored)) or 'nothing'}. "
            f"Rename the array, or convert the data"
        )
    return found


def numbers(name: str, value: NDArray[Any]) -> NDArray[Any]:
    """Checks that ``value`` is an array of real numbers."""
    value = np.asarray(value)
    if value.dtype.kind not in "fiub":
        raise DataError(f"{name} has the type {value.dtype}; real numbers are needed, save float32")
    return value


def matrix(name: str, value: NDArray[Any]) -> NDArray[np.float32]:
    """float32 ``[N, width]``. Values beyond float32 become infinite, which :func:`describe` reports."""
    value = numbers(name, value)
    if value.ndim != 2:
        raise DataError(f"{name} have shape {value.shape}; [steps, width] is needed: one flat row per step")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(value, dtype=np.float32)


def rows(name: str, value: NDArray[Any]) -> NDArray[np.float32]:
    """float32 ``[N, ...]``; one number per step becomes ``[N, 1]``."""
    value = numbers(name, value)
    if value.ndim == 0:
        raise DataError(f"{name} is a single number; one value per step is needed")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(value[:, None] if value.ndim == 1 else value, dtype=np.float32)


def indices(name: str, value: NDArray[Any]) -> NDArray[np.int64]:
    """int64 ``[E]``."""
    value = np.asarray(value)
    if value.dtype.kind not in "iu" or value.ndim != 1:
        raise DataError(f"{name} has type {value.dtype} and shape {value.shape}; a flat array of integers is needed")
    return value.astype(np.int64)


def positive_rate(value: Any) -> float:
    """A control rate [Hz]."""
    value = numbers("rate_hz", value)
    if value.size != 1 or not np.isfinite(value).all() or not (value > 0).all():
        raise DataError(f"the rate is {value.tolist()}; one positive number is needed [Hz]")
    return float(value.item())


def frames(value: NDArray[Any], scale: float | None = None) -> NDArray[np.uint8]:
    """Camera frames as uint8 ``[..., H, W, 3]``. Floats are taken as 0..255, or as 0..1 where none is above 1.

    Args:
        value: real numbers ``[N, H, W, 3]``.
        scale: factor to 0..255 if it is known already.
    """
    value = numbers("image", value)
    check_frames(value.shape)
    if value.dtype == np.uint8:
        return value
    if not np.isfinite(value).all():
        raise DataError("the image holds values that are not finite; record it again or leave it out")
    factor = frame_scale(value) if scale is None else scale
    if factor > 1 and value.size and value.max() > 1:
        raise DataError(
            "some frames of the image lie within 0..1 and some do not; store them as uint8, or all of them in one range"
        )
    return np.clip(np.rint(value * np.float32(factor)), 0, 255).astype(np.uint8)


def frame_scale(value: NDArray[Any]) -> float:
    """255 if these are floats within 0..1, else 1."""
    return 255.0 if value.dtype.kind == "f" and value.size and value.max() <= 1 else 1.0
