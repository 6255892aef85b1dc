"""The evaluation harness vla-eval: pairs of policies as its model servers, environments as its benchmarks.

An episode of the harness equals one of ``specact eval``: the same initial state, random streams and actions. The
benchmark's tasks contain the episode's number, from which the server derives the address of its random streams.

``python -m specact.lab.vla_eval --args.bundle ball`` serves a pair; docs/how-to/vla-eval.md has the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.model_servers.base import SessionContext
from vla_eval.model_servers.predict import PredictModelServer
from vla_eval.model_servers.serve import run_server

from specact.errors import ConfigError, ObservationError, SpecactError
from specact.gates.calibration import calibrated_gate
from specact.gates.gate import Gate
from specact.gates.settings import load_gate
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.evaluation.calibrate import gate_of_method
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.rollout import episode_seed
from specact.load import load_pair
from specact.observation import Field
from specact.policy import SpeculativePolicy

_CAMERA = "image."


class PairServer(PredictModelServer):  # type: ignore[misc] # the package has no type hints
    """A method of a pair as a model server: each observation is answered with one action.

    Every episode has its own policy, so that episodes and sessions share no state. Besides ``actions`` ``[A]`` an
    answer has ``inferred`` and ``transmitted``, each 0 or 1.

    ``bundle``, ``draft``, ``target`` and ``decoding`` are as of :func:`~specact.load.load_pair`; ``method`` as of
    :func:`~specact.lab.rollout.methods.load_method`, with a gate for the transmission ``rate``, of which the bundle
    needs a calibration where it has a threshold; ``seed`` counts where the benchmark's tasks do not say one. What is
    wrong with them is a :exc:`ConfigError` or :exc:`BundleError`.
    """

    def __init__(
        self, bundle: str, method: str = "adahi", rate: float = 0.6, seed: int = 0, draft: str | None = None,
        target: str | None = None, decoding: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        pair = load_pair(bundle, draft=draft, target=target, decoding=decoding)
        self._family, self._rate, self._seed = rollout_of(pair, load_method(method)), rate, seed
        self._policies: dict[str, SpeculativePolicy] = {}
        self._gate()  # what is wrong with it is said before anybody connects

    def get_observation_params(self) -> dict[str, Any]:
        fields = self._family.pair.observation.fields
        cameras = {name: list(field.shape[:2]) for name, field in fields.items() if field.is_image}
        return {"cameras": cameras} if cameras else {}

    async def on_episode_start(self, config: dict[str, Any], ctx: SessionContext) -> None:
        task = config.get("task", {})
        self._policies[ctx.episode_id] = policy = self._family.policy(self._gate(), task.get("seed", self._seed))
        policy.reset(episode_of(task))

    # Also called when the connection is lost.
    async def on_episode_end(self, result: dict[str, Any], ctx: SessionContext) -> None:
        self._policies.pop(ctx.episode_id, None)

    def predict(self, obs: dict[str, Any], ctx: SessionContext) -> dict[str, Any]:
        policy = self._policies.get(ctx.episode_id)
        if policy is None:
            raise ObservationError("no episode is under way on this connection; send episode_start first")
        before = policy.counts.copy()
        action = policy.act(from_harness(obs))
        spent = policy.counts - before
        return {"actions": action, "inferred": spent["steps"], "transmitted": spent["transmitted"]}

    def _gate(self) -> Gate:
        """A gate for one episode, with the threshold that ``specact eval`` gives it."""
        method, pair, rate = self._family.method, self._family.pair, self._rate
        if load_gate(method.gate).calibrated:
            return calibrated_gate(pair, method.gate, rate)
        return gate_of_method(method, pair, rate, lambda settings: settings).build(pair)


class TaskBenchmark(StepBenchmark):  # type: ignore[misc]
    """An environment as a benchmark; each task of a suite is one of its tasks.

    For ``env`` see :func:`~specact.lab.envs.load_task`; ``seed`` is of the starts, and of a :class:`PairServer`'s
    random streams; ``cameras`` are height and width of the frames by the camera's name, which such a server says
    itself. An unknown environment or camera is a :exc:`ConfigError`, as is an action that is none of the environment.
    """

    def __init__(self, env: str, seed: int = 0, cameras: Mapping[str, tuple[int, int]] | None = None) -> None:
        super().__init__()
        task = load_task(env)
        for name in cameras or {}:
            if name not in task.cameras:
                raise ConfigError(
                    f"{env} has no camera {name!r}, it has {', '.join(task.cameras) or 'none'}; choose a pair that was "
                    "made for this environment"
                )
        fields = {name: Field((*size, 3), "uint8") for name, size in (cameras or {}).items()}
        self._env_name, self._seed, self._world = env, seed, SimulatedRobot(task.seeing(fields))
        self._inferred = self._transmitted = 0

    def get_tasks(self) -> list[dict[str, Any]]:
        names = self._world.task.tasks or (self._env_name,)
        return [
            {"name": name, "suite": self._env_name, "seed": self._seed, "number": number, "tasks": len(names)}
            for number, name in enumerate(names)
        ]

    def get_metadata(self) -> dict[str, Any]:
        return {"max_steps": self._world.task.max_steps}

    def get_metric_keys(self) -> dict[str, str]:
        return dict.fromkeys(("success", "score", "sent"), "mean")

    def reset(self, task: dict[str, Any]) -> Any:
        self._inferred = self._transmitted = 0
        self._world.start(episode_seed(self._seed, episode_of(task), self._world.task))
        return self._world.observe()

    def step(self, action: dict[str, Any]) -> StepResult:
        executed, shape = np.asarray(action["actions"], np.float32), self._world.env.action_space.shape
        if executed.shape != shape or not np.isfinite(executed).all():
            raise ConfigError(
                f"{self._env_name} takes one finite action of the shape {shape} per step, got {executed!r:.80}; choose "
                "a model server that was made for this environment, or its chunk_size"
            )
        self._inferred += action.get("inferred", 0)
        self._transmitted += action.get("transmitted", 0)
        self._world.act(executed)
        return StepResult(obs=self._world.observe(), reward=0.0, done=self._world.done, info={})

    def make_obs(self, raw_obs: Any, task: dict[str, Any]) -> dict[str, Any]:
        return to_harness(raw_obs)

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        rate = {"sent": self._transmitted / self._inferred} if self._inferred else {}
        return self._world.outcome | rate

    def get_hold_action(self, last_action: dict[str, Any] | None) -> dict[str, Any]:
        if (hold := self._world.task.hold) is None:  # the harness then refuses live mode
            raise NotImplementedError(f"{self._env_name} does not say how its robot stays as it is: Task(hold=...)")
        last = np.zeros(self._world.env.action_space.shape or (), np.float32)
        return {"actions": hold(last if last_action is None else np.asarray(last_action["actions"], np.float32))}

    def cleanup(self) -> None:
        self._world.close()


def episode_of(task: Mapping[str, Any]) -> int:
    """The number of an episode in ``specact eval``, which cycles through the tasks of a suite; else the harness's."""
    return int(task.get("episode_idx", 0)) * int(task.get("tasks", 1)) + int(task.get("number", 0))


def to_harness(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Converts to the harness's conventions: cameras under ``images``, the instruction as ``task_description``."""
    sent = {name: value for name, value in observation.items() if not name.startswith(_CAMERA)}
    if "instruction" in sent:
        sent["task_description"] = sent.pop("instruction")
    images = {name[len(_CAMERA) :]: frame for name, frame in observation.items() if name.startswith(_CAMERA)}
    return sent | ({"images": images} if images else {})


def from_harness(sent: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`to_harness`."""
    observation = {name: value for name, value in sent.items() if name != "images"}
    if "task_description" in observation:
        observation["instruction"] = observation.pop("task_description")
    return observation | {_CAMERA + name: frame for name, frame in sent.get("images", {}).items()}


if __name__ == "__main__":
    # Loopback: the harness's default is all network interfaces.
    sys.argv[1:1] = ["--host", "127.0.0.1"]
    try:
        run_server(PairServer)
    except SpecactError as error:
        sys.exit(f"error: {error}")
