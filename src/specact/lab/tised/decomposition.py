"""The speedup of a task as a product: fewer chunks times faster chunks (TISED, equation 5)."""

from __future__ import annotations

from dataclasses import dataclass

from specact.lab.tised.checks import positive

# Factors closer to 1 than this are described as unchanged.
_SAME = 0.005


@dataclass(frozen=True)
class Averages:
    """Chunks and time that a policy needs for a task, means over its successful trials (31, given).

    Attributes:
        chunks: N > 0, chunks to completion.
        task_s: T_task > 0 [s].

    Raises:
        ConfigError: for values outside their ranges.
    """

    chunks: float
    task_s: float

    def __post_init__(self) -> None:
        positive("the number of chunks N", self.chunks)
        positive("the time of a task [s]", self.task_s)

    @property
    def chunk_s(self) -> float:
        """``T_chunk = T_task / N`` [s], the ratio of the two means, so that (4) holds for them too."""
        return self.task_s / self.chunks


@dataclass(frozen=True)
class Decomposition:
    """A lever compared with its baseline.

    Attributes:
        chunk_speedup: ``T_chunk,0 / T_chunk``; above 1 each chunk is faster.
        chunks_ratio: ``N_0 / N``; below 1 the task needs more chunks.
    """

    chunk_speedup: float
    chunks_ratio: float

    @property
    def task_speedup(self) -> float:
        """``(N_0 / N) * chunk speedup`` (5, given)."""
        return self.chunks_ratio * self.chunk_speedup

    @property
    def is_paradox(self) -> bool:
        """Whether chunks are faster and the task is slower: N grew by a larger factor than the chunk speedup."""
        return self.chunk_speedup > 1.0 and self.task_speedup < 1.0

    def explain(self) -> str:
        """The decomposition as a sentence, with the growth of N at which the lever breaks even."""
        break_even = f"it breaks even at {self.chunk_speedup:.3f} times as many"
        return (
            f"a chunk is {_times(self.chunk_speedup, 'as fast')} and the task needs "
            f"{_times(1.0 / self.chunks_ratio, 'as many chunks')} ({break_even}): the task is "
            f"{_times(self.task_speedup, 'as fast')}"
        )


def decompose(baseline: Averages, lever: Averages) -> Decomposition:
    """Decomposes the task speedup of a lever over its baseline (5, given); exact by construction."""
    return Decomposition(baseline.chunk_s / lever.chunk_s, baseline.chunks / lever.chunks)


def _times(factor: float, what: str) -> str:
    return what if abs(factor - 1.0) < _SAME else f"{factor:.3f} times {what}"
