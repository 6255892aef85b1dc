"""The base class of gates: a score, a threshold, ties broken at random, and limits on skipping."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from specact.errors import ConfigError
from specact.pair import Follower
from specact.records import BelowOne, Share, WholeNumber, check_arguments
from specact.types import Decision, Proposal


class Gate(Follower, ABC):
    """Decides, before anything is sent, whether a step is transmitted to the target.

    A subclass computes the score; this class makes the decision. Each robot needs its own gate: call :meth:`reset` when
    an episode starts, :meth:`decide` before and :meth:`on_inference` after every inference, :meth:`on_verified` when a
    verification arrives, and :meth:`on_action` once per executed action. :func:`specact.contracts.check_gate` checks a
    subclass.

    Args:
        threshold: a step is transmitted if its score is above this.
        tie_probability: probability of transmission, in [0, 1], if the score equals the threshold. Scores such as the
            rejection probability are exactly 0 in many steps, so the rate would otherwise be discontinuous there.
        max_skips: longest run of skipped inferences; the next one is transmitted. None for no limit.
        force_first: whether an episode's first inference is always transmitted; scores that use past actions are
            undefined there.
        audit_rate: probability, in [0, 1), that a step which would be skipped is transmitted as an audit, see
            :mod:`specact.gates.audit`; it may be changed at any time.

    Raises:
        ConfigError: for a value outside its range.
    """

    calibrated: ClassVar[bool] = True
    """Whether its threshold comes from a calibration for a transmission rate."""

    family: ClassVar[str | None] = None
    """The family of the pairs it is for, as on the wire; None for every pair, or if :meth:`for_pair` decides."""

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
        check_arguments(Gate.__init__, {"tie_probability": tie_probability, "max_skips": max_skips})
        self._skips, self._first = 0, True

    @classmethod
    def for_pair(cls, pair: Any, threshold: float, **settings: Any) -> Gate:
        """A gate for one robot, from stored settings. Override it if the gate needs a part of the pair.

        Args:
            pair: the bundle of the policies.
            threshold: see the class; for a gate that is not calibrated, the transmission rate.
            settings: keywords of the constructor, ``tie_probability`` and ``max_skips`` among them.
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
    def audit_rate(self, rate: float) -> None:
        check_arguments(Gate.__init__, {"audit_rate": rate})
        self._audit_rate = rate

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

    def settings(self) -> dict[str, Any]:
        """The gate's parameters as plain values, for a manifest."""
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {"gate": type(self).__name__, **public, "audit_rate": self.audit_rate}
