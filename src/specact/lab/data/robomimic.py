"""robomimic's HDF5 files: ``data/demo_0/obs/<key>`` and ``data/demo_0/actions``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.lab.data.episodes import Observed, joined
from specact.lab.data.frames import Frames, Images, join_frames, reading
from specact.lab.data.readers import Recording, check_size, matrix, positive_rate, rows

Kind = Literal["camera", "low", "other"]
# The key of all low-dimensional entries in one.
LOW = "low_dim"
# Filters that come with HDF5 (gzip, shuffle, fletcher32, szip, nbit, scaleoffset) and with h5py (lzf).
_FILTERS = frozenset((1, 2, 3, 4, 5, 6, 32000))


def read_robomimic(path: Path) -> Recording:
    """Read all demonstrations in the order of their numbers.

    ``state`` is the concatenation of the low-dimensional float entries of ``obs`` (one number or one row per step) in
    the order of their names; a camera's entry ``front_image`` is known as ``image.front``, and its frames stay on disk.
    Any entry can be asked for by its own name. The rate is ``control_freq`` in the file's ``env_args``.

    Raises:
        DataError: for damaged files, files without observations, and demonstrations that do not fit together.
    """

    def load(key: str) -> Observed:
        with _opened(path) as file:
            return _observation(path, file["data"], names, key, kinds)

    with _opened(path) as file:
        _check(file, path.stat().st_size)
        demos = file.get("data", {})
        names = _demonstrations(file, demos)
        kinds = _kinds(names[0], demos[names[0]])
        actions = _actions(demos, names, kinds)
        rate = _rate(demos.attrs.get("env_args"))
    low = any(kind == "low" for kind in kinds.values())
    cameras = {_known_as(key): key for key, kind in kinds.items() if kind == "camera"}
    return Recording(
        names=({"state": LOW} if low else {}) | cameras,
        keys=(*kinds, *((LOW,) if low else ())),
        load=load,
        action=joined("actions", actions),
        ends=np.cumsum([len(part) for part in actions.values()]).astype(np.int64),
        rate_hz=rate,
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import h5py

    with reading("this file, HDF5 as robomimic writes it,"), h5py.File(path, "r") as file:
        yield file


def _check(file: Any, stored: int) -> None:
    """Refuses links, numbers in other files, unknown or repeated filters, and a size far above the ``stored`` bytes."""
    import h5py

    sizes: dict[str, int] = {}

    def see(name: str, link: Any) -> str | None:
        """What is wrong; a visitor that raised would end in a SystemError."""
        if not isinstance(link, h5py.HardLink):
            return f"{name!r} is a link to {link.path!r}"
        entry = h5py.h5o.open(file.id, name.encode())
        if isinstance(entry, h5py.h5d.DatasetID):
            layout = entry.get_create_plist()
            filters = [layout.get_filter(number)[0] for number in range(layout.get_nfilters())]
            elsewhere = layout.get_external_count() or layout.get_layout() == h5py.h5d.VIRTUAL
            if elsewhere or len(set(filters)) < len(filters) or not _FILTERS.issuperset(filters):
                return f"{name!r} lies in other files, or is compressed twice or by a plug-in"
            # Of a camera's frames not more than a chunk is read at once.
            part = layout.get_chunk() if layout.get_layout() == h5py.h5d.CHUNKED and entry.rank == 4 else ()
            size = math.prod(part or entry.shape or ()) * entry.get_type().get_size()
            sizes[name if part else ""] = size if part else sizes.get("", 0) + size
        return None

    if wrong := file.visititems_links(see):
        raise DataError(f"{wrong}; only what is in the file itself is read: store it there, with gzip or lzf")
    for name, size in sizes.items():
        check_size(name or "its content", size, stored)


def _demonstrations(file: Any, demos: Any) -> list[str]:
    matches = [re.fullmatch(r"demo_(\d+)", name) for name in demos]
    names = sorted((match.group() for match in matches if match), key=lambda name: int(name[5:]))
    if not names:
        raise DataError(
            f"there is no 'data/demo_0'; found: {', '.join([*file, *demos]) or 'nothing'}. "
            f"Only robomimic's layout is supported"
        )
    return names


def _kinds(name: str, demo: Any) -> dict[str, Kind]:
    """The entries of ``obs`` that can be read, sorted, and what they are."""
    import h5py

    obs = demo.get("obs", {})

    def kind_of(entry: Any) -> Kind | None:
        if not isinstance(entry, h5py.Dataset) or entry.dtype.kind not in "fiub" or entry.ndim == 0:
            return None
        if entry.ndim == 4 and entry.shape[-1] == 3:
            return "camera"
        return "low" if entry.dtype.kind == "f" and entry.ndim in (1, 2) else "other"

    kinds = {key: kind for key in sorted(obs) if (kind := kind_of(obs[key])) is not None}
    if not set(kinds.values()) & {"camera", "low"}:
        raise DataError(
            f"{name} has no low-dimensional observations under 'obs'; found: {', '.join(obs) or 'nothing'}. "
            f"Raw recordings need robomimic's dataset_states_to_obs.py first"
        )
    return kinds


def _actions(demos: Any, names: list[str], kinds: dict[str, Kind]) -> dict[str, NDArray[np.float32]]:
    """The actions of every demonstration, after a check that all have the same observations, one per action."""
    import h5py

    actions = {}
    for name in names:
        demo = demos[name]
        if not isinstance(demo.get("actions"), h5py.Dataset):
            raise DataError(f"{name} has no 'actions'; found: {', '.join(demo)}")
        fields = _kinds(name, demo)
        if fields != kinds:
            raise DataError(
                f"{name} has the observations {', '.join(fields)}, but {names[0]} has {', '.join(kinds)}; all "
                "demonstrations must have the same"
            )
        actions[name] = matrix(f"actions of {name}", demo["actions"][()])
        for key in kinds:
            if len(demo["obs"][key]) != len(actions[name]):
                raise DataError(
                    f"{name} has {len(demo['obs'][key])} steps of {key!r} and {len(actions[name])} actions; "
                    f"one of each per step is needed"
                )
    return actions


def _observation(path: Path, demos: Any, names: list[str], key: str, kinds: dict[str, Kind]) -> Observed:
    if kinds.get(key) == "camera":
        stored = [demos[name]["obs"][key] for name in names]
        shapes = {frames.shape[1:] for frames in stored}
        if len(shapes) > 1 or any(frames.dtype != np.uint8 for frames in stored):
            raise DataError(f"the camera {key!r} must have uint8 frames of one size in all demonstrations")
        return join_frames([Frames(frames.shape, partial(_frames, path, frames.name)) for frames in stored])
    together = [key] if key in kinds else [key for key, kind in kinds.items() if kind == "low"]
    parts = {}
    for name in names:
        arrays = [rows(f"{key} of {name}", demos[name]["obs"][key][()]) for key in together]
        parts[name] = np.concatenate(arrays, axis=1) if len(arrays) > 1 else arrays[0]
    return joined("observations", parts)


def _frames(path: Path, name: str, rows: NDArray[np.int64]) -> Images:
    """A camera's frames in a demonstration."""
    with _opened(path) as file:
        return np.asarray(file[name][rows], dtype=np.uint8)


def _known_as(key: str) -> str:
    """``front_image`` is known as ``image.front``, and ``image`` as itself."""
    camera = re.sub(r"\W", "_", re.sub(r"_?(image|rgb)$", "", key))
    return f"image.{camera}" if camera else "image"


def _rate(env_args: Any) -> float | None:
    """The control rate [Hz] in robomimic's description of the environment; it is optional, so anything else is None."""
    with suppress(ValueError, TypeError, RecursionError, AttributeError, DataError):
        described = json.loads(env_args)
        inner = described.get("env_kwargs") or {}
        return positive_rate(inner.get("control_freq", described.get("control_freq")))
    return None
