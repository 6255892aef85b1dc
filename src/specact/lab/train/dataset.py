"""Demonstrations ready for training: read, reduced to what is seen, split, normalised, and cut into windows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specact.bundle.manifest import INSTRUCTION, Words
from specact.errors import ConfigError, DataError, unknown_name
from specact.families.chunks.sources import LoadedPolicy
from specact.lab.data.episodes import Episodes, Observed
from specact.lab.data.frames import Frames, copied
from specact.lab.train.attention import Statistics
from specact.lab.train.loop import Draw, Progress
from specact.lab.train.recipe import Recipe, Seeing
from specact.observation import Field, ObservationSpec, Window
from specact.rng import Role, stream

_BATCH = 64  # windows that a teacher answers to at once


@contextmanager
def frames_at_hand(episodes: Episodes, folder: Path, progress: Progress) -> Iterator[Episodes]:
    """Decodes every camera's frames into one file in ``folder``, unless they are in memory anyway.

    Batches are drawn at random, and a frame in the middle of a compressed chunk or video costs all those before it. The
    files are removed if the context ends without an error, so that a run that was stopped can use them again.

    Raises:
        ConfigError: if there is no room for them.
        DataError: if a frame cannot be read.
    """

    def at_hand(name: str, array: Observed) -> Observed:
        if not isinstance(array, Frames) or array.in_memory:
            return array
        return copied(array, folder / f"{name}.npy", lambda done: progress(f"frames of {name}", done, len(array)))

    yield replace(episodes, observation={name: at_hand(name, seen) for name, seen in episodes.observation.items()})
    shutil.rmtree(folder, ignore_errors=True)


def observation_of(policy: Seeing, recipe: Recipe, episodes: Episodes, who: str) -> ObservationSpec:
    """The observations of a policy of a recipe, with shapes and histories; ``who`` it is, for messages.

    Raises:
        ConfigError: if an observation is missing, or none has a history.
    """
    available = episodes.observation
    sees = policy.sees or tuple(
        name for name in available if name not in episodes.cameras and not name.startswith("privileged.")
    )
    for name in (*sees, *policy.history):
        if name not in available:
            raise unknown_name(f"observation of {who}", name, available)
    if not sees:
        raise ConfigError(
            f"these demonstrations hold camera frames alone ({', '.join(episodes.cameras)}); say which of them {who} "
            'sees, as in sees = ["image"]'
        )

    def field(name: str) -> Field:
        array, source = available[name], recipe.observations.get(name)
        history = policy.history.get(name, None if source is None else source.history)
        if history is None:
            history = 0 if name.partition(".")[0] == "goal" else recipe.window
        return Field(array.shape[1:], "uint8" if isinstance(array, Frames) else "float32", history)

    if policy.instruction and episodes.instructions is None:
        raise ConfigError(f"{who} is to follow an instruction, and these demonstrations do not say what they show")
    spec = ObservationSpec({name: field(name) for name in sees}, policy.instruction)
    if not any(field.history for field in spec.fields.values()):
        raise ConfigError(f"{who} needs at least one observation with a history of 1 or more")
    return spec


def positions(spec: ObservationSpec) -> int:
    """P: the number of newest positions that are covered by all histories; only those predict."""
    return min(field.history for field in spec.fields.values() if field.history)


@dataclass(frozen=True)
class Batch:
    """A batch of windows, ``[B, T, ...]`` or ``[B, ...]`` by name, of an instruction its words; and their labels.

    ``step [B, P]`` is the index of the demonstration step of every predicting position, see :func:`positions`; ``weight
    [B, P]`` is 0 at padding before an episode's start and where the chunk does not count, else 1.
    """

    observation: dict[str, Tensor]
    step: Tensor
    weight: Tensor


class Windows:
    """All windows of a set of demonstrations.

    Windows that reach before an episode's start are padded with its first observation, as on the device, with weight 0.
    Chunks that reach past an episode's end repeat its last action. Camera frames are read lazily.

    Attributes:
        chunks: the chunk of ``chunk`` actions that begins at each step, ``(action - centre) / scale``, ``[N, n, A]``.
        counts: whether it counts, ``[N]``; only windows at whose last step it does are drawn. With ``skip_disturbed``
            chunks that reach beyond a disturbed step do not.
    """

    def __init__(
        self, episodes: Episodes, chunk: int, centre: NDArray[np.float32], scale: NDArray[np.float32],
        words: Words | None = None, *, skip_disturbed: bool = False,
    ) -> None:  # fmt: skip
        self.episodes, self.words = episodes, words
        lengths = np.diff(episodes.ends, prepend=0)
        self._starts, last = np.repeat(episodes.starts, lengths), np.repeat(episodes.ends - 1, lengths)
        beyond = np.arange(episodes.steps)[:, None] + np.arange(chunk)
        ahead = np.minimum(beyond, last[:, None])
        normalised = (episodes.action - centre) / scale
        self.chunks = torch.from_numpy(normalised[ahead].astype(np.float32))
        self.counts: NDArray[np.bool_] = np.ones(episodes.steps, np.bool_)
        if skip_disturbed:
            self.counts = np.all(episodes.followed(chunk) | (beyond > last[:, None]), axis=1)
        self._drawn = np.flatnonzero(self.counts)

    def __len__(self) -> int:
        return self.episodes.steps

    @property
    def counted(self) -> Tensor:
        """The chunks that count, ``[M, n, A]``."""
        return self.chunks[self._drawn]

    def with_observation(self, name: str, observed: NDArray[np.float32]) -> Windows:
        """The windows with other values of an observation."""
        copied = copy(self)
        copied.episodes = replace(self.episodes, observation={**self.episodes.observation, name: observed})
        return copied

    def draw(self, spec: ObservationSpec, seed: int, step: int, size: int) -> Batch:
        """The batch of one training step: a function of (seed, step) only, so that resuming is exact."""
        drawn = stream(seed, Role.DATA, step=step).integers(len(self._drawn), size=size)
        return self.at(spec, self._drawn[drawn])

    def at(self, spec: ObservationSpec, chosen: NDArray[np.int64]) -> Batch:
        """The windows that end at these steps, with a policy's observations."""
        observation = {
            name: torch.from_numpy(self.episodes.observation[name][self.rows(chosen, field.history)])
            for name, field in spec.fields.items()
        }
        if spec.instruction:
            assert self.words is not None, "checked by observation_of"
            observation[INSTRUCTION] = torch.from_numpy(self.words.numbers(self.instructions(chosen)))
        predicting, first = chosen[:, None] + np.arange(1 - positions(spec), 1), self._starts[chosen][:, None]
        step = np.maximum(predicting, first)
        weight = ((predicting >= first) & self.counts[step]).astype(np.float32)
        return Batch(observation, torch.from_numpy(step), torch.from_numpy(weight))

    def rows(self, chosen: NDArray[np.int64], history: int) -> NDArray[np.int64]:
        """The steps in the windows that end at these, ``[N, history]``, or ``[N]`` without a history."""
        steps = np.maximum(chosen[:, None] + np.arange(1 - history, 1), self._starts[chosen][:, None])
        return steps if history else chosen

    def seen_at(self, spec: ObservationSpec, chosen: NDArray[np.int64]) -> list[Window]:
        """The windows that a policy would see at these steps."""
        # Of an instruction a policy gets the text; which words it knows is its own affair.
        tensors = self.at(replace(spec, instruction=False), chosen).observation
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        texts = self.instructions(chosen) if spec.instruction else [None] * len(chosen)
        return [Window({name: array[i] for name, array in arrays.items()}, text) for i, text in enumerate(texts)]

    def instructions(self, chosen: NDArray[np.int64]) -> list[str]:
        """The instructions at these steps."""
        instructions = self.episodes.instructions
        assert instructions is not None, "checked by the caller"
        return [instructions[episode] for episode in np.searchsorted(self.episodes.ends, chosen, side="right")]


@dataclass(frozen=True)
class Dataset:
    """Windows of the training and of the held-out episodes, and what they are scaled with.

    ``statistics`` are those of the training observations; with ``centre`` and ``scale``, ``[A]``, ``normalised =
    (action - centre) / scale`` lies in [-1, 1]. ``words`` are of the instructions trained on, if there are any.
    """

    train: Windows
    held_out: Windows
    statistics: Statistics
    centre: Tensor
    scale: Tensor
    words: Words | None = None


def prepare(episodes: Episodes, recipe: Recipe, *, skip_disturbed: bool = False) -> Dataset:
    """Splits by episode (the same split for every stage), normalises actions by their range; see :class:`Windows`.

    Raises:
        DataError: if there are too few episodes, none as long as a chunk, or values too large to compute with.
    """
    longest = int(np.diff(episodes.ends, prepend=0).max())
    if recipe.chunk > longest:
        raise DataError(
            f"the longest demonstration has {longest} actions, fewer than chunk = {recipe.chunk}: every chunk would "
            "end in repetitions of a last action; shorten chunk"
        )
    train, held_out = episodes.split(recipe.held_out, recipe.seed)
    low, high = train.action.min(0), train.action.max(0)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is refused below
        centre, scale = (low + high) / 2, np.maximum((high - low) / 2, 1e-6)
    seen = train.observation
    statistics = {name: moments(values) for name, values in seen.items() if isinstance(values, np.ndarray)}
    tensors = [torch.from_numpy(centre), torch.from_numpy(scale)]
    parts = (*tensors, *(part for pair in statistics.values() for part in pair))
    if not all(bool(part.isfinite().all()) for part in parts):
        raise DataError(
            "these demonstrations hold values so large that their range or standard deviation overflows; rescale them"
        )
    words = None if train.instructions is None else Words.from_instructions(train.instructions)
    windows = [
        Windows(part, recipe.chunk, centre, scale, words, skip_disturbed=skip_disturbed) for part in (train, held_out)
    ]
    if not all(part.counts.any() for part in windows):
        raise DataError(
            f"no chunk of {recipe.chunk} actions lies before a disturbance; shorten chunk, or leave out skip_disturbed"
        )
    return Dataset(windows[0], windows[1], statistics, tensors[0], tensors[1], words)


def moments(values: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over the first axis, the latter not below 0.001; infinite where they overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(values.mean(0)), torch.from_numpy(np.maximum(values.std(0), 1e-3))


# --- a teacher, whose answers to the demonstrated observations are the labels ---


def check_teacher(teacher: LoadedPolicy, chunk: int, episodes: Episodes) -> None:
    """Refuses a target that cannot label these demonstrations for a draft of this chunk."""
    spec, actions = teacher.policy.spec, episodes.action.shape[1]
    assert episodes.rate_hz is not None, "given by the recipe or its task"
    if spec.actions != actions or spec.rate_hz != episodes.rate_hz:
        raise ConfigError(
            f"{teacher.name} has {spec.actions} actions at {spec.rate_hz:g} Hz, the demonstrations {actions} at "
            f"{episodes.rate_hz:g} Hz"
        )
    if spec.chunk < chunk:
        raise ConfigError(f"{teacher.name} answers with {spec.chunk} actions; the recipe's chunk of {chunk} is longer")
    check_observed(teacher.name, spec.observation, episodes)


def check_observed(who: str, observation: ObservationSpec, episodes: Episodes) -> None:
    """Refuses demonstrations that do not hold what somebody sees."""
    missing = sorted(set(observation.fields) - set(episodes.observation))
    if missing:
        raise ConfigError(
            f"{who} sees {', '.join(missing)}, which the demonstrations do not hold under that name; name it "
            "in the recipe's [observations]"
        )
    for name, field in observation.fields.items():
        shape = episodes.observation[name].shape[1:]
        if shape != field.shape:
            raise ConfigError(
                f"{who} sees {name} of shape {field.shape}, the demonstrations hold one of {shape}; camera frames are "
                "resized by size in the recipe's [observations]"
            )
    if observation.instruction and episodes.instructions is None:
        raise ConfigError(f"{who} needs an instruction, and these demonstrations do not say what they show")


@contextmanager
def labelled(
    dataset: Dataset, teacher: LoadedPolicy, chunk: int, folder: Path, seed: int, progress: Progress
) -> Iterator[None]:
    """Replaces the chunks that a dataset's windows should predict by the target's answers to the same observations.

    Answers are kept in the folder until the context ends without an error, so that a run that was stopped does not ask
    again. They are clipped to the demonstrated range, which no action on the robot leaves; one that is not finite is
    refused.
    """
    centre, scale = dataset.centre.numpy(), dataset.scale.numpy()
    parts = {folder / f"answers-{name}.npy": getattr(dataset, name) for name in ("train", "held_out")}
    total, done = sum(map(len, parts.values())), 0
    for path, windows in parts.items():
        answers = _stored(path, (len(windows), chunk, len(centre)))
        for first in range(0, len(windows), _BATCH):
            rows = np.arange(first, min(first + _BATCH, len(windows)))
            if np.isnan(answers[rows]).any():
                rngs = [stream(seed, Role.DRAFT, episode=Draw.TEACHER, step=int(row)) for row in rows]
                seen = windows.seen_at(teacher.policy.spec.observation, rows)
                batch = np.stack(teacher.policy.infer_batch(seen, rngs))[:, :chunk]
                if not np.isfinite(batch).all():
                    raise DataError(f"{teacher.name} has no finite answer to some of the demonstrated observations")
                answers[rows] = np.clip(batch, centre - scale, centre + scale)
            done += len(rows)
            progress("target's answers", done, total)
        answers.flush()
        windows.chunks = torch.from_numpy(((np.asarray(answers) - centre) / scale).astype(np.float32))
    yield
    for path in parts:
        path.unlink()


def _stored(path: Path, shape: tuple[int, ...]) -> np.memmap:
    """An array in a file; NaN where nothing has been written yet."""
    if path.exists():
        stored = np.lib.format.open_memmap(path, mode="r+")
        if stored.shape == shape:
            return stored
    created = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    created[:] = np.nan
    return created
