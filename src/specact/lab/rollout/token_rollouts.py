"""Records a token policy's own rollouts as training data of drafters; resumable.

Not its outputs on the demonstrations, where a policy is more certain than anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from specact.errors import ConfigError
from specact.families.tokens.policy import TokenBundle, load_tokens
from specact.files import write_whole
from specact.lab.data.generate import Each
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot, play
from specact.lab.rollout.rollout import EpisodeRange, episode_seed
from specact.lab.rollout.steps import SHARD
from specact.observation import ObservationHistory, Window


@dataclass(frozen=True)
class RolloutRequest:
    """The settings of a recording, as plain values.

    Attributes:
        target: bundle of the token policy, which decodes greedily; every action of its chunks is executed.
        env: environment.
        seed: of the initial states.
        folder: of the files.
    """

    target: str
    env: str
    seed: int
    folder: Path

    def file(self, number: int) -> Path:
        """The file of the episodes from ``SHARD * number`` on."""
        return self.folder / f"{number:05}.safetensors"


@dataclass(frozen=True)
class TokenRollouts:
    """Recorded inferences, one per row.

    Attributes:
        episode, step: numbers of the episode and of the control step, int64 ``[N]``.
        tokens: the decoded ones, uint8 ``[N, T]``.
        features: inputs of the output layer for each token, float16 ``[N, T, W]``.
        seen: mean of the encoder's tokens of the observation, float16 ``[N, W]``.
        state: the newest row of the observation ``state``, float32 ``[N, S]``; S = 0 without one.
        success: of the row's episode, ``[N]``.
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


def record_rollouts(request: RolloutRequest, files: int, each: Each, progress: Callable[[int, int], None]) -> None:
    """Records the missing files, of :data:`SHARD` episodes each.

    Args:
        request: the settings.
        files: their total number.
        each: runs the work, such as :meth:`Pool.each <specact.lab.rollout.pool.Pool.each>`.
        progress: called with (files done, total).
    """
    missing = [number for number in range(files) if not request.file(number).exists()]
    done = files - len(missing)
    progress(done, files)
    for _ in each(partial(_record, request), missing):
        done += 1
        progress(done, files)


def read_rollouts(files: Iterable[Path]) -> TokenRollouts:
    """Reads and concatenates files.

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


def _record(request: RolloutRequest, number: int) -> None:
    """Writes one file."""
    bundle, robots = _loaded(request)
    policy = bundle.policy()
    episodes = np.array(EpisodeRange.RECORDED.episodes(SHARD, SHARD * number))
    histories = [ObservationHistory(bundle.spec.observation) for _ in robots]
    for robot, episode in zip(robots, episodes.tolist(), strict=True):
        robot.start(episode_seed(request.seed, episode, robot.task))
    running, rows = list(range(SHARD)), list[dict[str, NDArray[np.generic]]]()
    while running:
        windows = [histories[i].push(robots[i].observe()) for i in running]
        output = policy.decode(windows)
        rows.append({
            "row": np.array(running), "step": np.array([robots[i].steps for i in running]), "tokens": output.tokens,
            "features": np.stack(output.features, 1), "seen": output.seen.mean(1),
            "state": np.stack([_state(window) for window in windows]),
        })  # fmt: skip
        for i, chunk in zip(running, policy.to_environment(output.tokens), strict=True):
            play(robots[i], histories[i], chunk)
        running = [i for i in running if not robots[i].done]
    table = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    owner = table.pop("row")
    success = np.array([robot.success for robot in robots])
    dtypes = {"step": np.int64, "tokens": np.uint8, "features": np.float16, "seen": np.float16, "state": np.float32}
    columns = {name: table[name].astype(kind) for name, kind in dtypes.items()}
    write_whole(request.file(number), save({"episode": episodes[owner], "success": success[owner], **columns}))


def _state(window: Window) -> NDArray[np.float32]:
    state = window.arrays.get("state", np.empty((1, 0), np.float32))
    newest: NDArray[np.float32] = state.reshape(-1, state.shape[-1])[-1]
    return newest


@cache
def _loaded(request: RolloutRequest) -> tuple[TokenBundle, list[SimulatedRobot]]:
    """The policy and worlds of this process, cached across files because some worlds take a second to build."""
    bundle = load_tokens(request.target)
    return bundle, [SimulatedRobot(load_task(request.env, bundle.spec.observation)) for _ in range(SHARD)]
