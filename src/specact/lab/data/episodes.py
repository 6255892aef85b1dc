"""Demonstrations in memory: a few flat arrays and the places where episodes end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.rng import Role, stream


@dataclass(frozen=True)
class Episodes:
    """Demonstrations, episode after episode.

    Attributes:
        state: observations, float32 ``[N, O]``.
        action: the action taken on each observation, float32 ``[N, A]``.
        ends: exclusive end index of each episode, int64 ``[E]``, strictly increasing, last one equal to N.
        goal: what the step aims at, float32 ``[N, D]``; None where there is no goal.
        image: camera frames, uint8 ``[N, H, W, 3]``; None where there are none. May be any array-like that slices
            lazily (a zarr array).
        rate_hz: control rate of the recording; None where the file does not tell.

    Raises:
        DataError: if lengths contradict each other or there is no step.
    """

    state: NDArray[np.float32]
    action: NDArray[np.float32]
    ends: NDArray[np.int64]
    goal: NDArray[np.float32] | None = None
    image: NDArray[np.uint8] | None = None
    rate_hz: float | None = None

    def __post_init__(self) -> None:
        steps = len(self.state)
        for name in ("state", "action"):
            shape = getattr(self, name).shape
            if len(shape) != 2 or shape[0] != steps:
                raise DataError(f"{name} has shape {shape}, expected [{steps}, width]: one row per step")
        for name in ("goal", "image"):
            value = getattr(self, name)
            if value is not None and len(value) != steps:
                raise DataError(f"{name} has {len(value)} rows, but there are {steps} steps")
        ends = self.ends
        if steps == 0 or len(ends) == 0:
            raise DataError("these demonstrations contain no steps")
        if ends[0] <= 0 or np.any(np.diff(ends) <= 0) or ends[-1] != steps:
            raise DataError(
                f"episode ends must increase strictly and stop at the number of steps {steps}; "
                f"they start at {ends[0]}, stop at {ends[-1]}, and {int(np.sum(np.diff(ends) <= 0))} do not increase"
            )

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.ends)

    @property
    def steps(self) -> int:
        """Number of steps over all episodes."""
        return len(self.state)

    @property
    def starts(self) -> NDArray[np.int64]:
        """First index of each episode, int64 ``[E]``."""
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64)

    def slices(self) -> Iterator[slice]:
        """The steps of each episode, in order."""
        return (slice(int(start), int(end)) for start, end in zip(self.starts, self.ends, strict=True))

    def select(self, episodes: NDArray[np.int64]) -> Episodes:
        """Only these episodes, in this order."""
        spans = [np.arange(self.starts[e], self.ends[e]) for e in episodes]
        rows = np.concatenate(spans)
        return replace(
            self,
            state=self.state[rows],
            action=self.action[rows],
            goal=None if self.goal is None else self.goal[rows],
            image=None if self.image is None else self.image[rows],
            ends=np.cumsum([len(span) for span in spans]).astype(np.int64),
        )

    def split(self, held_out: float, seed: int) -> tuple[Episodes, Episodes]:
        """For training, and a share ``held_out`` of the episodes kept back; the same seed gives the same split.

        Both parts have at least one episode, whatever the share.

        Raises:
            DataError: if there are fewer than two episodes.
        """
        if len(self) < 2:
            raise DataError(
                "there is only one episode; at least two are needed, because one is reserved for validation"
            )
        order = stream(seed, Role.DATA).permutation(len(self))
        kept_back = min(max(1, round(held_out * len(self))), len(self) - 1)
        return self.select(np.sort(order[kept_back:])), self.select(np.sort(order[:kept_back]))


def concatenate(parts: list[Episodes]) -> Episodes:
    """Episodes of several sources, one after the other.

    Raises:
        DataError: if they do not have the same fields with the same widths.
    """
    first = parts[0]
    offsets = np.cumsum([0] + [part.steps for part in parts[:-1]])

    def join(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if all(value is None for value in values):
            return None
        if any(value is None for value in values):
            raise DataError(f"some of these demonstrations have a {name} and some do not; they cannot be joined")
        shapes = sorted({value.shape[1:] for value in values})
        if len(shapes) > 1:
            raise DataError(
                f"these demonstrations have a {name} of {shapes[0]} and of {shapes[1]}; they cannot be joined"
            )
        return np.concatenate(values)

    return replace(
        first,
        state=join("state"),
        action=join("action"),
        goal=join("goal"),
        image=join("image"),
        ends=np.concatenate([part.ends + offset for part, offset in zip(parts, offsets, strict=True)]),
    )
