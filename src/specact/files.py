"""Files that are either whole or as they were before: neither a kill nor a full disk leaves half of one."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from specact.errors import ConfigError


def write_whole(path: Path, payload: bytes) -> None:
    """Writes beside the old file, flushes to disk, then replaces it in one move.

    Raises:
        ConfigError: if the file cannot be written; the previous one is left as it was.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if temporary.is_file():
            temporary.unlink()
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; what was there is untouched. "
            "Free some space or choose another place, then run the same command again"
        ) from error


def check_folder(path: Path) -> None:
    """Checks that a folder can be written to or made, before the work whose results it is for; creates nothing.

    Raises:
        ConfigError: if it is a file, or lies where this user may not write.
    """
    nearest = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{nearest} is a file, but {path} must be a folder; choose another place")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{nearest} cannot be written to; change its permissions or choose another place")


def write_json(path: Path, value: Any) -> None:
    """Writes plain values as JSON that every reader understands; see :func:`to_json`."""
    write_whole(path, (to_json(value) + "\n").encode())


def to_json(value: Any) -> str:
    """Plain values as strict JSON: numbers that are not finite become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
