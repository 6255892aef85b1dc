"""Training data of a gate or a draft: states visited by a pair under gates, and the outputs of both policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.families.codes.pair import CodeParts
from specact.gates.settings import GateSettings
from specact.lab.data.frames import Frames, as_frames, copied, join_frames
from specact.lab.envs import env_of
from specact.lab.rollout.methods import HYBRID
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import EpisodeRange, Shard
from specact.lab.rollout.steps import OBSERVATION
from specact.pair import Pair

# Every round has its own million of episodes.
_ROUND = 1_000_000
_SHARD = 10
# Columns of the step table that are kept, of all families.
_OUTPUTS = ("draft_probs", "target_probs", "target_offsets", "drafted", "drafted_distance", "wanted")


class FrameWindows:
    """Windows of camera frames, uint8 ``[N, T, H, W, 3]``, which are read lazily on conversion to an array.

    ``rows`` are the indices of each window's frames, ``[N, T]``, or ``[N]`` without a history.
    """

    def __init__(self, frames: Frames, rows: NDArray[np.int64]) -> None:
        self.frames, self.rows = frames, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: NDArray[Any]) -> FrameWindows:
        return FrameWindows(self.frames, self.rows[chosen])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.frames[self.rows], dtype=dtype)


Column = NDArray[Any] | FrameWindows


@dataclass(frozen=True)
class DistillationData:
    """One row per inference, with the number of its episode; all normalised.

    ``observation`` is the draft's, by name, each ``[N, *window_shape]``; of an instruction its words, ``[N, L]``.
    ``outputs`` are of draft and target, by name. Of action codes ``draft_probs`` and ``target_probs``, q and p,
    ``[N, G, K]``, and ``target_offsets``, float16 ``[N, G, K, n, A]``. Of chunks ``drafted``, the executed part of the
    drafted chunk, ``[N, n, A]``, ``drafted_distance``, ``[N]``, of the target's from it, and ``wanted``, the target's
    chunk, ``[N, H, A]``.
    """

    episode: NDArray[np.int64]
    observation: Mapping[str, Column]
    outputs: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.episode)

    def select(self, rows: NDArray[Any]) -> DistillationData:
        """A subset of the rows, by index or as a mask ``[N]``; no frame is read."""
        observation = {name: column[rows] for name, column in self.observation.items()}
        return DistillationData(
            self.episode[rows], observation, {name: column[rows] for name, column in self.outputs.items()}
        )

    def split(self, every: int = 20) -> tuple[DistillationData, DistillationData]:
        """Training and held-out set; the latter are the episodes whose number ``every`` divides."""
        held_out = self.episode % every == 0
        return self.select(~held_out), self.select(held_out)


def join(parts: Sequence[DistillationData]) -> DistillationData:
    """Concatenates several."""
    first = parts[0]
    observation = {name: _concatenated([part.observation[name] for part in parts]) for name in first.observation}
    outputs = {name: np.concatenate([part.outputs[name] for part in parts]) for name in first.outputs}
    return DistillationData(np.concatenate([part.episode for part in parts]), observation, outputs)


def _concatenated(columns: Sequence[Column]) -> Column:
    windows = [column for column in columns if isinstance(column, FrameWindows)]
    if not windows:
        return np.concatenate([np.asarray(column) for column in columns])
    starts = np.cumsum([0, *(len(column.frames) for column in windows)])
    rows = [column.rows + start for column, start in zip(windows, starts, strict=False)]
    return FrameWindows(join_frames([column.frames for column in windows]), np.concatenate(rows))


Collect = Callable[[Pair[Any], Sequence[GateSettings], int], DistillationData]


def collect(
    pair: Pair[Any],
    gates: Sequence[GateSettings],
    wanted: int,
    number: int,
    pool: Pool,
    advance: Callable[[int], None],
    seed: int = 0,
    env: str | None = None,
    folder: Path | None = None,
) -> DistillationData:
    """Rolls a pair out under each gate and keeps the outputs of both policies at every inference.

    At least ``wanted`` inferences, in whole batches of episodes, in states that the gates determine; round ``number``
    has its own episodes. ``env`` is the pair's own if None; camera frames are written to ``folder``.

    Raises:
        ConfigError: for a pair that cannot be distilled, or if there is no disk space for camera frames.
    """
    if isinstance(pair.parts, CodeParts) and pair.parts.spec.sequential:
        raise ConfigError(
            f"the bundle {pair.name!r} has a sequential secondary head; gates and drafts can be trained only for "
            "independent codebooks"
        )
    batches: list[DistillationData] = []
    first = number * _ROUND
    env_name = env or env_of(pair, None)
    while (done := sum(map(len, batches))) < wanted:
        advance(done)
        shards = []
        # Four shards per gate keep any pool busy; the number does not depend on the machine.
        for gate in [gate for gate in gates for _ in range(4)]:
            episodes = EpisodeRange.LESSONS.episodes(_SHARD, first)
            shards.append(replace(Shard.of(pair, env_name, HYBRID, gate, episodes, seed), learning=True))
            first += _SHARD
        # Frames are written to disk at once.
        batch_of = {
            shard.episodes[0]: data_of(table, folder, shard.episodes[0]) for shard, (_, table) in pool.run(shards)
        }
        batches += [batch_of[key] for key in sorted(batch_of)]
    advance(wanted)
    return join(batches)


def collector(
    wanted: int,
    pool: Pool,
    progress: Callable[[str, int, int], None],
    env: str | None = None,
    folder: Path | None = None,
) -> Collect:
    """:func:`collect` as a function of pair, gates and round number; progress is (round, inferences so far, total).

    Raises:
        ConfigError: for less than one inference.
    """
    if wanted < 1:
        raise ConfigError(f"lessons must be at least 1, got {wanted}")

    def roll(pair: Pair[Any], gates: Sequence[GateSettings], number: int) -> DistillationData:
        stage = f"lessons {number + 1}"
        return collect(pair, gates, wanted, number, pool, lambda done: progress(stage, done, wanted), 0, env, folder)

    return roll


def data_of(table: dict[str, NDArray[Any]], folder: Path | None, number: int) -> DistillationData:
    """The training columns of a step table; camera frames go to a file with this number in the folder."""

    def stored(name: str, column: NDArray[Any]) -> Column:
        if column.dtype != np.uint8:
            return column
        assert folder is not None, "camera frames need a folder"
        file = folder / f"{name}-{number}.npy"
        file.unlink(missing_ok=True)  # of an interrupted run
        rows = np.arange(int(np.prod(column.shape[:-3]))).reshape(column.shape[:-3])
        return FrameWindows(copied(as_frames(column.reshape(-1, *column.shape[-3:])), file), rows)

    columns = {name.removeprefix(OBSERVATION): column for name, column in table.items() if name.startswith(OBSERVATION)}
    observation = {name: stored(name, column) for name, column in columns.items()}
    return DistillationData(table["episode"], observation, {name: table[name] for name in _OUTPUTS if name in table})
