"""Atomic file writes: after a kill or on a full disk a file is either complete or unchanged."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from specact.errors import ConfigError

_PARTIAL = re.compile(r".+\.[0-9]+-[0-9a-f]{8}\.partial")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def is_name(value: object) -> bool:
    """Whether a value is a safe name of a file or folder: no path separators, no characters that need quoting."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def check_name(kind: str, value: object) -> None:
    """Refuses an unsafe name of a file or folder, see :func:`is_name`; ConfigError for such a name."""
    if not is_name(value):
        raise ConfigError(
            f"{kind} cannot be named {value!r:.80}: a name has 1 to 64 of the characters A-Z a-z 0-9 . _ + - "
            "and begins with a letter or digit"
        )


def file_stem(name: str) -> str:
    """A name as part of a file's name, with the colon of ``MODULE:NAME`` replaced; some file systems forbid it."""
    return name.replace(":", ".")


def write_whole(path: Path, payload: bytes) -> None:
    """Writes a temporary file, syncs it, and renames it to ``path``; the last of several writers wins.

    Raises:
        ConfigError: if the file cannot be written; the previous one is unchanged.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; what was there is untouched. "
            "Free some space or choose another place, then run the same command again"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()  # after a failure


def remove_torn(folder: Path) -> None:
    """Removes temporary files that killed calls of :func:`write_whole` left below a folder; not during writes."""
    for path in folder.rglob("*.partial"):
        if _PARTIAL.fullmatch(path.name):
            path.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Checks that a folder can be written or created, before a long computation; creates nothing.

    Raises:
        ConfigError: if it is a file, or not writable by this user.
    """
    nearest = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{nearest} is a file, but {path} must be a folder; choose another place")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{nearest} cannot be written to; change its permissions or choose another place")


def write_json(path: Path, value: Any) -> None:
    """Writes plain values as strict JSON; see :func:`to_json`."""
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
