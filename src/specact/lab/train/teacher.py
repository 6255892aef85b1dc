"""Answers of a target to demonstrated observations: labels of a draft, or lessons of a learned gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specact.errors import ConfigError, DataError
from specact.families.chunks.sources import LoadedPolicy
from specact.families.tokens.pair import TokenDrafter
from specact.lab.data.distillation import DistillationData, join
from specact.lab.data.episodes import Episodes
from specact.lab.rollout.distillation import data_of
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import HYBRID
from specact.lab.rollout.timed import Prepared
from specact.lab.train.dataset import Dataset
from specact.lab.train.loop import Draw, Progress
from specact.lab.train.windows import Windows
from specact.observation import ObservationSpec, Window
from specact.pair import Pair
from specact.rng import Role, StepAddress, stream, streams
from specact.systems.flash import FlashDrafter

_BATCH = 64


def check_teacher(teacher: LoadedPolicy, chunk: int, actions: int, rate_hz: float, episodes: Episodes) -> None:
    """Refuses a target that cannot label demonstrations with these actions for a draft of this chunk."""
    spec = teacher.policy.spec
    if spec.actions != actions or spec.rate_hz != rate_hz:
        raise ConfigError(
            f"{teacher.name} has {spec.actions} actions at {spec.rate_hz:g} Hz, the demonstrations {actions} at "
            f"{rate_hz:g} Hz"
        )
    if spec.chunk < chunk:
        raise ConfigError(f"{teacher.name} answers with {spec.chunk} actions; the recipe's chunk of {chunk} is longer")
    _check_observed(teacher.name, spec.observation, episodes)


def _check_observed(who: str, observation: ObservationSpec, episodes: Episodes) -> None:
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
    spec = teacher.policy.spec.observation
    total, done = sum(map(len, parts.values())), 0
    for path, windows in parts.items():
        answers = _stored(path, (len(windows), chunk, len(centre)))
        for first in range(0, len(windows), _BATCH):
            rows = np.arange(first, min(first + _BATCH, len(windows)))
            if np.isnan(answers[rows]).any():
                rngs = [stream(seed, Role.DRAFT, episode=Draw.TEACHER, step=int(row)) for row in rows]
                batch = np.stack(teacher.policy.infer_batch(windows_at(windows, spec, rows), rngs))[:, :chunk]
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


def windows_at(windows: Windows, observation: ObservationSpec, rows: NDArray[np.int64]) -> list[Window]:
    """What a policy would see at these steps of demonstrations."""
    # Of an instruction a policy gets the text; which words it knows is its own affair.
    tensors = windows.at(replace(observation, instruction=False), rows).observation
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    instructions = windows.instructions(rows) if observation.instruction else [None] * len(rows)
    return [Window({name: array[i] for name, array in arrays.items()}, text) for i, text in enumerate(instructions)]


def _stored(path: Path, shape: tuple[int, ...]) -> np.memmap:
    """An array in a file; NaN where nothing has been written yet."""
    if path.exists():
        stored = np.lib.format.open_memmap(path, mode="r+")
        if stored.shape == shape:
            return stored
    created = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    created[:] = np.nan
    return created


def demonstrated_lessons(
    pair: Pair[Any], episodes: Episodes, wanted: int, folder: Path, advance: Callable[[int], None], *, seed: int = 0
) -> DistillationData:
    """The outputs of both policies of a pair for ``wanted`` demonstrated observations, without a simulator.

    Camera frames are kept in the folder.

    Raises:
        ConfigError: if the pair sees what the demonstrations do not hold, is of a family of the user's own, or drafts
            from what its robot executed, or for less than one step.
        DataError: if there are fewer than two demonstrations, or the target has no finite answer.
    """
    if wanted < 1:
        raise ConfigError(f"lessons must be at least 1, got {wanted}")
    if len(episodes) < 2:
        raise DataError("at least two demonstrations are needed: one to learn from and one to check on")
    family, prepared = rollout_of(pair, HYBRID), Prepared[Any]()
    _check_observed(pair.name, pair.observation, episodes)
    drafter = family.drafter(prepared)
    if isinstance(drafter, TokenDrafter | FlashDrafter) and not drafter.stateless:
        raise ConfigError(
            f"{pair.name} drafts from what its robot executed, which demonstrations do not hold; choose a decoding "
            "that drafts from the observation (one with a draft policy: --draft, of a flow policy also --decoding "
            "flash_policy), or train in a simulator, with specact calibrate"
        )
    windows = Windows(episodes, 1, np.zeros(1, np.float32), np.ones(1, np.float32))
    rows = np.sort(stream(seed, Role.DATA, episode=Draw.TEACHER).permutation(len(windows))[:wanted])
    parts = []
    for first in range(0, len(rows), _BATCH):
        chosen = rows[first : first + _BATCH]
        observed = windows_at(windows, pair.observation, chosen)
        addresses = [StepAddress(seed, 0, Draw.TEACHER, int(row)) for row in chosen]
        drafts, targets = family.infer(observed, addresses)
        proposals = []
        for window, draft, rng in zip(observed, drafts, streams(Role.DRAFT, addresses), strict=True):
            prepared.prepared = draft
            proposals.append(drafter.propose(window, rng))
        table = family.lessons(proposals, drafts, targets)
        if not all(np.isfinite(column).all() for column in table.values()):
            raise DataError(f"{pair.name} has no finite answer to some of the demonstrated observations")
        table["episode"] = np.searchsorted(episodes.ends, chosen, side="right")
        parts.append(data_of(table, folder, first))
        advance(first + len(chosen))
    return join(parts)
