"""What a robot does in a step whose target could not be had in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, unknown_name

OnMiss = Literal["execute_draft", "hold_last", "stop"]


@dataclass(frozen=True)
class Fallback:
    """The rule for missed steps.

    Attributes:
        on_miss: ``execute_draft``: the drafted chunk; ``hold_last``: the last executed action again; ``stop``: the
            stop action, and nothing else until the next episode.
        max_consecutive_misses: after more misses in a row than this the robot stops, whatever ``on_miss`` says; None
            for no limit.
        stop_action: what makes this robot stand still, ``[A]``, in the environment's units. Only its owner knows:
            zeros for velocities and torques, the present pose for positions. Needed wherever the rule can stop.

    Raises:
        ConfigError: for an unknown rule, or if the stop action is missing where it can be needed.
    """

    on_miss: OnMiss = "execute_draft"
    max_consecutive_misses: int | None = None
    stop_action: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if self.on_miss not in get_args(OnMiss):
            raise unknown_name("rule for missed steps", self.on_miss, get_args(OnMiss))
        if self.max_consecutive_misses is not None and self.max_consecutive_misses < 0:
            raise ConfigError(f"max_consecutive_misses must not be negative, got {self.max_consecutive_misses}")
        if self.stop_action is None and (self.on_miss != "execute_draft" or self.max_consecutive_misses is not None):
            raise ConfigError(
                f"on_miss {self.on_miss!r} with max_consecutive_misses {self.max_consecutive_misses} can stop the "
                "robot, so it needs a stop_action [A]: the action that makes this robot stand still"
            )

    def stops(self, misses: int) -> bool:
        """Whether the robot stops at the given number of misses in a row."""
        return self.on_miss == "stop" or (
            self.max_consecutive_misses is not None and misses > self.max_consecutive_misses
        )


EXECUTE_DRAFT = Fallback()
