"""The device's memory of what it saw: observations in, a checked window out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ObservationError
from specact.families.chunks.policy import ChunkSpec
from specact.families.codes.spec import PolicySpec
from specact.types import Window

Observation = Mapping[str, Any] | NDArray[Any]


class ObservationWindow:
    """The last T observations of an episode; before there are T, the first one is repeated.

    Args:
        spec: says which shapes an observation must have.
    """

    def __init__(self, spec: PolicySpec | ChunkSpec) -> None:
        self._spec = spec
        self._state: NDArray[np.float32] | None = None
        self._image: NDArray[np.uint8] | None = None

    def reset(self) -> None:
        """Forgets the episode."""
        self._state = self._image = None

    def push(self, observation: Observation) -> Window:
        """Adds an observation and returns the window that ends with it.

        Args:
            observation: ``state [O]``, or a mapping with ``state [O]`` and, if the policy wants them, ``goal [D]``
                and ``image [H, W, 3]`` (uint8).

        Raises:
            ObservationError: if it is None, or something is missing, has another shape, or is not finite. The window is
                unchanged.
        """
        spec = self._spec
        if observation is None:
            raise ObservationError(
                "the observation is None; observe() must return the latest observation, even if nothing is new",
                "absent",
            )
        fields = observation if isinstance(observation, Mapping) else {"state": observation}
        # What is too large for float32 becomes infinite and is refused with the rest.
        with np.errstate(over="ignore"):
            state = self._numbers(fields, "state", spec.state)
            goal = self._numbers(fields, "goal", spec.goal) if spec.goal else None
        image = self._frame(fields, spec.image) if spec.image else None
        self._state = _shift(self._state, state, spec.window)
        if image is not None:
            self._image = _shift(self._image, image, spec.window)
        return Window(self._state, goal, self._image)

    def _numbers(self, fields: Mapping[str, Any], name: str, width: int) -> NDArray[np.float32]:
        if name not in fields:
            raise ObservationError(f"the observation has no {name!r}; this policy needs {name} [{width}]", "missing")
        try:
            given = np.asarray(fields[name])
            # NumPy would read text as numbers, and count days.
            text = given.dtype.kind == "O" and any(isinstance(entry, str | bytes) for entry in given.flat)
            if text or given.dtype.kind not in "fiubO":
                raise TypeError(f"it holds {'text' if text else given.dtype}")
            # A copy: environments may reuse their buffers.
            value = np.array(given, dtype=np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise ObservationError(f"the observation's {name} is not an array of numbers: {error}", "type") from None
        if value.shape != (width,):
            raise ObservationError(
                f"the observation's {name} has shape {value.shape}, this policy needs ({width},)", "shape"
            )
        if not np.isfinite(value).all():
            bad = np.flatnonzero(~np.isfinite(value)).tolist()
            raise ObservationError(
                f"the observation's {name} is NaN or infinite at {bad}; "
                "skip this observation or hold the robot; the policy's state is unchanged",
                "not_finite",
            )
        return value

    def _frame(self, fields: Mapping[str, Any], size: tuple[int, int]) -> NDArray[np.uint8]:
        if "image" not in fields:
            raise ObservationError(
                f"the observation has no 'image'; this policy needs image [{size[0]}, {size[1]}, 3], uint8", "missing"
            )
        try:
            image = np.array(fields["image"])
        except (TypeError, ValueError) as error:
            raise ObservationError(f"the observation's image is not an array: {error}", "type") from None
        if image.dtype != np.uint8 or image.shape != (*size, 3):
            raise ObservationError(
                f"the observation's image must be uint8 {(*size, 3)}, got {image.dtype} {image.shape}",
                "type" if image.dtype != np.uint8 else "shape",
            )
        return image


def _shift(kept: Any, newest: Any, length: int) -> Any:
    if kept is None:
        return np.repeat(newest[None], length, axis=0)
    return np.concatenate([kept[1:], newest[None]])
