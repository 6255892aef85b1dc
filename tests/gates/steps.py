"""Drafted steps, policies and gates of which everything is known."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from scipy import stats

from specact.families.codes.policy import ActionTokenizer
from specact.families.codes.sampling import CodeDistribution, Drafted, Verdict, code_outcome
from specact.gates import Gate
from specact.observation import Window
from specact.rng import StepAddress
from specact.types import Decision, OffloadTimes, Proposal, StageTimes, StepRecord

G, K, CHUNK, A = 2, 3, 2, 2
ERROR_RATE = 1e-6
RNG = np.random.default_rng


class Scripted:
    """Stands in for a random generator: hands out the given numbers in order, and no more."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._left = list(numbers)

    def random(self, size: int | tuple[int, ...] | None = None) -> Any:
        if size is None:
            return self._left.pop(0)
        wanted = int(np.prod(size))
        drawn, self._left = self._left[:wanted], self._left[wanted:]
        return np.array(drawn, dtype=np.float64).reshape(size)


def scripted(numbers: Sequence[float]) -> np.random.Generator:
    return cast(np.random.Generator, Scripted(numbers))


def binomial_bounds(n: int, p: float) -> tuple[float, float]:
    """A count outside has probability at most 1e-6."""
    return float(stats.binom.ppf(ERROR_RATE / 2, n, p)), float(stats.binom.isf(ERROR_RATE / 2, n, p))


def distribution(seed: int, *, books: int = G, codes: int = K, sequential: bool = False) -> CodeDistribution:
    """At least 1/15 everywhere: no outcome of a verification is too rare to count."""
    rng = RNG([seed, books, codes])
    probs = 0.8 * rng.dirichlet(np.ones(codes), size=books) + 0.2 / codes
    offsets = rng.normal(size=(books, codes, CHUNK, A)).astype(np.float32)
    conditional = rng.dirichlet(np.ones(codes), size=codes) if sequential else None
    return CodeDistribution(probs, offsets, conditional)


def proposal(
    seed: int = 0, *, draft: CodeDistribution | None = None, codes: Iterable[int] | None = None, action: Any = None
) -> Proposal:
    """A step with a random chunk, and codes that are drawn unless given."""
    rng = RNG([seed, 99])
    draft = draft or distribution(seed)
    chunk = rng.normal(size=(CHUNK, A)).astype(np.float32)
    if action is not None:
        chunk[0] = action
    drawn = rng.integers(draft.probs.shape[1], size=len(draft.probs)) if codes is None else np.array(list(codes))
    return Proposal(Window({"state": np.zeros((1, 2), np.float32)}), chunk, Drafted(draft, drawn))


STEP = proposal()


def record(decision: Decision, *, rejected: float | None = None, took_s: float = 0.0) -> StepRecord:
    """An inference of :data:`STEP`, with the probability that its codes are rejected where it was verified."""
    outcome = None
    if rejected is not None:
        verdict = Verdict(STEP.evidence.codes[:1], np.ones(1, bool), np.array([rejected]))
        outcome = code_outcome(verdict, STEP.actions, OffloadTimes())
    times = StageTimes(took_s, 0.0, OffloadTimes(), 0.0)
    return StepRecord(StepAddress(0, 0, 0, 0), STEP, decision, outcome, STEP.actions, np.zeros(CHUNK, np.uint8), times)


class Told(Gate):
    """A gate whose scores are given."""

    def __init__(self, scores: Sequence[float] | np.ndarray, threshold: float, **limits: Any) -> None:
        super().__init__(threshold, **limits)
        self._scores = iter(itertools.cycle(scores))
        self.resets = 0

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return float(next(self._scores))

    def reset(self) -> None:
        super().reset()
        self.resets += 1


def tokenizer(books: int = G, codes: int = K) -> ActionTokenizer:
    """Decodes each combination of codes to another random chunk."""
    table = RNG(5).normal(size=(codes**books, CHUNK, A)).astype(np.float32)
    return ActionTokenizer(np.zeros(A, np.float32), np.ones(A, np.float32), table, "none", codes)


@dataclass(frozen=True)
class Fixed:
    """A policy with one answer."""

    answer: CodeDistribution

    def infer(self, window: Window) -> CodeDistribution:
        return self.answer

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        return [self.answer for _ in windows]
