"""Demonstrations on disk: the content of a path determines its reader, a recipe which arrays are which observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import field
from numpy.typing import NDArray

from specact.errors import DataError, unknown_name
from specact.lab.data.episodes import Episodes, Observed
from specact.lab.data.frames import Frames
from specact.records import BelowOne, Count, NotNegative, Positive, Record, Seed, WholeNumber

# The functions that read a path of each format, as a Recording.
READERS = {
    "npz": "specact.lab.data.arrays:read_npz",
    "zarr": "specact.lab.data.arrays:read_zarr",
    "lerobot": "specact.lab.data.lerobot:read_lerobot",
    "robomimic": "specact.lab.data.robomimic:read_robomimic",
}
SUPPORTED = (
    "a .npz file, a zarr replay buffer (folder with .zgroup or zarr.json), a LeRobot dataset (folder with "
    "meta/info.json), a robomimic .hdf5 or .h5 file"
)


# What is read of a file may take this much memory, and so many times the size of the file.
_UNPACKED_BYTES, _UNPACKED_TIMES = 1 << 30, 128


class Source(Record, frozen=True):
    """The dataset's own name of an observation's array, such as ``observation.images.front``, and its preprocessing.

    Camera frames are cropped (top, left, height and width), and resized to height and width. ``history`` is the default
    of policies: 0 for only the newest one, without a time axis; None for the recipe's ``window``, and 0 for a goal.
    """

    key: str
    size: tuple[Count, Count] | None = None
    crop: tuple[WholeNumber, WholeNumber, Count, Count] | None = None
    history: WholeNumber | None = None


Sources = Mapping[str, Source]


class Demonstrations(Record, frozen=True, kw_only=True):
    """The demonstrations of a recipe; ``env`` is an environment's name or ``MODULE:TASK``.

    A robot without an environment has the control rate ``rate_hz`` instead. They are the files ``data``, with the
    sources ``observations`` by name (if empty, all known ones), or ``generate_episodes`` of the scripted expert, with
    ``generate_noise`` on its actions; the share ``held_out`` of their episodes is kept for validation.
    """

    env: str | None = None
    rate_hz: Positive | None = None
    observations: dict[str, Source] = field(default_factory=dict)
    data: tuple[str, ...] = ()
    generate_episodes: WholeNumber = 0
    generate_noise: NotNegative = 0.0
    seed: Seed = 0
    held_out: BelowOne = 0.05


@dataclass(frozen=True)
class Recording:
    """A file or folder of demonstrations, before its observations are read; else as its episodes.

    ``names`` are the dataset's own ones of each known observation, ``keys`` those of all loadable arrays, which
    ``load`` loads, camera frames lazily.
    """

    names: Mapping[str, str]
    keys: tuple[str, ...]
    load: Callable[[str], Observed]
    action: NDArray[np.float32]
    ends: NDArray[np.int64]
    rate_hz: float | None
    instructions: tuple[str, ...] | None = None
    disturbed: NDArray[np.bool_] | None = None

    def episodes(self, sources: Sources) -> Episodes:
        """The requested observations; without a request, all known ones.

        Raises:
            DataError: if one is missing, or cannot be cropped as requested.
        """
        wanted = sources or {name: Source(key) for name, key in self.names.items()}
        if not wanted:
            raise DataError(
                "there is no 'state', 'obs', 'observation' or 'image'; found: "
                f"{', '.join(sorted(self.keys)) or 'nothing'}. Say in the recipe's table [observations] which "
                "array is which, or rename one"
            )
        seen = {name: self._observation(name, source) for name, source in wanted.items()}
        return Episodes(seen, self.action, self.ends, self.rate_hz, self.instructions, self.disturbed)

    def _observation(self, name: str, source: Source) -> Observed:
        key = source.key if source.key in self.keys else self.names.get(source.key)
        if key is None:
            unknown = unknown_name("key of this dataset", source.key, {*self.keys, *self.names})
            raise DataError(f"the observation {name!r}: {unknown}")
        array = self.load(key)
        if source.crop is None and source.size is None:
            return array
        if not isinstance(array, Frames):
            raise DataError(f"the observation {name!r} is not made of camera frames, so it has no size and no crop")
        return array.fitted(source.crop, source.size)


def check_size(name: str, nbytes: int, stored: int) -> None:
    """Refuses what a file of ``stored`` bytes says to be far larger [bytes], before it is unpacked."""
    if nbytes > _UNPACKED_BYTES + _UNPACKED_TIMES * stored:
        raise DataError(
            f"{name} would take {nbytes / 1e9:.1f} GB of memory, and its file has {stored / 1e6:.1f} MB: more than "
            f"{_UNPACKED_TIMES} times as much; if this is no mistake, store it in several files, less compressed"
        )


def numbers(name: str, value: Any) -> NDArray[Any]:
    """Checks that ``value`` is an array of real numbers."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise DataError(f"{name} has the type {array.dtype}; real numbers are needed, save float32")
    return array


def rows(name: str, value: NDArray[Any]) -> NDArray[np.float32]:
    """float32 ``[N, ...]``; one number per step becomes ``[N, 1]``, and what float32 cannot hold infinite."""
    value = numbers(name, value)
    if value.ndim == 0:
        raise DataError(f"{name} is a single number; one flat row per step is needed")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(value[:, None] if value.ndim == 1 else value, dtype=np.float32)


def matrix(name: str, value: NDArray[Any]) -> NDArray[np.float32]:
    """float32 ``[N, width]``, see :func:`rows`."""
    if np.ndim(value) != 2:
        raise DataError(f"{name} have shape {np.shape(value)}; [steps, width] is needed: one flat row per step")
    return rows(name, value)


def positive_rate(value: Any) -> float:
    """A control rate [Hz]."""
    value = numbers("rate_hz", value)
    if value.size != 1 or not np.isfinite(value).all() or not (value > 0).all():
        raise DataError(f"the rate is {value.tolist()}; one positive number is needed [Hz]")
    return float(value.item())


def read(path: Path | str, sources: Mapping[str, Source] = MappingProxyType({})) -> Episodes:
    """Reads a ``.npz`` file, a zarr replay buffer, a LeRobot dataset's folder or a robomimic HDF5 file.

    ``sources`` are the observations to read, by name; if empty, all known ones. Camera frames are read lazily, except
    those of a ``.npz`` file. A path that is missing, of unknown format, or damaged is a :exc:`DataError` with its name.
    """
    path = Path(path)
    module, _, reader = READERS[format_of(path)].partition(":")
    try:
        recording: Recording = getattr(import_module(module), reader)(path)
        return recording.episodes(sources)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def format_of(path: Path | str) -> str:
    """The format at ``path``, a key of :data:`READERS`; by file names only."""
    path = Path(path)
    try:
        if path.is_dir():
            return _format_of_folder(path)
        if path.is_file():
            kind = {".npz": "npz", ".hdf5": "robomimic", ".h5": "robomimic"}.get(path.suffix.lower())
            if kind:
                return kind
            raise DataError(f"{path} is a file of unknown kind {path.suffix!r}; supported: {SUPPORTED}")
    except OSError as error:
        raise DataError(f"{path} cannot be opened ({error}); check its permissions") from error
    raise DataError(f"there is nothing at {path}; check the path. Supported: {SUPPORTED}")


def _format_of_folder(path: Path) -> str:
    if path.suffix == ".zarr" or (path / ".zgroup").exists() or (path / "zarr.json").exists():
        return "zarr"
    if (path / "meta/info.json").is_file():
        return "lerobot"
    names = sorted(entry.name for entry in path.iterdir())
    listing = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise DataError(
        f"{path} is a folder with {listing or 'nothing in it'}; supported: {SUPPORTED}. "
        f"Give the path of the dataset itself"
    )
