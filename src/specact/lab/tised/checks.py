"""Validation of the equations' arguments: positive times, ratios in (0, 1], whole numbers of actions."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specact.errors import ConfigError
from specact.types import Floats


def positive(what: str, value: ArrayLike) -> Floats:
    """Converts to a float64 array ``[...]``; raises :exc:`ConfigError` for values that are not positive and finite."""
    values = np.asarray(value, dtype=np.float64)
    return _checked(values, np.isfinite(values) & (values > 0.0), f"{what} must be positive and finite")


def not_negative(what: str, value: ArrayLike) -> Floats:
    """Likewise, for finite values of at least 0."""
    values = np.asarray(value, dtype=np.float64)
    return _checked(values, np.isfinite(values) & (values >= 0.0), f"{what} must be finite and at least 0")


def inference_ratio(alpha: ArrayLike) -> Floats:
    """Likewise, for alpha in (0, 1]; 1 is the unchanged policy."""
    values = np.asarray(alpha, dtype=np.float64)
    allowed = "alpha, the remaining share of the full inference time, must lie in (0, 1]"
    return _checked(values, (values > 0.0) & (values <= 1.0), allowed)


def chunk_actions(actions: ArrayLike) -> Floats:
    """Likewise, for n, a whole number of at least 1."""
    values = np.asarray(actions, dtype=np.float64)
    whole = np.isfinite(values) & (values == np.rint(values))
    return _checked(values, whole & (values >= 1.0), "a chunk must have a whole number of actions, at least 1")


def overlap_depth(overlap: ArrayLike, actions: ArrayLike = np.inf) -> Floats:
    """Likewise, for m, a whole number from 0 to n: the next inference cannot start before the chunk does."""
    values = np.asarray(overlap, dtype=np.float64)
    whole = np.isfinite(values) & (values == np.rint(values))
    _checked(values, whole & (values >= 0.0), "the overlap must be a whole number of actions, at least 0")
    return _checked(values, values <= np.asarray(actions), "an overlap must fit into the chunk's number of actions")


def _checked(values: Floats, allowed: np.ndarray, must: str) -> Floats:
    if not np.all(allowed):
        shown = f"{values.item():g}" if values.ndim == 0 else np.array2string(values, threshold=6)
        raise ConfigError(f"{must}, got {shown}")
    return values
