"""KERV's adaptive tolerance, and the spacing of its compensation (Zheng et al. 2026, arXiv 2603.01581)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.families.tokens.bins import to_actions
from specact.records import NotNegative, check_fields

Rule = Literal["printed", "repaired"]


def variability(verified: NDArray[np.int64], drafted: NDArray[np.int64]) -> float:
    """Kinematic variability of a step: the sum of ``|Map(verified) - Map(drafted)|`` over its accepted tokens.

    Args:
        verified, drafted: the target's tokens and the accepted ones, ``[n]``; no others, because the target's token
            after a rejected one belongs to another prefix.

    Returns:
        In normalised actions; 0 for no tokens.
    """
    return float(np.abs(to_actions(verified).astype(np.float64) - to_actions(drafted)).sum())


def typical_change(episodes: Sequence[Sequence[float]]) -> float:
    """The scale of a rule: the median of the ``|dK|`` that are not 0, over the steps of some episodes.

    Args:
        episodes: the variability of every step.

    Raises:
        ConfigError: if the variability never changes.
    """
    found = np.concatenate([np.zeros(0), *(np.abs(np.diff(np.asarray(one, np.float64))) for one in episodes)])
    if not (found > 0.0).any():
        raise ConfigError("the variability of these steps does not change; calibrate with a tolerance above 0")
    return float(np.median(found[found > 0.0]))


@dataclass(frozen=True)
class Threshold:
    """The rule for r, the largest bias of an accepted token in bins, as a function of the variability K.

    With ``g(x) = (high - low) exp(-(|x| / scale) ** power)``:

    * ``printed``: ``r + g(dK)``, clipped to the bounds. As g is positive, r only grows, and soon stays at ``high``.
    * ``repaired``: ``low + g(dK)``: strict when the variability changes, tolerant when it is steady.

    The first step of an episode has r = ``low``; the first variability has no dK and leaves r unchanged. Deviation: the
    paper has no ``|x|``, without which an odd power makes the exponential exceed 1. A fixed r is ``low == high``.

    Args:
        low, high: bounds of r in bins, at least 0.
        rule: which of the two.
        scale: K_S of the paper, in normalised actions; see :func:`typical_change`.
        power: phi of the paper.

    Raises:
        ConfigError: for values that are not allowed.
    """

    low: NotNegative = 5.0
    high: NotNegative = 15.0
    rule: Rule = "repaired"
    scale: Annotated[float, Meta(ge=1e-6)] = 1.0
    power: Annotated[float, Meta(gt=0, le=10)] = 2.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.low > self.high:
            raise ConfigError(f"low must be at most high, got {self.low} and {self.high}")


class AdaptiveThreshold:
    """The threshold of one robot.

    Args:
        settings: its rule.

    Attributes:
        settings: as given.
        r: the threshold of the next step, in bins, within the bounds.
    """

    def __init__(self, settings: Threshold) -> None:
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        """Starts an episode."""
        self.r = self.settings.low
        self._last: float | None = None

    @property
    def bins(self) -> int:
        """The largest integer bias that r accepts."""
        return int(self.r)

    def update(self, variability: float) -> None:
        """Updates r with the variability of a step, see :func:`variability`."""
        settings, last = self.settings, self._last
        self._last = variability
        if last is None:
            return
        share = math.exp(-((abs(variability - last) / settings.scale) ** settings.power))
        base = self.r if settings.rule == "printed" else settings.low
        self.r = min(settings.high, base + (settings.high - settings.low) * share)


class Spacing:
    """Minimum distance of compensated steps: none in the n steps after one, so that errors do not accumulate.

    Args:
        plain: n, at least 0.

    Attributes:
        plain: as given.

    Raises:
        ConfigError: if n is negative.
    """

    def __init__(self, plain: int = 4) -> None:
        if plain < 0:
            raise ConfigError(f"steps between two compensations must be at least 0, got {plain}")
        self.plain = plain
        self.reset()

    def reset(self) -> None:
        """Starts an episode: armed."""
        self._left = 0

    @property
    def armed(self) -> bool:
        """Whether the next step may be compensated."""
        return self._left == 0

    def update(self, compensated: bool) -> None:
        """Records whether a step was compensated."""
        self._left = self.plain if compensated else max(0, self._left - 1)
