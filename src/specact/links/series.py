"""Reads a recorded series: a text file with one number a line and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.types import Floats


def read_series(path: Path, allowed: str, fits: Callable[[Floats], NDArray[np.bool_]]) -> Floats:
    """The numbers of a file, one a line.

    Args:
        path: of the file.
        allowed: what a line has to be, in words, for the error.
        fits: which numbers of a series are allowed, bool ``[n]``.

    Returns:
        float64 ``[n]``, n >= 1, read-only.

    Raises:
        ConfigError: if the file cannot be read or is empty, or for the first line that is not as it has to be.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the recorded link {path}: {error.strerror}") from error
    if not lines:
        raise ConfigError(f"the recorded link {path} is empty; it needs at least one line, each {allowed}")
    values = np.array([_number(line) for line in lines])
    bad = np.flatnonzero(~fits(values))
    if len(bad):
        line = lines[bad[0]][:40].decode(errors="replace")
        raise ConfigError(f"{path}, line {bad[0] + 1}: {line!r} is not allowed; every line must be {allowed}")
    values.setflags(write=False)
    return values


def _number(line: bytes) -> float:
    try:
        return float(line) if b"_" not in line else np.nan  # which fits no series
    except ValueError:
        return np.nan
