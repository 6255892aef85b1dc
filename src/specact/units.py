"""Units of actions: normalised within policies and verifiers, the environment's on the robot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specact.errors import ConfigError

# Arrays, because NumPy takes twice as long with Python numbers.
_LOWEST, _HIGHEST = np.array(-1.0, np.float32), np.array(1.0, np.float32)
# No robot has larger actions; their squares and differences are finite in float32.
_LARGEST = np.array(1e15, np.float32)


class Units(Protocol):
    """How a policy's actions become the robot's, within its range."""

    def to_environment(self, actions: NDArray[np.float32], /) -> NDArray[np.float32]:
        """Actions ``[..., A]`` in the environment's units, clipped to the robot's range; a copy."""
        ...

    def normalise(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """One user-given action ``[A]`` in the policy's units.

        Raises:
            ConfigError: if it has another size, is not finite, or lies outside the range.
        """
        ...


@dataclass(frozen=True)
class ActionUnits:
    """``action = centre + scale * normalised``; demonstrated actions lie in [-1, 1].

    Attributes:
        centre, scale: float32 ``[A]``, in the environment's units; every scale is positive.
    """

    centre: NDArray[np.float32]
    scale: NDArray[np.float32]

    @classmethod
    def of_range(cls, low: NDArray[np.float32], high: NDArray[np.float32]) -> ActionUnits:
        """Units in which actions between ``low`` and ``high`` ``[A]`` lie in [-1, 1]."""
        return cls((low + high) / np.float32(2), np.maximum((high - low) / np.float32(2), np.float32(1e-6)))

    def to_environment(self, normalised: NDArray[np.float32]) -> NDArray[np.float32]:
        """Actions ``[..., A]`` in the environment's units, clipped to the demonstrated range."""
        return np.minimum(np.maximum(normalised, _LOWEST), _HIGHEST) * self.scale + self.centre

    def from_environment(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalised actions ``[..., A]``, without clipping."""
        normalised: NDArray[np.float32] = (actions - self.centre) / self.scale
        return normalised

    def normalise(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """:meth:`from_environment` for one user-given action ``[A]``, with checks.

        Raises:
            ConfigError: if it has another size, is not finite, or lies outside the demonstrated range.
        """
        slack = 1e-5 * self.scale
        _check_action(action, self.centre - self.scale, self.centre + self.scale, slack)
        return np.asarray((action - self.centre) / self.scale, dtype=np.float32)


class ActionRange:
    """A robot's range of actions, in the environment's units, for a policy whose actions have these units as well.

    Args:
        low, high: float32 ``[A]``; infinite where a range is unknown.

    Raises:
        ConfigError: if they are no two vectors of one size, or ``low`` is not below ``high``.
    """

    def __init__(self, low: ArrayLike, high: ArrayLike) -> None:
        self.low, self.high = np.asarray(low, np.float32), np.asarray(high, np.float32)
        if self.low.ndim != 1 or self.low.shape != self.high.shape or not (self.low < self.high).all():
            raise ConfigError(
                f"a range of actions is two vectors, the lower one below the other, got {self.low} and {self.high}"
            )
        with np.errstate(over="ignore"):
            width = self.high - self.low
            self._least = np.maximum(self.low - width, -_LARGEST)
            self._most = np.minimum(self.high + width, _LARGEST)

    @classmethod
    def unknown(cls, actions: int) -> ActionRange:
        """The range that allows every action ``[A]``."""
        return cls(np.full(actions, -np.inf), np.full(actions, np.inf))

    def narrowed(self, other: ActionRange) -> ActionRange:
        """What both ranges allow.

        Raises:
            ConfigError: if they have another size or nothing in common.
        """
        if self.low.shape != other.low.shape:
            raise ConfigError(f"the policy has actions of {len(self.low)} numbers, the robot of {len(other.low)}")
        return ActionRange(np.maximum(self.low, other.low), np.minimum(self.high, other.high))

    def is_near(self, actions: NDArray[np.float32]) -> bool:
        """Whether actions ``[..., A]`` exceed the range by no more than its own width; others are no answer."""
        return bool(((actions >= self._least) & (actions <= self._most)).all())

    def to_environment(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.minimum(np.maximum(actions, self.low), self.high)

    def normalise(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        _check_action(action, self.low, self.high)
        return np.array(action, np.float32)


def _check_action(
    action: NDArray[np.float32],
    low: NDArray[np.float32],
    high: NDArray[np.float32],
    slack: NDArray[np.float32] | float = 0.0,
) -> None:
    inside = np.shape(action) == low.shape and np.isfinite(action).all()
    if not inside or not ((action >= low - slack) & (action <= high + slack)).all():
        raise ConfigError(
            f"an action of this robot must have shape [{len(low)}] and lie between {low.tolist()} and "
            f"{high.tolist()}, got {action}"
        )
