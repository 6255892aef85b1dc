"""Policies and gates that take time on a clock of ours, whatever they took in truth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specact.clock import Clock
from specact.families.codes.spec import CodePolicy
from specact.families.codes.values import CodeDistribution
from specact.gates.gate import Gate
from specact.observation import Window
from specact.rng import StepAddress
from specact.types import Proposal, StepRecord


class Timed:
    """A :class:`~specact.families.codes.spec.CodePolicy` that takes an accounted time per window.

    Args:
        policy: gives the answers.
        clock: on which the time goes by.
        latency_s: how much of it, >= 0.
    """

    def __init__(self, policy: CodePolicy, clock: Clock, latency_s: float) -> None:
        self._policy, self._clock, self._latency_s = policy, clock, latency_s

    def infer(self, window: Window) -> CodeDistribution:
        self._clock.sleep(self._latency_s)
        return self._policy.infer(window)

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        return [self.infer(window) for window in windows]

    def answer(self, window: Window, address: StepAddress) -> CodeDistribution:
        return self.infer(window)


class TimedGate(Gate):
    """Another gate, whose decisions take an accounted time.

    Args:
        gate: gives the scores; its threshold and limits hold.
        clock: on which the time goes by.
        latency_s: how much of it per decision, >= 0.
    """

    def __init__(self, gate: Gate, clock: Clock, latency_s: float) -> None:
        super().__init__(
            gate.threshold,
            tie_probability=gate.tie_probability,
            max_skips=gate.max_skips,
            force_first=gate.force_first,
            audit_rate=gate.audit_rate,
        )
        self._gate, self._clock, self._latency_s = gate, clock, latency_s

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        """The other gate's."""
        self._clock.sleep(self._latency_s)
        return self._gate.score(proposal, rng)

    def reset(self) -> None:
        super().reset()
        self._gate.reset()

    def update(self, drafted: NDArray[np.float32], executed: NDArray[np.float32]) -> None:
        self._gate.update(drafted, executed)

    def learn(self, record: StepRecord) -> None:
        self._gate.learn(record)


class Prepared:
    """A policy whose answer is already there, because it was asked for beforehand, in a batch with others."""

    answer: CodeDistribution | None = None

    def infer(self, window: Window) -> CodeDistribution:
        assert self.answer is not None
        return self.answer

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        return [self.infer(window) for window in windows]
