"""What a robot executes when a target request misses its deadline or fails."""

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
        max_consecutive_misses: after more consecutive misses than this the robot stops, whatever ``on_miss`` is; None
            for no limit. A control step without a usable observation, or for which the policy has no action, is one,
            and so is a late verdict of which nothing can be executed any more.
        stop_action: the action that makes this robot stand still, ``[A]``, in the environment's units: for example
            zeros for velocities and torques, the current pose for positions. Required if the rule can stop or hold.

    Raises:
        ConfigError: for an unknown rule, or if a required stop action is missing.
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
        """Whether the robot stops after the given number of consecutive misses."""
        return self.on_miss == "stop" or (
            self.max_consecutive_misses is not None and misses > self.max_consecutive_misses
        )


EXECUTE_DRAFT = Fallback()
