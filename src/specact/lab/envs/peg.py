"""Meta-World's ``peg-insert-side-v3``: a robot arm picks up a peg and pushes it sideways into a hole (Yu et al. 2019).

Peg and box stand somewhere else in every episode. MT1 draws 50 such starts and keeps them; here every episode's seed
draws its own, uniformly from the same range, so that nothing can be learnt by heart.
"""

from __future__ import annotations

import pickle
from typing import Any, ClassVar, cast

import gymnasium as gym
import numpy as np
from metaworld.envs import SawyerPegInsertionSideEnvV3
from metaworld.policies import SawyerPegInsertionSideV3Policy
from metaworld.types import Task as Variant
from numpy.typing import ArrayLike, NDArray

from specact.errors import DataError
from specact.lab.data.episodes import Episodes
from specact.lab.envs.drawing import rendered
from specact.lab.envs.metaworld import hold, scripted
from specact.lab.envs.task import Task

MAX_STEPS = 500
RATE_HZ = 80.0
RAW_WIDTH = 39  # the present observation (18), the one before (18), the goal (3)
WIDTH = 7
GOAL = 3
ACTIONS = 4
BOUND = 10.0  # [m] far outside anything reachable; finite, so that the spaces can be checked and sampled
# Where the peg and the box can stand, x, y, z of each [m]: what Meta-World itself draws from.
START_LOW = np.array([0.0, 0.5, 0.02, -0.35, 0.4, -0.001])
START_HIGH = np.array([0.2, 0.7, 0.02, -0.25, 0.7, 0.001])


def observe(raw: ArrayLike) -> NDArray[np.float32]:
    """The observation ``state``: hand (3, m), opening of the gripper (0..1), peg (3, m); float32 ``[..., 7]``.

    From the simulator's ``[..., 39]``. Left out are the peg's orientation, which is constant (it is too inert to turn),
    and the previous observation: with it a policy copies its own last motion.
    """
    return np.asarray(np.clip(np.asarray(raw)[..., :WIDTH], -BOUND, BOUND), dtype=np.float32)


def hole(raw: ArrayLike) -> NDArray[np.float32]:
    """The observation ``goal``: where the peg's head has to go [m], float32 ``[..., 3]``."""
    return np.asarray(np.asarray(raw)[..., -GOAL:], dtype=np.float32)


def features(episodes: Episodes) -> Episodes:
    """Demonstrations in the environment's terms; those of the scripted expert are in them already.

    Args:
        episodes: ``state`` ``[N, 39]`` the simulator's observation with a visible goal, ``action`` ``[N, 4]``; or
            ``state`` ``[N, 7]`` and ``goal`` ``[N, 3]`` as the environment gives them.

    Raises:
        DataError: if the widths are others, or the goal is hidden.
    """
    state, actions = episodes.numbers("state"), episodes.action.shape[1]
    width = state.shape[1]
    goal = episodes.numbers("goal").shape[1] if "goal" in episodes.observation else None
    if actions != ACTIONS or (width, goal) not in ((RAW_WIDTH, None), (WIDTH, GOAL)):
        raise DataError(
            f"peg demonstrations have action width {ACTIONS} and state width {RAW_WIDTH} (Meta-World's observation; no "
            f"goal beside it), got {actions} and {width}; pass the environment's own observation"
        )
    action = np.clip(episodes.action, -1.0, 1.0).astype(np.float32)
    if width == WIDTH:
        return episodes.with_numbers(action, state=state, goal=episodes.numbers("goal"))
    if not state[:, -GOAL:].any(axis=1).all():
        raise DataError(
            "the goal in these peg demonstrations, the last three numbers of an observation, is hidden (zero); record "
            "them with a visible goal, as in Meta-World's MT1"
        )
    return episodes.with_numbers(action, state=observe(state), goal=hole(state))


class PegInsertSide(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """Meta-World's peg-insert-side-v3 with a visible goal.

    Observation: ``state`` float32 ``[7]``, see :func:`observe`, and ``goal`` float32 ``[3]``, see :func:`hole`; it is
    constant over an episode. **The goal is given**, as in MT1: a robot would have to find the hole.
    Action: float32 ``[4]`` in [-1, 1], the gripper's displacement in cm, and its effort (positive closes).
    Reward: 1 on the step that succeeds, else 0. ``info``: ``success`` whether the peg's head came within 0.07 of the
    hole, in Meta-World's own measure (y and z count twice, so 7 cm along the hole and 3.5 cm across); ``score`` the
    largest share so far of its way from the start to the hole in the same measure, 0..1. Terminates on success;
    truncated after 500 steps (6.25 s).
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": int(RATE_HZ)}  # type: ignore[misc]

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Dict(
            {
                "state": gym.spaces.Box(-BOUND, BOUND, (WIDTH,), np.float32),
                "goal": gym.spaces.Box(-BOUND, BOUND, (GOAL,), np.float32),
            }
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)
        simulator: Any = SawyerPegInsertionSideEnvV3  # only half of it has type hints
        self._sim = simulator(render_mode=render_mode, camera_name="corner2")
        self._steps, self._score, self._success, self._start = 0, 0.0, False, 1.0
        self.raw: NDArray[np.float64] = np.zeros(RAW_WIDTH)
        """The simulator's observation ``[39]``, as recorded in demonstrations."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
        """Peg and box at random, or where ``options={"start": [x, y, z, x, y, z]}`` [m] says; the arm starts alike."""
        super().reset(seed=seed)
        start = self.np_random.uniform(START_LOW, START_HIGH)
        start = np.asarray((options or {}).get("start", start), dtype=np.float64)
        # Meta-World's own way in. Its reset ignores seeds: what varies is all in these six numbers.
        variant = {"env_cls": type(self._sim), "rand_vec": start, "partially_observable": False}
        self._sim.set_task(Variant("peg-insert-side-v3", pickle.dumps(variant)))
        self.raw, _ = self._sim.reset()
        self._steps, self._score, self._success = 0, 0.0, False
        self._start = self._distance()
        return self._observation(), self._info()

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[dict[str, NDArray[np.float32]], float, bool, bool, dict[str, Any]]:
        """Act for 12.5 ms."""
        self.raw, _, _, _, info = self._sim.step(np.clip(action, -1.0, 1.0))
        self._steps += 1
        self._success = self._success or bool(info["success"])
        self._score = max(self._score, 1.0 - self._distance() / self._start)
        reward = float(info["success"])
        return self._observation(), reward, self._success, self._steps >= MAX_STEPS, self._info()

    def render(self) -> NDArray[np.uint8] | None:
        """The scene, uint8 ``[480, 480, 3]``; None without a render mode.

        Raises:
            RenderError: if this machine cannot draw.
        """
        return None if self.render_mode is None else rendered(self._sim)

    def close(self) -> None:
        self._sim.close()

    def _distance(self) -> float:
        """From the peg's head to the hole as Meta-World measures it: y and z count twice."""
        away = self._sim.data.site("pegHead").xpos - self._sim.data.site("goal").xpos
        return float(np.linalg.norm(away * [1.0, 2.0, 2.0]))

    def _observation(self) -> dict[str, NDArray[np.float32]]:
        return {"state": observe(self.raw), "goal": hole(self.raw)}

    def _info(self) -> dict[str, Any]:
        return {"score": self._score, "success": self._success}


class PegExpert:
    """Meta-World's own scripted policy: over the peg, down, grasp, up before the hole, in. It has no mode to choose."""

    def __init__(self, seed: int) -> None:
        self._policy = SawyerPegInsertionSideV3Policy()

    def reset(self, env: gym.Env[Any, Any]) -> None:
        """Nothing to forget: what it does depends on the present observation only."""

    def act(self, env: gym.Env[Any, Any]) -> NDArray[np.float32]:
        """The action for the environment's present state, float32 ``[4]`` in [-1, 1]."""
        return scripted(self._policy, cast(PegInsertSide, env.unwrapped).raw)


TASK = Task(
    name="peg",
    make=PegInsertSide,
    rate_hz=RATE_HZ,
    max_steps=MAX_STEPS,
    score="largest share of the peg's way to the hole so far, 0 to 1; success within 7 cm along and 3.5 cm across",
    features=features,
    expert=PegExpert,
    hold=hold,
    still=("hold",),
)
