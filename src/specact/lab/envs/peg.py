"""Meta-World's ``peg-insert-side-v3``: a robot arm picks up a peg and pushes it sideways into a hole (Yu et al. 2019).

The positions of peg and box are random in every episode. MT1 draws 50 positions once and reuses them; here each seed
draws its own, uniformly from the same range, so that a policy cannot memorise them.
"""

from __future__ import annotations

import pickle
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from metaworld.envs import SawyerPegInsertionSideEnvV3
from metaworld.types import Task as Variant
from numpy.typing import ArrayLike, NDArray

from specact.errors import DataError
from specact.lab.data.episodes import Episodes
from specact.lab.envs.cameras import rendered
from specact.lab.envs.metaworld import Expert, hold
from specact.lab.envs.task import Begun, Stepped, Task, TickingEnv

MAX_STEPS = 500
RATE_HZ = 80.0
RAW_WIDTH = 39  # current observation (18), previous observation (18), goal (3)
WIDTH = 7
GOAL = 3
ACTIONS = 4
REACHED = 0.07  # largest distance of a success
BOUND = 10.0  # [m], far outside anything reachable; finite, so that the spaces can be checked and sampled
# Range of the positions of peg and box, x, y, z of each [m], as in Meta-World.
START_LOW = np.array([0.0, 0.5, 0.02, -0.35, 0.4, -0.001])
START_HIGH = np.array([0.2, 0.7, 0.02, -0.25, 0.7, 0.001])


def observe(raw: ArrayLike) -> NDArray[np.float32]:
    """The observation ``state``: hand (3, m), opening of the gripper (0..1), peg (3, m); float32 ``[..., 7]``.

    From the simulator's ``[..., 39]``. The peg's orientation is left out, because it is constant (its inertia is too
    large to turn), and so is the previous observation, because a policy that observes it learns to repeat its last
    motion.
    """
    return np.asarray(np.clip(np.asarray(raw)[..., :WIDTH], -BOUND, BOUND), dtype=np.float32)


def hole(raw: ArrayLike) -> NDArray[np.float32]:
    """The observation ``goal``: target position of the peg's head [m], float32 ``[..., 3]``, from ``[..., 39]``."""
    return np.asarray(np.asarray(raw)[..., -GOAL:], dtype=np.float32)


def features(episodes: Episodes) -> Episodes:
    """Converts demonstrations to the environment's observations and actions; clips actions to [-1, 1].

    Args:
        episodes: ``action`` ``[N, 4]`` with either ``state`` ``[N, 39]``, the simulator's observation with a visible
            goal, or ``state`` ``[N, 7]`` and ``goal`` ``[N, 3]``, the environment's.

    Raises:
        DataError: for other widths, or a hidden goal.
    """
    state, actions = episodes.numbers("state"), episodes.action.shape[1]
    width = state.shape[1]
    goal = episodes.numbers("goal").shape[1] if "goal" in episodes.observation else None
    if actions != ACTIONS or (width, goal) not in ((RAW_WIDTH, None), (WIDTH, GOAL)):
        raise DataError(
            f"peg demonstrations have action width {ACTIONS} and either state width {RAW_WIDTH} (Meta-World's "
            f"observation) without goal, or state width {WIDTH} and goal width {GOAL}; got action width {actions}, "
            f"state width {width} and {'no goal' if goal is None else f'goal width {goal}'}"
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


class _Simulator(SawyerPegInsertionSideEnvV3):  # type: ignore[misc, unused-ignore]
    """Meta-World's environment without its reward and the peg's orientation, which take as long as the physics."""

    def distance(self) -> float:
        """Distance from the peg's head to the hole as in Meta-World, y and z with weight 2."""
        away = self._get_site_pos("pegHead") - np.asarray(self._target_pos)
        return float(np.linalg.norm(away * np.array([1.0, 2.0, 2.0])))

    def evaluate_state(self, obs: NDArray[Any], action: NDArray[Any]) -> tuple[float, dict[str, Any]]:
        return 0.0, {"success": float(self.distance() <= REACHED)}

    def _get_quat_objects(self) -> NDArray[Any]:
        return np.zeros(4)


class PegInsertSide(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """Meta-World's peg-insert-side-v3 with a visible goal; ``raw`` ``[39]`` is the simulator's observation.

    Observation: ``state`` float32 ``[7]``, see :func:`observe`, and ``goal`` float32 ``[3]``, see :func:`hole`; it is
    constant over an episode. **The goal is given**, as in MT1; a real robot would have to perceive the hole. Action:
    float32 ``[4]`` in [-1, 1], the gripper's displacement in units of 1 cm (3), and its effort (positive closes), held
    for 12.5 ms. Reward: 1 on the step that succeeds, else 0. ``info``: ``success`` whether the peg's head came within
    0.07 of the hole in Meta-World's distance (7 cm along the hole and 3.5 cm across); ``score`` the largest share so
    far of the initial distance that it has covered. Terminates on success; truncated after 500 steps (6.25 s).
    """

    metadata: ClassVar[dict[str, Any]] = TickingEnv.metadata  # type: ignore[misc]
    task = "peg-insert-side-v3"

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Dict(
            {
                "state": gym.spaces.Box(-BOUND, BOUND, (WIDTH,), np.float32),
                "goal": gym.spaces.Box(-BOUND, BOUND, (GOAL,), np.float32),
            }
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)
        simulator: Any = _Simulator  # has incomplete type hints
        self._sim = simulator(render_mode=render_mode, camera_name="corner2")
        self._steps, self._score, self._success, self._start = 0, 0.0, False, 1.0
        self.raw: NDArray[np.float64] = np.zeros(RAW_WIDTH)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Begun:
        """Starts with random positions of peg and box, or with ``options={"start": [x, y, z, x, y, z]}`` [m].

        The arm always starts in the same pose.
        """
        super().reset(seed=seed)
        start = self.np_random.uniform(START_LOW, START_HIGH)
        start = np.asarray((options or {}).get("start", start), dtype=np.float64)
        # Meta-World's reset ignores seeds; these six numbers define the episode.
        variant = {"env_cls": type(self._sim), "rand_vec": start, "partially_observable": False}
        self._sim.set_task(Variant(self.task, pickle.dumps(variant)))
        self.raw, _ = self._sim.reset()
        self._steps, self._score, self._success = 0, 0.0, False
        self._start = self._sim.distance()
        return self._observation(), self._info()

    def step(self, action: NDArray[np.float32]) -> Stepped:
        self.raw, _, _, _, info = self._sim.step(np.clip(action, -1.0, 1.0))
        self._steps += 1
        self._success = self._success or bool(info["success"])
        self._score = max(self._score, 1.0 - self._sim.distance() / self._start)
        reward = float(info["success"])
        return self._observation(), reward, self._success, self._steps >= MAX_STEPS, self._info()

    def render(self) -> NDArray[np.uint8] | None:
        return None if self.render_mode is None else rendered(self._sim)

    def close(self) -> None:
        self._sim.close()

    def _observation(self) -> dict[str, NDArray[np.float32]]:
        return {"state": observe(self.raw), "goal": hole(self.raw)}

    def _info(self) -> dict[str, Any]:
        return {"score": self._score, "success": self._success}


TASK = Task(
    name="peg",
    make=PegInsertSide,
    rate_hz=RATE_HZ,
    max_steps=MAX_STEPS,
    score="largest share of the peg's way to the hole so far, 0 to 1; success within 7 cm along and 3.5 cm across",
    features=features,
    expert=Expert,
    hold=hold,
    still=("hold",),
)
