"""What a token policy writes where it leads by itself, recorded for drafters that learn from it; goes on after a stop.

Not along the demonstrations: there a policy is more certain than anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from specact.errors import ConfigError
from specact.families.tokens.bundle import TokenBundle, load_tokens
from specact.files import write_whole
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot, play
from specact.lab.rollout.rollout import start_of
from specact.observation import ObservationHistory, Window

# Episodes of a file, which are run together. In a suite of so many tasks, every file has each of them.
SHARD = 10
# Episode numbers nobody evaluates, calibrates, distils or checks on.
_FIRST_EPISODE = 20_000_000
# Greedy decoding draws nothing.
_NOTHING = np.random.default_rng(0)
# Works on the numbers of files, on several processes.
Each = Callable[[Callable[[int], None], Iterable[int]], Iterator[tuple[int, None]]]


@dataclass(frozen=True)
class RolloutOrder:
    """What is to be recorded, in plain values.

    Attributes:
        target: bundle of the token policy that acts, greedily; every action of its chunks is executed.
        env: where.
        seed: of the starts.
        folder: of the files.
    """

    target: str
    env: str
    seed: int
    folder: Path

    def file(self, number: int) -> Path:
        """Of the episodes from ``SHARD * number`` on."""
        return self.folder / f"{number:05}.safetensors"


@dataclass(frozen=True)
class TokenRollouts:
    """One row per inference.

    Attributes:
        episode, step: number of the episode, and of the control step at which it was inferred, int64 ``[N]``.
        tokens: that were written, uint8 ``[N, T]``.
        features: what each of them was read from, float16 ``[N, T, W]``; the target's output layer makes the logits.
        seen: mean of the tokens that the encoder made of the observation, float16 ``[N, W]``.
        state: the newest row of the observation ``state``, float32 ``[N, S]``; S = 0 where there is none.
        success: of the row's episode, in the end, ``[N]``.
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


def record_rollouts(order: RolloutOrder, files: int, each: Each, progress: Callable[[int, int], None]) -> None:
    """Records what is missing of so many files of :data:`SHARD` episodes each.

    Args:
        order: what.
        files: how many there shall be.
        each: runs the work, such as :meth:`Pool.each <specact.lab.rollout.pool.Pool.each>`.
        progress: called with (files there, total).
    """
    missing = [number for number in range(files) if not order.file(number).exists()]
    done = files - len(missing)
    progress(done, files)
    for _ in each(partial(_record, order), missing):
        done += 1
        progress(done, files)


def read_rollouts(files: Iterable[Path]) -> TokenRollouts:
    """What files hold, one after the other.

    Raises:
        ConfigError: if one is damaged.
    """
    parts = []
    for file in files:
        try:
            parts.append(TokenRollouts(**load_file(file)))
        except (SafetensorError, TypeError) as error:
            raise ConfigError(f"{file} is damaged ({error}); delete it to record it again") from None
    return TokenRollouts(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])})


def _record(order: RolloutOrder, number: int) -> None:
    """Writes one file."""
    bundle, robots = _at_hand(order)
    policy = bundle.policy()
    episodes = _FIRST_EPISODE + SHARD * number + np.arange(SHARD)
    histories = [ObservationHistory(bundle.spec.observation) for _ in robots]
    for robot, episode in zip(robots, episodes.tolist(), strict=True):
        robot.start(start_of(order.seed, episode, robot.task))
    running, rows = list(range(SHARD)), list[dict[str, NDArray[np.generic]]]()
    while running:
        windows = [histories[i].push(robots[i].observe()) for i in running]
        found = policy.write(windows, [_NOTHING] * len(windows))
        rows.append({
            "row": np.array(running), "step": np.array([robots[i].steps for i in running]), "tokens": found.tokens,
            "features": np.stack(found.features, 1), "seen": found.seen.mean(1),
            "state": np.stack([_state(window) for window in windows]),
        })  # fmt: skip
        for i, chunk in zip(running, policy.to_environment(found.tokens), strict=True):
            play(robots[i], histories[i], chunk)
        running = [i for i in running if not robots[i].done]
    table = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    who = table.pop("row")
    success = np.array([robot.success for robot in robots])
    kinds = {"step": np.int64, "tokens": np.uint8, "features": np.float16, "seen": np.float16, "state": np.float32}
    columns = {name: table[name].astype(kind) for name, kind in kinds.items()}
    write_whole(order.file(number), save({"episode": episodes[who], "success": success[who], **columns}))


def _state(window: Window) -> NDArray[np.float32]:
    found = window.arrays.get("state", np.empty((1, 0), np.float32))
    newest: NDArray[np.float32] = found.reshape(-1, found.shape[-1])[-1]
    return newest


@cache
def _at_hand(order: RolloutOrder) -> tuple[TokenBundle, list[SimulatedRobot]]:
    """Of this process, kept between files: some worlds take a second to build."""
    bundle = load_tokens(order.target)
    return bundle, [SimulatedRobot(load_task(order.env, bundle.spec.observation)) for _ in range(SHARD)]
