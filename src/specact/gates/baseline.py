"""Gates that ignore the proposal: never, always, periodic and random."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specact.gates.gate import Gate
from specact.records import Count, Share, check_arguments
from specact.types import Proposal


class _Blind(Gate):
    """A gate without a score and without settings of a calibration."""

    calibrated = False

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Gate:
        return cls()  # type: ignore[call-arg]

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return 0.0


class Never(_Blind):
    """Never transmits: the draft alone."""

    def __init__(self) -> None:
        super().__init__(math.inf, force_first=False)


class Always(_Blind):
    """Transmits every step: hybrid inference without a gate."""

    def __init__(self) -> None:
        super().__init__(-math.inf, force_first=False)


class Periodic(_Blind):
    """Transmits the first step, and then every n-th: the pattern of HeiSD's released code.

    Args:
        period: n, at least 1.

    Raises:
        ConfigError: for another period.
    """

    def __init__(self, period: Count = 3) -> None:
        check_arguments(Periodic.__init__, {"period": period})
        super().__init__(math.inf, max_skips=period - 1)


class Random(Gate):
    """Transmits each step with the same probability: the baseline for other gates at equal rate.

    Args:
        rate: probability of transmission if it is not forced, in [0, 1].
        max_skips, force_first: see :class:`~specact.gates.gate.Gate`; forced transmissions add to the rate.
    """

    calibrated = False

    def __init__(self, rate: Share, *, max_skips: int | None = None, force_first: bool = False) -> None:
        check_arguments(Random.__init__, {"rate": rate})
        super().__init__(1.0 - rate, max_skips=max_skips, force_first=force_first)
        self.rate = rate

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, *, tie_probability: float = 0.0, **settings: Any) -> Random:
        return cls(threshold, **settings)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return 1.0 - float(rng.random())
