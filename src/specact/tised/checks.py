"""Validation of the equations' arguments: positive times, ratios in (0, 1], whole numbers of actions."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specact.errors import ConfigError
from specact.types import Floats


def positive(what: str, value: ArrayLike) -> Floats:
    """Converts to a float64 array ``[...]``; ``what`` names the quantity in the message.

    Raises:
        ConfigError: unless all of them are positive and finite.
    """
    values = np.asarray(value, dtype=np.float64)
    if not (np.isfinite(values).all() and (values > 0.0).all()):
        raise ConfigError(f"{what} must be positive and finite, got {_shown(values)}")
    return values


def not_negative(what: str, value: ArrayLike) -> Floats:
    """Converts to a float64 array ``[...]``; ``what`` names the quantity in the message.

    Raises:
        ConfigError: unless all of them are finite and at least 0.
    """
    values = np.asarray(value, dtype=np.float64)
    if not (np.isfinite(values).all() and (values >= 0.0).all()):
        raise ConfigError(f"{what} must be finite and at least 0, got {_shown(values)}")
    return values


def inference_ratio(alpha: ArrayLike) -> Floats:
    """Converts alpha to a float64 array ``[...]``.

    Raises:
        ConfigError: unless all values lie in (0, 1].
    """
    values = np.asarray(alpha, dtype=np.float64)
    if not ((values > 0.0) & (values <= 1.0)).all():
        raise ConfigError(
            f"alpha, the remaining share of the full inference time, must lie in (0, 1], got {_shown(values)}; "
            "1 is the unchanged policy"
        )
    return values


def chunk_actions(actions: ArrayLike) -> Floats:
    """Converts n, the number of actions per chunk, to a float64 array ``[...]``.

    Raises:
        ConfigError: unless all values are whole numbers of at least 1.
    """
    values = np.asarray(actions, dtype=np.float64)
    if not (_whole(values) and (values >= 1.0).all()):
        raise ConfigError(f"a chunk must have a whole number of actions, at least 1, got {_shown(values)}")
    return values


def overlap_depth(overlap: ArrayLike, actions: ArrayLike | None = None) -> Floats:
    """Converts m, the overlap depth, to a float64 array ``[...]``.

    Raises:
        ConfigError: unless all values are whole numbers >= 0 and, if ``actions`` is given, at most ``actions``.
    """
    values = np.asarray(overlap, dtype=np.float64)
    if not (_whole(values) and (values >= 0.0).all()):
        raise ConfigError(f"the overlap must be a whole number of actions, at least 0, got {_shown(values)}")
    if actions is not None and (values > np.asarray(actions, dtype=np.float64)).any():
        raise ConfigError(
            f"an overlap of {_shown(values)} does not fit into a chunk of {_shown(np.asarray(actions))} actions: "
            "the next inference cannot start before the chunk does; choose at most the chunk's number of actions"
        )
    return values


def _whole(values: Floats) -> bool:
    return bool(np.isfinite(values).all() and (values == np.rint(values)).all())


def _shown(values: Floats) -> str:
    return f"{values.item():g}" if values.ndim == 0 else np.array2string(values, threshold=6)
