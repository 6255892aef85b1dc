"""A figure of rollouts: the same episodes under several methods, with transmitted steps marked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.gates import Always, Never
from specact.gates.calibration import calibrated_gate
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.rollout import episode_seed
from specact.pair import Pair
from specact.policy import SpeculativePolicy

# The moving point that is drawn of each environment.
POINTS: dict[str, Callable[[Any], NDArray[np.float64]]] = {
    "ball": lambda env: env.unwrapped.position,
    "pusht": lambda env: env.unwrapped.raw[:2],
}
# Number of episodes in a figure in which the draft alone fails, and in which it succeeds.
FAILED, SUCCEEDED = 3, 2


@dataclass(frozen=True)
class TracedEpisode:
    """An episode as a path.

    Attributes:
        points: positions of the moving point, ``[steps + 1, 2]``.
        transmitted: whether the inference behind each step went to the target, bool ``[steps]``.
        success: whether the episode succeeded.
        scene: the environment after the episode, for its static objects.
    """

    points: NDArray[np.float64]
    transmitted: NDArray[np.bool_]
    success: bool
    scene: Any


def draw_comparison(pair: Pair[Any], summary: Mapping[str, Any], seed: int, path: Path) -> str | None:
    """Draws draft, ADAHI and hybrid on episodes of an evaluation; what is shown, or None where it cannot be drawn.

    Args:
        pair: that was evaluated.
        summary: of the evaluation, see :func:`~specact.lab.evaluation.run.evaluate`.
        seed: of the evaluation.
        path: of the picture.
    """
    env = summary["env"]
    try:
        gates = {"draft": Never(), "ADAHI": calibrated_gate(pair, "deviation", summary["rate"]), "hybrid": Always()}
    except ConfigError:
        return None
    if env not in POINTS:
        return None

    @cache
    def traced(name: str, episode: int) -> TracedEpisode:
        return trace(SpeculativePolicy(pair, gates[name], seed=seed), env, episode, seed)

    shown = choose(lambda episode: traced("draft", episode).success, summary["episodes"])
    rows = {name: [traced(name, episode) for episode in shown] for name in gates}
    failing, alone = sum(not episode.success for episode in rows["draft"]), summary["methods"]["draft"]["success"]
    title = (
        f"The first {failing} episodes in which the draft alone fails, and the first {len(shown) - failing} in which "
        f"it succeeds (of all {alone['n']} it fails in {alone['n'] - alone['k']})"
    )
    draw_paths(rows, env, title, path)
    return f"{title}."


def trace(policy: SpeculativePolicy, env: str, episode: int, seed: int) -> TracedEpisode:
    """Runs one episode as a robot would: observe, act, step; of an environment in :data:`POINTS`."""
    robot = SimulatedRobot(load_task(env))
    robot.start(episode_seed(seed, episode, robot.task))
    policy.reset(episode)
    points, transmitted = [POINTS[env](robot.env).copy()], []
    while not robot.done:
        robot.act(policy.act(robot.observe()))
        points.append(POINTS[env](robot.env).copy())
        transmitted.append(policy.record is not None and policy.record.decision.transmit)
    return TracedEpisode(np.array(points), np.array(transmitted), robot.success, robot.env)


def choose(succeeds: Callable[[int], bool], episodes: int) -> list[int]:
    """The first episodes in which the draft fails, and the first in which it succeeds, see :data:`FAILED`.

    Too few of one kind are made up for with more of the other.

    Args:
        succeeds: whether the draft alone succeeds in an episode; called for as few as needed.
        episodes: their number.
    """
    failed, succeeded = list[int](), list[int]()
    for episode in range(episodes):
        (succeeded if succeeds(episode) else failed).append(episode)
        if len(failed) >= FAILED and len(succeeded) >= SUCCEEDED:
            break
    count = max(FAILED, FAILED + SUCCEEDED - len(succeeded))
    failed = failed[:count]
    return [*failed, *succeeded[: FAILED + SUCCEEDED - len(failed)]]


def draw_paths(rows: Mapping[str, Sequence[TracedEpisode]], env: str, title: str, path: Path) -> None:
    """Writes a figure with one row per method and one column per episode (the same initial state in every row)."""
    mpl.use("Agg")
    count = max(len(episodes) for episodes in rows.values())
    figure = Figure(figsize=(2.6 * count, 2.8 * len(rows)), layout="constrained")
    for line, (method, episodes) in zip(figure.subplots(len(rows), count, squeeze=False), rows.items(), strict=True):
        for axis, episode in zip(line, episodes, strict=True):
            _draw(axis, episode, env)
            ending = "success" if episode.success else "failure"
            axis.set_title(f"{method}: {ending}, {episode.transmitted.mean():.0%} sent", fontsize=9)
    figure.suptitle(f"{title}; red: sent to the target, blue: the draft's own, dot: start", fontsize=10)
    figure.savefig(path, dpi=110)


def _draw(axis: Axes, episode: TracedEpisode, env: str) -> None:
    if env == "ball":
        from specact.lab.envs import ball

        half = ball.HALF_SIZE
        axis.add_patch(Rectangle((-half, -half), 2 * half, 2 * half, facecolor="#eef1f4", edgecolor="#9aa5b1"))
        axis.add_patch(Circle((0, 0), ball.PILLAR_RADIUS, color="#5c6773"))
        axis.add_patch(Circle(tuple(episode.scene.unwrapped.goal), ball.GOAL_RADIUS, color="#2a9d5c"))
        axis.set(xlim=(-1.08 * half, 1.08 * half), ylim=(-1.08 * half, 1.08 * half))
    else:
        axis.set(xlim=(0, 512), ylim=(512, 0), facecolor="#eef1f4")
    segments = list(np.stack([episode.points[:-1], episode.points[1:]], axis=1))
    colours = np.where(episode.transmitted, "#d1495b", "#30638e")
    axis.add_collection(LineCollection(segments, colors=list(colours), linewidths=1.6))
    axis.plot(*episode.points[0], "o", color="black", markersize=4)
    axis.set(aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
