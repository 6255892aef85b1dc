"""Pinned values as those of JSON: how they are compared, and which of them are left out."""

from __future__ import annotations

from typing import Any

import numpy as np

# Stands for a value that is not pinned, because it hangs on the last bits of a processor.
LEFT_OUT = "*"
# Of numbers, times their magnitude where that is above 1.
TOLERANCE = 1e-4


def plain(value: Any) -> Any:
    """As values of JSON, numbers with eight significant digits."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    return float(f"{value:.8g}") if isinstance(value, float) else value


def differences(stored: Any, found: Any, numbers: float = TOLERANCE, path: str = "") -> list[str]:
    """What differs, one line each: everything exactly, but for numbers with a fraction."""
    if stored == LEFT_OUT:
        return []
    if isinstance(stored, dict) and isinstance(found, dict) and stored.keys() == found.keys():
        return [line for key in stored for line in differences(stored[key], found[key], numbers, f"{path}/{key}")]
    if isinstance(stored, list) and isinstance(found, list) and len(stored) == len(found):
        pairs = enumerate(zip(stored, found, strict=True))
        return [line for index, both in pairs for line in differences(*both, numbers, f"{path}/{index}")]
    if type(stored) is float and type(found) is float:
        same = stored == found or abs(stored - found) <= numbers * max(1.0, abs(stored))
    else:
        same = type(stored) is type(found) and stored == found
    return [] if same else [f"{path}: {stored!r:.60} was pinned, {found!r:.60} was found"]
