"""What a robot does when a target request fails, or its own side does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError, unknown_name
from specact.records import Positive, WholeNumber, check_fields

OnMiss = Literal["execute_draft", "hold_last", "stop"]


@dataclass(frozen=True)
class Fallback:
    """The rule for misses; :class:`~specact.safety.Safety` applies it.

    A control step without a usable observation is a miss, too, and so is a late verdict of which nothing can be
    executed any more.

    Attributes:
        on_miss: what missed steps execute; stop: until a reset.
        max_consecutive_misses: after more misses in a row the robot stops.
        stop_action: makes the robot stand still; needed to stop or hold it.
        max_chunk_age_ms: greatest age of an executed action's observation [ms].
        max_stall_ms: the robot is stopped if observe or act takes longer.

    Raises:
        ConfigError: for a value that is not allowed, or if a required stop action is missing.
    """

    on_miss: OnMiss = "execute_draft"
    max_consecutive_misses: WholeNumber | None = None
    stop_action: tuple[float, ...] | None = None
    max_chunk_age_ms: Positive | None = None
    max_stall_ms: Positive = 2000.0

    def __post_init__(self) -> None:
        if self.on_miss not in get_args(OnMiss):
            raise unknown_name("rule for missed steps", self.on_miss, get_args(OnMiss))
        if self.stop_action is not None:
            # Arrays are accepted as well.
            object.__setattr__(self, "stop_action", tuple(np.asarray(self.stop_action, np.float64).ravel().tolist()))
        check_fields(self)
        if self.stop_action is None and (self.on_miss != "execute_draft" or self.max_consecutive_misses is not None):
            raise ConfigError(
                f"on_miss {self.on_miss!r} with max_consecutive_misses {self.max_consecutive_misses} can stop the "
                "robot, so it needs a stop_action [A]: the action that makes this robot stand still"
            )

    @property
    def still(self) -> NDArray[np.float32] | None:
        """The stop action as an array ``[A]``, new at each time, or None."""
        return None if self.stop_action is None else np.array(self.stop_action, np.float32)

    def stops(self, misses: int) -> bool:
        """Whether the robot stops after the given number of consecutive misses."""
        most = self.max_consecutive_misses
        return self.on_miss == "stop" or (most is not None and misses > most)


EXECUTE_DRAFT = Fallback()
