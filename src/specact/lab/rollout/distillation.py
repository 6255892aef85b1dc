"""Training data from rollouts.

A gate's head or a draft learns from the states that a pair visits under gates, with the outputs of both policies. The
drafters of a token policy learn from its own rollouts, because on demonstrations it is more certain than anywhere else;
a corrector learns from rollouts of a chunk policy whose chunks arrive late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from specact.errors import ConfigError
from specact.families.chunks.policy import ChunkPolicy
from specact.families.codes.pair import CodeParts
from specact.families.tokens.policy import GREEDY, load_tokens
from specact.files import write_whole
from specact.gates.settings import GateSettings
from specact.lab.data.frames import Column, FrameWindows, as_frames, copied, join_frames
from specact.lab.data.generate import Each
from specact.lab.envs import env_of, load_task
from specact.lab.envs.robot import SimulatedRobot, play
from specact.lab.rollout.methods import HYBRID
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import EpisodeRange, Shard, episode_seed
from specact.lab.rollout.steps import OBSERVATION, SHARD, Table, concatenated, observation_columns
from specact.load import load_pair, load_policy
from specact.observation import Field, ObservationHistory, ObservationSpec, Window
from specact.pair import Pair
from specact.rng import Role, StepAddress, stream, streams
from specact.systems.corrector import corrected
from specact.types import Chunk

Recorded = TypeVar("Recorded")
# Every round has its own million of episodes.
_ROUND = 1_000_000
# Columns of tables that are kept: of the steps of all families, and of stale rollouts.
_OUTPUTS = ("draft_probs", "target_probs", "target_offsets", "drafted", "drafted_distance", "wanted", "step", "chunk")


@dataclass(frozen=True)
class DistillationData:
    """A table with one row per inference, with the number of its episode; all numbers are normalised.

    ``observation`` is the draft's, by name, each ``[N, *window_shape]``; of an instruction its words, ``[N, L]``.
    ``outputs`` are of draft and target, by name. Of action codes ``draft_probs`` and ``target_probs``, q and p,
    ``[N, G, K]``, and ``target_offsets``, float16 ``[N, G, K, n, A]``. Of chunks ``drafted``, the executed part of the
    drafted chunk, ``[N, n, A]``, ``drafted_distance``, ``[N]``, of the target's from it, and ``wanted``, the target's
    chunk, ``[N, H, A]``. Of :func:`record_stale` ``step`` and ``chunk``, as they were recorded.
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
    """The rows of all parts, one part after the other; no frame is read."""
    first = parts[0]
    observation = {name: _concatenated([part.observation[name] for part in parts]) for name in first.observation}
    outputs = concatenated([{**part.outputs, "episode": part.episode} for part in parts])
    return DistillationData(outputs.pop("episode"), observation, outputs)


def _concatenated(columns: Sequence[Column]) -> Column:
    windows = [column for column in columns if isinstance(column, FrameWindows)]
    if not windows:
        return np.concatenate([np.asarray(column) for column in columns])
    starts = np.cumsum([0, *(len(column.frames) for column in windows)])
    rows = [column.rows + start for column, start in zip(windows, starts, strict=False)]
    return FrameWindows(join_frames([column.frames for column in windows]), np.concatenate(rows))


Collect = Callable[[Pair[Any], Sequence[GateSettings], int], DistillationData]


def collector(
    wanted: int, pool: Pool, progress: Callable[[str, int, int], None], env: str | None = None,
    folder: Path | None = None,
) -> Collect:  # fmt: skip
    """Returns a function of a pair, gates and a round's number that records both policies' outputs at every inference.

    It records at least ``wanted`` inferences, in whole batches of episodes, in states that the gates determine; every
    round has its own episodes. Progress is (round, inferences so far, wanted). ``env`` is the pair's own if None;
    camera frames are written to ``folder``.

    Raises:
        ConfigError: for less than one inference, a pair that cannot be distilled, or no disk space for camera frames.
    """
    if wanted < 1:
        raise ConfigError(f"lessons must be at least 1, got {wanted}")

    def roll(pair: Pair[Any], gates: Sequence[GateSettings], number: int) -> DistillationData:
        if isinstance(pair.parts, CodeParts) and pair.parts.spec.sequential:
            raise ConfigError(
                f"the bundle {pair.name!r} has a sequential secondary head; gates and drafts can be trained only for "
                "independent codebooks"
            )
        batches, first, env_name = list[DistillationData](), number * _ROUND, env or env_of(pair.env)
        while (done := sum(map(len, batches))) < wanted:
            progress(f"lessons {number + 1}", done, wanted)
            shards = []
            # Four shards per gate keep any pool busy; the number does not depend on the machine.
            for gate in [gate for gate in gates for _ in range(4)]:
                episodes = EpisodeRange.LESSONS.episodes(SHARD, first)
                shards.append(replace(Shard.of(pair, env_name, HYBRID, gate, episodes, 0), learning=True))
                first += SHARD
            # Frames are written to disk at once.
            batch_of = {
                shard.episodes[0]: data_of(table, folder, shard.episodes[0]) for shard, (_, table) in pool.run(shards)
            }
            batches += [batch_of[key] for key in sorted(batch_of)]
        progress(f"lessons {number + 1}", wanted, wanted)
        return join(batches)

    return roll


def data_of(table: dict[str, NDArray[Any]], folder: Path | None, number: int) -> DistillationData:
    """The training columns of a table; camera frames go to a file with this number in the folder."""

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


@dataclass(frozen=True)
class TokenRollouts:
    """Recorded inferences of a token policy, one per row: numbers of ``episode`` and control ``step``, int64 ``[N]``.

    ``tokens`` are the decoded ones, uint8 ``[N, T]``; ``features`` the inputs of the output layer for each, float16
    ``[N, T, W]``; ``seen`` the mean of the encoder's tokens of the observation, float16 ``[N, W]``; ``state`` the
    newest row of the observation ``state``, float32 ``[N, S]``, S = 0 without one; ``success`` that of the row's
    episode, ``[N]``.
    """

    episode: NDArray[np.int64]
    step: NDArray[np.int64]
    tokens: NDArray[np.uint8]
    features: NDArray[np.float16]
    seen: NDArray[np.float16]
    state: NDArray[np.float32]
    success: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.episode)


def record_rollouts(
    record: Callable[[Path, int], None],
    folder: Path,
    numbers: Sequence[int],
    each: Each,
    progress: Callable[[int, int], None],
) -> list[Path]:
    """Records the missing ones of the files with these numbers, of :data:`SHARD` episodes each, and returns all.

    ``record`` writes one file, such as :func:`record_tokens` with its first arguments; ``each`` runs the work, such as
    :meth:`Pool.each <specact.lab.rollout.pool.Pool.each>`; progress is (files done, total).
    """
    files = [folder / f"{number:05}.safetensors" for number in numbers]
    missing, count = [number for number, file in zip(numbers, files, strict=True) if not file.exists()], len(files)
    progress(count - len(missing), count)
    for done, _ in enumerate(each(partial(record, folder), missing), count - len(missing) + 1):
        progress(done, count)
    return files


def read_rollouts(files: Iterable[Path]) -> TokenRollouts:
    """Reads and concatenates files; ConfigError if one is damaged."""
    return TokenRollouts(**concatenated([vars(read_recorded(file, TokenRollouts)) for file in files]))


def read_recorded(file: Path, kind: Callable[..., Recorded]) -> Recorded:
    """A file of :func:`record_rollouts`, of whose columns ``kind`` is made; ConfigError if it is damaged."""
    try:
        return kind(**load_file(file))
    except (SafetensorError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({error}); delete it to record it again") from None


def record_tokens(target: str, env: str, seed: int, folder: Path, number: int) -> None:
    """Writes the file of this number: :class:`TokenRollouts` of greedy decoding, of which every action is executed."""
    bundle = _tokens(target)
    policy = bundle.policy()
    episodes, robots, histories = _started(env, bundle.spec.observation, seed, number)
    running, rows = list(range(SHARD)), list[Table]()
    while running:
        windows = [histories[i].push(robots[i].observe()) for i in running]
        prefilled = policy.prefill(windows)
        decoded = prefilled.decode([GREEDY] * len(windows))
        rows.append({
            "row": np.array(running), "step": np.array([robots[i].steps for i in running]),
            "tokens": np.stack([chunk.tokens for chunk in decoded]),
            "features": np.stack([chunk.features for chunk in decoded]), "seen": prefilled.seen.mean(1),
            "state": np.stack([_state(window) for window in windows]),
        })  # fmt: skip
        for i, chunk in zip(running, decoded, strict=True):
            play(robots[i], histories[i], policy.chunk(chunk))
        running = [i for i in running if not robots[i].done]
    table = concatenated(rows)
    owner = table.pop("row")
    success = np.array([robot.success for robot in robots])
    dtypes = {"step": np.int64, "tokens": np.uint8, "features": np.float16, "seen": np.float16, "state": np.float32}
    columns = {name: table[name].astype(kind) for name, kind in dtypes.items()}
    write_whole(
        folder / f"{number:05}.safetensors", save({"episode": episodes[owner], "success": success[owner], **columns})
    )


def _state(window: Window) -> NDArray[np.float32]:
    state = window.arrays.get("state", np.empty((1, 0), np.float32))
    newest: NDArray[np.float32] = state.reshape(-1, state.shape[-1])[-1]
    return newest


def record_stale(
    target: str, env: str, fields: Mapping[str, Field], seed: int, most_delay: int, played_by: str | None,
    folder: Path, number: int,
) -> None:  # fmt: skip
    """Writes the file of this number: rollouts of a chunk policy whose chunks are played late, each action at its time.

    Files of odd numbers are played with the corrections of ``played_by``, if given: in states that it leads to.

    Each episode has a delay from 0 to ``most_delay`` steps, and a number of steps between two requests with which no
    chunk of H actions runs out; before the first chunk has arrived newer ones are played. Of every step, by name:
    numbers of ``episode`` and ``step``, ``chunk``, the answer to its observation ``[N, H, A]``, and these fields.
    All answers of an episode have the same random numbers: two differ by what was observed alone.
    """
    policy, length = _policy(target), _policy(target).spec.chunk
    asks, sees = policy.spec.observation, ObservationSpec(fields)
    episodes, robots, histories = _started(env, sees.union(asks), seed, number)
    rng = stream(seed, Role.DATA, episode=int(episodes[0]))
    delays = rng.integers(most_delay + 1, size=SHARD)
    every = rng.integers(1, length - delays + 1)
    requests: list[list[tuple[int, Chunk, Window]]] = [[] for _ in robots]
    corrector = _corrector(played_by) if played_by and number % 2 else None
    running, rows, step = list(range(SHARD)), list[Table](), 0
    while running:
        windows = [histories[i].push(robots[i].observe()) for i in running]
        rngs = streams(Role.VERIFY, [StepAddress(seed, 0, int(episodes[i]), 0) for i in running])
        chunks = policy.infer_batch([asks.select(window) for window in windows], rngs)
        rows.append({
            "episode": episodes[running], "step": np.full(len(running), step), "chunk": np.stack(chunks),
            **observation_columns(sees, windows),
        })  # fmt: skip
        for i, chunk, window in zip(running, chunks, windows, strict=True):
            if step % every[i] == 0:
                requests[i].append((step, chunk, window))
            while len(requests[i]) > 1 and requests[i][1][0] + delays[i] <= step:
                del requests[i][0]
            arrived = requests[i][0][0] + delays[i] <= step
            sent, played, before = requests[i][0] if arrived else (step, chunk, window)
            action = played[step - sent]
            if corrector is not None and step > sent:
                spec, units = corrector.parts.spec, corrector.units
                seen = [spec.observation.select(observed).arrays for observed in (before, window)]
                base = units.from_environment(played)
                action = units.to_environment(corrected(corrector.parts.network.run, spec, base, step - sent, *seen)[0])
            robots[i].act(action)
        running, step = [i for i in running if not robots[i].done], step + 1
    table = concatenated(rows)
    order = np.lexsort((table["step"], table["episode"]))
    write_whole(folder / f"{number:05}.safetensors", save({name: column[order] for name, column in table.items()}))


def _started(
    env: str, sees: ObservationSpec, seed: int, number: int
) -> tuple[NDArray[np.int64], list[SimulatedRobot], list[ObservationHistory]]:
    """The episodes of a file, their worlds and histories."""
    episodes, robots = np.array(EpisodeRange.RECORDED.episodes(SHARD, SHARD * number)), _worlds(env, sees)
    for robot, episode in zip(robots, episodes.tolist(), strict=True):
        robot.start(episode_seed(seed, episode, robot.task))
    return episodes, robots, [ObservationHistory(sees) for _ in robots]


_tokens = cache(load_tokens)
_corrector = cache(load_pair)


@cache
def _policy(source: str) -> ChunkPolicy:
    return load_policy(source).policy


@cache
def _worlds(env: str, sees: ObservationSpec) -> list[SimulatedRobot]:
    """The worlds of this process, cached across files because some take a second to build."""
    return [SimulatedRobot(load_task(env, sees)) for _ in range(SHARD)]
