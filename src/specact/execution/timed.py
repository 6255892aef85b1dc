"""Policies whose inference takes time on a clock of ours, whatever it took in truth."""

from __future__ import annotations

from collections.abc import Sequence

from specact.clock import Clock
from specact.policies.policy import CodePolicy
from specact.types import CodeDistribution, Window


class Timed:
    """A :class:`~specact.policies.policy.CodePolicy` that takes an accounted time per window.

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


class Prepared:
    """A policy whose answer is already there, because it was asked for beforehand, in a batch with others."""

    answer: CodeDistribution | None = None

    def infer(self, window: Window) -> CodeDistribution:
        assert self.answer is not None
        return self.answer

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        return [self.infer(window) for window in windows]
