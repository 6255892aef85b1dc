"""Demonstrations: flat arrays and the end indices of episodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import DataError
from specact.lab.data.frames import Frames, as_frames, join_frames
from specact.rng import Role, stream

Observed = NDArray[Any] | Frames


@dataclass(frozen=True)
class Episodes:
    """Demonstrations, as concatenated episodes.

    ``observation`` is by name: numbers float32 ``[N, ...]``, or camera frames uint8 ``[N, H, W, 3]``, anything with a
    shape that can be indexed with integer arrays; ``action`` is for each observation ``[N, A]``; ``ends`` ``[E]`` are
    exclusive. ``rate_hz`` and the episodes' ``instructions`` are None if unknown, ``disturbed`` ``[N]``, the steps at
    which another action than the recorded one was executed, if there are none.

    Raises:
        DataError: if there is no step or no observation, or lengths or types contradict each other.
    """

    observation: Mapping[str, Observed]
    action: NDArray[np.float32]
    ends: NDArray[np.int64]
    rate_hz: float | None = None
    instructions: tuple[str, ...] | None = None
    disturbed: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        observation = {
            name: as_frames(array) if array.dtype == np.uint8 else array for name, array in self.observation.items()
        }
        object.__setattr__(self, "observation", observation)
        steps = len(self.action)
        if self.action.ndim != 2:
            raise DataError(f"action has shape {self.action.shape}, expected [{steps}, width]: one row per step")
        if not observation:
            raise DataError("these demonstrations hold no observation")
        for name, array in observation.items():
            if len(array) != steps:
                raise DataError(f"{name} has {len(array)} rows, but there are {steps} steps, one for each action")
            if isinstance(array, np.ndarray) and (array.dtype != np.float32 or array.ndim < 2):
                raise DataError(
                    f"{name} has type {array.dtype} and shape {array.shape}; float32 [steps, ...] or camera frames "
                    "uint8 [steps, height, width, 3] are needed"
                )
        ends = self.ends
        if steps == 0 or len(ends) == 0:
            raise DataError("these demonstrations contain no steps")
        if ends[0] <= 0 or np.any(np.diff(ends) <= 0) or ends[-1] != steps:
            raise DataError(
                f"episode ends must increase strictly and stop at the number of steps {steps}; "
                f"they start at {ends[0]}, stop at {ends[-1]}, and {int(np.sum(np.diff(ends) <= 0))} do not increase"
            )
        if self.instructions is not None and len(self.instructions) != len(ends):
            raise DataError(f"there are {len(self.instructions)} instructions for {len(ends)} episodes")
        if self.disturbed is not None and self.disturbed.shape != (steps,):
            raise DataError(f"disturbed has shape {self.disturbed.shape}, expected [{steps}]")

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.ends)

    @property
    def steps(self) -> int:
        """Number of steps over all episodes."""
        return len(self.action)

    @property
    def starts(self) -> NDArray[np.int64]:
        """First index of each episode, int64 ``[E]``."""
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the observations that are camera frames."""
        return tuple(name for name, array in self.observation.items() if isinstance(array, Frames))

    def numbers(self, name: str) -> NDArray[np.float32]:
        """The numeric observation of this name.

        Raises:
            DataError: if there is none.
        """
        values = self.observation.get(name)
        if not isinstance(values, np.ndarray):
            raise DataError(f"there are no numbers {name!r} among the observations {', '.join(self.observation)}")
        return values

    def frames(self, name: str) -> Frames:
        """The camera frames of this name.

        Raises:
            DataError: if there are none.
        """
        images = self.observation.get(name)
        if not isinstance(images, Frames):
            raise DataError(f"there are no camera frames {name!r} among the observations {', '.join(self.observation)}")
        return images

    def followed(self, chunk: int) -> NDArray[np.bool_]:
        """Mask of each step's chunk: the actions in states that the chunk's own actions lead to, bool ``[N, chunk]``.

        After a disturbed step the recorded states are not those that the chunk leads to, so a chunk is valid only up to
        its first disturbed step. Actions beyond the episode are masked too.
        """
        ahead = np.arange(self.steps)[:, None] + np.arange(chunk)
        within = ahead < np.repeat(self.ends, np.diff(self.ends, prepend=0))[:, None]
        if self.disturbed is None:
            return within
        before = np.concatenate([[0], np.cumsum(self.disturbed)])
        undisturbed: NDArray[np.bool_] = before[np.minimum(ahead, self.steps)] == before[:-1, None]
        return within & undisturbed

    def with_numbers(self, action: NDArray[np.float32], **numbers: NDArray[np.float32]) -> Episodes:
        """Replaces the action and all numeric observations; keeps camera frames."""
        return replace(
            self, action=action, observation={**numbers, **{name: self.observation[name] for name in self.cameras}}
        )

    def only(self, *names: str) -> Episodes:
        """With only these observations."""
        return replace(self, observation={name: self.observation[name] for name in names})

    def slices(self) -> Iterator[slice]:
        """The steps of each episode, in order."""
        return (slice(int(start), int(end)) for start, end in zip(self.starts, self.ends, strict=True))

    def select(self, episodes: NDArray[np.int64]) -> Episodes:
        """Only these episodes, in this order; no frame is read."""
        spans = [np.arange(self.starts[e], self.ends[e]) for e in episodes]
        rows = np.concatenate(spans)
        seen = self.observation.items()
        return replace(
            self,
            observation={
                name: array.select(rows) if isinstance(array, Frames) else array[rows] for name, array in seen
            },
            action=self.action[rows],
            ends=np.cumsum([len(span) for span in spans]).astype(np.int64),
            instructions=None if self.instructions is None else tuple(self.instructions[e] for e in episodes),
            disturbed=None if self.disturbed is None else self.disturbed[rows],
        )

    def split(self, held_out: float, seed: int) -> tuple[Episodes, Episodes]:
        """Splits into training and held-out episodes, with a share ``held_out`` of the latter; determined by the seed.

        Both parts have at least one episode.

        Raises:
            DataError: if there are fewer than two episodes.
        """
        if len(self) < 2:
            raise DataError(
                "there is only one episode; at least two are needed, because one is reserved for validation"
            )
        order = stream(seed, Role.DATA).permutation(len(self))
        count = min(max(1, round(held_out * len(self))), len(self) - 1)
        return self.select(np.sort(order[count:])), self.select(np.sort(order[:count]))


def joined(name: str, parts: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Rows of several places, which must have one shape, one after the other."""
    first, model = next(iter(parts.items()))
    for place, part in parts.items():
        if part.shape[1:] != model.shape[1:]:
            wide, wanted = (" x ".join(map(str, array.shape[1:])) for array in (part, model))
            raise DataError(f"{name} of {place} are {wide} wide, those of {first} {wanted}; all must be equal")
    return np.concatenate(list(parts.values()))


def concatenate(parts: list[Episodes]) -> Episodes:
    """Concatenates episodes of several sources; with instructions if all have them.

    Raises:
        DataError: if they do not have the same observations and actions.
    """
    first = parts[0]
    offsets = np.cumsum([0] + [part.steps for part in parts[:-1]])

    def join(name: str) -> Observed:
        values = [part.observation[name] for part in parts]
        frames = [value for value in values if isinstance(value, Frames)]
        if len(frames) == len(values):
            return join_frames(frames)
        if frames:
            raise DataError(f"{name} is made of camera frames in some of these demonstrations; they cannot be joined")
        return joined(name, {f"source {number}": np.asarray(value) for number, value in enumerate(values)})

    for part in parts:
        for name in {*first.observation} ^ {*part.observation}:
            raise DataError(f"some of these demonstrations have a {name} and some do not; they cannot be joined")
    instructions = [part.instructions for part in parts if part.instructions is not None]
    disturbed = [np.zeros(part.steps, np.bool_) if part.disturbed is None else part.disturbed for part in parts]
    return replace(
        first,
        observation={name: join(name) for name in first.observation},
        action=joined("actions", {f"source {number}": part.action for number, part in enumerate(parts)}),
        ends=np.concatenate([part.ends + offset for part, offset in zip(parts, offsets, strict=True)]),
        instructions=tuple(itertools.chain(*instructions)) if len(instructions) == len(parts) else None,
        disturbed=None if all(part.disturbed is None for part in parts) else np.concatenate(disturbed),
    )
