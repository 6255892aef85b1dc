"""A policy whose answer is known."""

from collections.abc import Sequence
from dataclasses import dataclass

from specact.families.codes.sampling import CodeDistribution
from specact.observation import Window


@dataclass(frozen=True)
class Fixed:
    """A policy with one answer."""

    answer: CodeDistribution

    def infer(self, window: Window) -> CodeDistribution:
        return self.answer

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        return [self.answer for _ in windows]
