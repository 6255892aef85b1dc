"""Readers of demonstrations; the content of a path determines its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from specact.errors import DataError
from specact.lab.data.arrays import read_npz, read_zarr
from specact.lab.data.episodes import Episodes
from specact.lab.data.lerobot import read_lerobot
from specact.lab.data.robomimic import read_robomimic
from specact.lab.data.sources import Recording, Source

READERS: dict[str, Callable[[Path], Recording]] = {
    "npz": read_npz,
    "zarr": read_zarr,
    "lerobot": read_lerobot,
    "robomimic": read_robomimic,
}
SUPPORTED = (
    "a .npz file, a zarr replay buffer (folder with .zgroup or zarr.json), a LeRobot dataset (folder with "
    "meta/info.json), a robomimic .hdf5 or .h5 file"
)


def read(path: Path | str, sources: Mapping[str, Source] = MappingProxyType({})) -> Episodes:
    """Reads a ``.npz`` file, a zarr replay buffer, a LeRobot dataset's folder or a robomimic HDF5 file.

    ``sources`` are the observations to read, by name; if empty, all known ones. Camera frames are read lazily, except
    those of a ``.npz`` file. A path that is missing, of unknown format, or damaged is a :exc:`DataError` with its name.
    """
    path = Path(path)
    reader = READERS[format_of(path)]
    try:
        return reader(path).episodes(sources)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def format_of(path: Path | str) -> str:
    """The format at ``path``, a key of :data:`READERS`; by file names only."""
    path = Path(path)
    try:
        if path.is_dir():
            return _format_of_folder(path)
        if path.is_file():
            found = {".npz": "npz", ".hdf5": "robomimic", ".h5": "robomimic"}.get(path.suffix.lower())
            if found:
                return found
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
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise DataError(
        f"{path} is a folder with {shown or 'nothing in it'}; supported: {SUPPORTED}. "
        f"Give the path of the dataset itself"
    )
