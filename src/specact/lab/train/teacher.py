"""What a target says of demonstrated observations: for a draft that learns its answers, or for a learned gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specact.errors import ConfigError, DataError
from specact.families.chunks.sources import LoadedPolicy
from specact.families.flash.drafting import FlashDrafter
from specact.families.load import AnyPair
from specact.families.tokens.drafting import TokenDrafter
from specact.lab.data.distillation import DistillationData, join
from specact.lab.data.episodes import Episodes
from specact.lab.rollout.distillation import data_of
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import HYBRID
from specact.lab.rollout.timed import Prepared
from specact.lab.train.stages import Progress
from specact.lab.train.windows import Dataset, Windows
from specact.observation import ObservationSpec, Window
from specact.rng import Role, StepAddress, stream, streams

_BATCH = 64
# Of the random streams that the target draws from; no training step has this number.
_STREAM = 9


def check_teacher(teacher: LoadedPolicy, chunk: int, actions: int, rate_hz: float, shown: Episodes) -> None:
    """Refuses a target that cannot label these demonstrations.

    Args:
        teacher: the target.
        chunk: actions that the draft predicts at once.
        actions, rate_hz: of the demonstrations, as the draft takes them.
        shown: the demonstrations.

    Raises:
        ConfigError: if its chunks are shorter, its actions others, or it needs what the demonstrations do not hold.
    """
    spec = teacher.policy.spec
    if spec.actions != actions or spec.rate_hz != rate_hz:
        raise ConfigError(
            f"{teacher.name} has {spec.actions} actions at {spec.rate_hz:g} Hz, the demonstrations {actions} at "
            f"{rate_hz:g} Hz"
        )
    if spec.chunk < chunk:
        raise ConfigError(f"{teacher.name} answers with {spec.chunk} actions; the recipe's chunk of {chunk} is longer")
    _check_seen(teacher.name, spec.observation, shown)


def _check_seen(who: str, observation: ObservationSpec, shown: Episodes) -> None:
    missing = sorted(set(observation.fields) - set(shown.observation))
    if missing:
        raise ConfigError(
            f"{who} sees {', '.join(missing)}, which the demonstrations do not hold under that name; name it "
            "in the recipe's [observations]"
        )
    for name, field in observation.fields.items():
        found = shown.observation[name].shape[1:]
        if found != field.shape:
            raise ConfigError(
                f"{who} sees {name} of shape {field.shape}, the demonstrations hold one of {found}; camera frames are "
                "resized by size in the recipe's [observations]"
            )
    if observation.instruction and shown.instructions is None:
        raise ConfigError(f"{who} needs an instruction, and these demonstrations do not say what they show")


def teach(dataset: Dataset, teacher: LoadedPolicy, chunk: int, folder: Path, seed: int, progress: Progress) -> None:
    """Replaces the chunks that a dataset's windows should predict by the target's answers to the same observations.

    Answers are kept in the folder as they come, so that a run that was stopped does not ask again.

    Args:
        dataset: its windows are changed.
        teacher: the target; checked by :func:`check_teacher`.
        chunk: actions that the draft predicts at once.
        folder: of the run.
        seed: of what is random about the target.
        progress: told (what is going on, done, in all).

    Raises:
        DataError: if an answer is not finite.
    """
    centre, scale = dataset.centre.numpy(), dataset.scale.numpy()
    low, high = centre - scale, centre + scale
    parts = (("train", dataset.train), ("held_out", dataset.held_out))
    spec = teacher.policy.spec.observation
    total, done = sum(len(windows) for _, windows in parts), 0
    for name, windows in parts:
        path = folder / f"answers-{name}.npy"
        answers = _file(path, (len(windows), chunk, len(centre)))
        for first in range(0, len(windows), _BATCH):
            rows = np.arange(first, min(first + _BATCH, len(windows)))
            if np.isnan(answers[rows]).any():
                rngs = [stream(seed, Role.DRAFT, episode=_STREAM, step=int(row)) for row in rows]
                found = np.stack(teacher.policy.infer_batch(windows_at(windows, spec, rows), rngs))[:, :chunk]
                if not np.isfinite(found).all():
                    raise DataError(f"{teacher.name} has no finite answer to some of the demonstrated observations")
                # As on the robot, where no action leaves the range that was demonstrated.
                answers[rows] = np.clip(found, low, high)
            done += len(rows)
            progress("target's answers", done, total)
        answers.flush()
        normalised = (np.asarray(answers) - centre) / scale
        windows.chunks = torch.from_numpy(normalised.astype(np.float32))


def forget_answers(folder: Path) -> None:
    """Removes the answers that :func:`teach` keeps, when the draft is trained."""
    for path in folder.glob("answers-*.npy"):
        path.unlink()


def windows_at(windows: Windows, observation: ObservationSpec, rows: NDArray[np.int64]) -> list[Window]:
    """What a policy would see at these steps of demonstrations."""
    # Of an instruction a policy gets the text; which words it knows is its own affair.
    seen = windows.at(replace(observation, instruction=False), rows).observation
    arrays = {name: tensor.numpy() for name, tensor in seen.items()}
    told = windows.instructions(rows) if observation.instruction else [None] * len(rows)
    return [Window({name: array[i] for name, array in arrays.items()}, text) for i, text in enumerate(told)]


def _file(path: Path, shape: tuple[int, ...]) -> np.memmap:
    """NaN where nothing has been asked yet."""
    if path.exists():
        kept = np.lib.format.open_memmap(path, mode="r+")
        if kept.shape == shape:
            return kept
    made = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    made[:] = np.nan
    return made


def lessons_along(
    pair: AnyPair, shown: Episodes, wanted: int, folder: Path, advance: Callable[[int], None], *, seed: int = 0
) -> DistillationData:
    """What both policies of a pair say of demonstrated observations, without a simulator.

    Args:
        pair: of action codes, of chunks, or a token or flow policy with a draft.
        shown: demonstrations.
        wanted: at most so many of their steps, drawn at random.
        folder: where camera frames are kept; without a camera nothing is written.
        advance: told the number of steps so far.
        seed: of everything random.

    Raises:
        ConfigError: if the pair sees what the demonstrations do not hold, is of a family of the user's own, or drafts
            from what its robot executed, or for less than one step.
        DataError: if there are fewer than two demonstrations, or the target has no finite answer.
    """
    if wanted < 1:
        raise ConfigError(f"lessons must be at least 1, got {wanted}")
    if len(shown) < 2:
        raise DataError("at least two demonstrations are needed: one to learn from and one to check on")
    family, prepared = rollout_of(pair, HYBRID), Prepared[Any]()
    _check_seen(pair.name, pair.observation, shown)
    drafter = family.drafter(prepared)
    if isinstance(drafter, TokenDrafter | FlashDrafter) and not drafter.stateless:
        raise ConfigError(
            f"{pair.name} drafts from what its robot executed, which demonstrations do not hold; choose a decoding "
            "that drafts from the observation (one with a draft policy: --draft, of a flow policy also --decoding "
            "flash_policy), or train in a simulator, with specact calibrate"
        )
    windows = Windows(shown, 1, np.zeros(1, np.float32), np.ones(1, np.float32))
    rows = np.sort(stream(seed, Role.DATA, episode=_STREAM).permutation(len(windows))[:wanted])
    parts = []
    for first in range(0, len(rows), _BATCH):
        chosen = rows[first : first + _BATCH]
        seen = windows_at(windows, pair.observation, chosen)
        addresses = [StepAddress(seed, 0, _STREAM, int(row)) for row in chosen]
        drafts, targets = family.infer(seen, addresses)
        proposals = []
        for window, draft, rng in zip(seen, drafts, streams(Role.DRAFT, addresses), strict=True):
            prepared.prepared = draft
            proposals.append(drafter.propose(window, rng))
        table = family.lessons(proposals, drafts, targets)
        if not all(np.isfinite(column).all() for column in table.values()):
            raise DataError(f"{pair.name} has no finite answer to some of the demonstrated observations")
        table["episode"] = np.searchsorted(shown.ends, chosen, side="right")
        parts.append(data_of(table, folder, first))
        advance(first + len(chosen))
    return join(parts)
