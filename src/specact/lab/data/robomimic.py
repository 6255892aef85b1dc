"""robomimic's HDF5 files: ``data/demo_0/obs/<key>`` and ``data/demo_0/actions``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError, MissingExtraError
from specact.lab.data import npz
from specact.lab.data.episodes import Episodes


def read_robomimic(path: Path) -> Episodes:
    """Read all demonstrations in the order of their numbers.

    An observation is the concatenation of the low-dimensional float entries of ``obs`` (one number or one row per step)
    in the order of their names; images and other entries are not read. The rate is ``control_freq`` in the file's
    ``env_args``, where it is told.

    Raises:
        DataError: for damaged files, files without observations, and demonstrations that do not fit together.
        MissingExtraError: if h5py is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingExtraError("h5py", "train") from error
    try:
        with h5py.File(path, "r") as file:
            return _read(file, h5py.Dataset)
    # What h5py raises on damaged files.
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError, MemoryError) as error:
        raise DataError(f"this file is damaged or not HDF5 as robomimic writes it ({error}); copy it again") from error


def _read(file: Any, dataset: type) -> Episodes:
    demos = file.get("data", {})
    matches = [re.fullmatch(r"demo_(\d+)", name) for name in demos]
    names = sorted((match.group() for match in matches if match), key=lambda name: int(name[5:]))
    if not names:
        raise DataError(
            f"there is no 'data/demo_0'; found: {', '.join([*file, *demos]) or 'nothing'}. "
            f"Only robomimic's layout is supported"
        )
    keys = _keys(names[0], demos[names[0]], dataset)
    states, actions = [], []
    for name in names:
        demo = demos[name]
        if not isinstance(demo.get("actions"), dataset):
            raise DataError(f"{name} has no 'actions'; found: {', '.join(demo)}")
        if _keys(name, demo, dataset) != keys:
            raise DataError(
                f"{name} has the observations {', '.join(_keys(name, demo, dataset))}, but {names[0]} has "
                f"{', '.join(keys)}; all demonstrations must have the same"
            )
        actions.append(npz.matrix(f"actions of {name}", demo["actions"][()]))
        parts = [_rows(f"{key} of {name}", demo["obs"][key][()]) for key in keys]
        for key, part in zip(keys, parts, strict=True):
            if len(part) != len(actions[-1]):
                raise DataError(
                    f"{name} has {len(part)} steps of {key!r} and {len(actions[-1])} actions; "
                    f"one of each per step is needed"
                )
        states.append(np.concatenate(parts, axis=1))
    for what, rows in (("observations", states), ("actions", actions)):
        odd = next((i for i, part in enumerate(rows) if part.shape[1] != rows[0].shape[1]), None)
        if odd is not None:
            raise DataError(
                f"{what} of {names[odd]} are {rows[odd].shape[1]} wide, those of {names[0]} "
                f"{rows[0].shape[1]}; all must be equal"
            )
    return Episodes(
        state=np.concatenate(states),
        action=np.concatenate(actions),
        ends=np.cumsum([len(part) for part in actions]).astype(np.int64),
        rate_hz=_rate(demos.attrs.get("env_args")),
    )


def _keys(name: str, demo: Any, dataset: type) -> list[str]:
    """Names of the low-dimensional observations, sorted."""
    obs = demo.get("obs", {})
    keys = sorted(k for k in obs if isinstance(obs[k], dataset) and obs[k].dtype.kind == "f" and obs[k].ndim in (1, 2))
    if not keys:
        raise DataError(
            f"{name} has no low-dimensional observations under 'obs'; found: {', '.join(obs) or 'nothing'}. "
            f"Raw recordings need robomimic's dataset_states_to_obs.py first"
        )
    return keys


def _rows(name: str, value: NDArray[Any]) -> NDArray[np.float32]:
    return npz.matrix(name, value[:, None] if value.ndim == 1 else value)


def _rate(env_args: Any) -> float | None:
    """The control rate [Hz] in robomimic's description of the environment; it is optional, so anything else is None."""
    try:
        described = json.loads(env_args)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(described, dict):
        return None
    inner = described.get("env_kwargs")
    rate = (inner if isinstance(inner, dict) else {}).get("control_freq", described.get("control_freq"))
    return float(rate) if isinstance(rate, int | float) and 0 < rate < float("inf") else None
