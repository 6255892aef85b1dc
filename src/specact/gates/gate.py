"""Gates: a score, a threshold, ties broken at random and limits on skipping; and those that ignore the proposal."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from specact.errors import ConfigError
from specact.pair import Follower
from specact.records import BelowOne, Count, Share, WholeNumber, validated
from specact.types import Decision, Proposal


class Gate(Follower, ABC):
    """Decides, before anything is sent, whether a step is transmitted: if its score is above the threshold.

    A subclass computes the score, see :func:`specact.contracts.check_gate`. Each robot has a gate of its own. At the
    threshold a step is transmitted with ``tie_probability``: many scores are often exactly 0. At most ``max_skips``
    inferences in a row are skipped. ``force_first`` transmits an episode's first, whose past is unknown to the score. A
    step that would be skipped is an audit with ``audit_rate``, see :mod:`specact.gates.audit`; it may change any time.

    Raises:
        ConfigError: for a value outside its range.
    """

    calibrated: ClassVar[bool] = True
    """Whether its threshold comes from a calibration for a transmission rate."""

    family: ClassVar[str | None] = None
    """The family of the pairs it is for, as on the wire; None for every pair, or if :meth:`for_pair` decides."""

    @validated
    def __init__(
        self,
        threshold: float,
        *,
        tie_probability: Share = 0.0,
        max_skips: WholeNumber | None = None,
        force_first: bool = True,
        audit_rate: BelowOne = 0.0,
    ) -> None:
        if math.isnan(threshold):
            raise ConfigError("a gate's threshold must be a number, got NaN; calibrate the gate")
        self.threshold, self.tie_probability = threshold, tie_probability
        self.max_skips, self.force_first, self.audit_rate = max_skips, force_first, audit_rate
        self._skips, self._first = 0, True

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Gate:
        """A gate for one robot, from stored settings; override it if the gate needs a part of the pair.

        The threshold of a gate that is not calibrated is its transmission rate; settings are the constructor's.
        """
        return cls(threshold, **settings)

    @abstractmethod
    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        """How much this step needs the target; larger means more."""

    def reset(self) -> None:
        self._skips, self._first = 0, True

    @property
    def audit_rate(self) -> float:
        """See the class."""
        return self._audit_rate

    @audit_rate.setter
    @validated
    def audit_rate(self, audit_rate: BelowOne) -> None:
        self._audit_rate = audit_rate

    @property
    def forced(self) -> str | None:
        """Why the next inference is transmitted regardless of its score: ``first`` or ``max_skips``; else None."""
        if self.force_first and self._first:
            return "first"
        return "max_skips" if self.max_skips is not None and self._skips >= self.max_skips else None

    def decide(self, proposal: Proposal, rng: np.random.Generator) -> Decision:
        """Transmit or skip. Draws one uniform for ties, even if there is none.

        With an audit rate another uniform is drawn after the score, even if the step is not skipped.
        """
        tie = rng.random()
        score = self.score(proposal, rng)
        audited = self._audit_rate > 0.0 and float(rng.random()) < self._audit_rate
        forced = self.forced
        if forced is not None:
            transmit, reason = True, forced
        elif score == self.threshold:
            transmit, reason = tie < self.tie_probability, "tie"
        else:
            # Negated so that a NaN score is transmitted.
            transmit, reason = not score < self.threshold, "score"
        if audited and not transmit:
            transmit, reason = True, "audit"
        self._first = False
        self._skips = 0 if transmit else self._skips + 1
        return Decision(transmit, score, self.threshold, reason)


class Blind(Gate):
    """A gate without a score, and so without what a calibration or a limit on skips could set."""

    calibrated = False

    @classmethod
    def for_pair(
        cls, pair: Any, threshold: float, *, tie_probability: float = 0.0, max_skips: int | None = None, **settings: Any
    ) -> Gate:
        return cls(**settings)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return 0.0


class Never(Blind):
    """Never asks: the draft alone."""

    def __init__(self) -> None:
        super().__init__(math.inf, force_first=False)


class Always(Blind):
    """Asks at every inference: hybrid, without a gate."""

    def __init__(self) -> None:
        super().__init__(-math.inf, force_first=False)


class Periodic(Blind):
    """Asks at the first inference, then at every ``period``-th (>= 1): the pattern of HeiSD's released code."""

    @validated
    def __init__(self, period: Count = 3) -> None:
        super().__init__(math.inf, max_skips=period - 1)


class Random(Gate):
    """Asks with the same probability at each inference, the rate: the baseline for other gates at equal rate.

    Transmissions that ``max_skips`` and ``force_first`` enforce add to the rate.
    """

    calibrated = False

    @validated
    def __init__(self, rate: Share, *, max_skips: int | None = None, force_first: bool = False) -> None:
        super().__init__(1.0 - rate, max_skips=max_skips, force_first=force_first)
        self.rate = rate

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, *, tie_probability: float = 0.0, **settings: Any) -> Random:
        return cls(threshold, **settings)

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return 1.0 - float(rng.random())
