"""What several studies measure and draw alike: times on equal observations, paired contrasts, success over a cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from specact.gates import Always
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.evaluation.run import read_table
from specact.lab.report.figures import INK, RULE
from specact.lab.rollout.rollout import episode_seed
from specact.lab.rollout.statistics import contrast, holm, mean_interval
from specact.pair import Pair
from specact.policy import SpeculativePolicy
from specact.types import StepRecord

T = TypeVar("T")
Item = TypeVar("Item")
# A label, a marker, and the names of methods.
Group = tuple[str, str, Sequence[str]]


def seconds_of(work: Callable[[], object], passes: int = 1) -> float:
    """Seconds of the fastest of some passes: other load on the machine only adds to them."""
    seconds = []
    for _ in range(passes):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def interleaved(
    kinds: Mapping[str, Callable[[Item], object]], items: Iterable[Item], order: np.random.Generator, passes: int = 1
) -> dict[str, list[float]]:
    """Seconds of each kind of work on each item, in random order: what else the machine does falls on all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for item in items:
        for name in order.permutation(list(kinds)).tolist():
            seconds[name].append(seconds_of(partial(kinds[name], item), passes))
    return seconds


def slowed(work: Callable[..., T], seconds: Callable[..., float]) -> Callable[..., T]:
    """Emulates a slower device: the same function, which returns no sooner than so many seconds after the call."""

    def slow(*arguments: Any) -> T:
        until = time.monotonic() + seconds(*arguments)
        answer = work(*arguments)
        time.sleep(max(0.0, until - time.monotonic()))
        return answer

    return slow


def target_path(
    pair: Pair[Any],
    env: str,
    episodes: Iterable[int],
    seed: int,
    on_action: Callable[[NDArray[np.float32]], None] = lambda action: None,
) -> Iterator[StepRecord]:
    """The inferences of a pair's own rollouts with everything verified, each before the first of its actions runs.

    The pair is decoded as the target should act; ``on_action`` is called with every action, in the environment's units.
    """
    policy, robot = SpeculativePolicy(pair, Always(), seed=seed), SimulatedRobot(load_task(env, pair.observation))
    for number in episodes:
        policy.reset(number)
        robot.start(episode_seed(seed, number, robot.task))
        while not robot.done:
            inferring = policy.wants_inference
            policy.ask(policy.observe(robot.observe()) if policy.wants_observation else None)
            action = policy.finish()
            if inferring and policy.record is not None:
                yield policy.record
            robot.act(action)
            on_action(action)
    robot.close()


def relative_costs(seconds: Mapping[str, Sequence[float]], baseline: Sequence[float]) -> dict[str, dict[str, float]]:
    """The cost of each kind of work, beside that of a baseline on the same observations in the same order.

    Returns:
        By name ``ms``, the median, and ``relative``, the geometric mean of the ratio to the baseline, with its interval
        from ``relative_low`` to ``relative_high``.
    """
    costs = {}
    for name, spent in seconds.items():
        # Of logarithms, because one outlier would dominate the mean of ratios.
        ratio = mean_interval(np.log(spent) - np.log(baseline))
        low, mean, high = (math.exp(value) for value in (ratio.low, ratio.mean, ratio.high))
        costs[name] = {
            "ms": 1e3 * float(np.median(spent)), "relative": mean, "relative_low": low, "relative_high": high,
        }  # fmt: skip
    return costs


def outcomes(folder: Path, method: str, column: str = "success") -> np.ndarray:
    """An end point of every episode of a method in the folder of an evaluation, in order."""
    table = read_table(folder / "episodes" / method)
    return np.asarray(table[column][np.argsort(table["episode"])], np.float64)


def paired(values: Mapping[Any, np.ndarray], pairs: Sequence[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Paired contrasts ``first``, ``second``, ``difference``, ``p``, ``test``, and ``p_holm`` over all of them.

    Args:
        values: an end point of each episode, the same episodes for all, by name.
        pairs: names to compare.
    """
    tests = [contrast(values[first].astype(float), values[second].astype(float)) for first, second in pairs]
    corrected = holm([test.p for test in tests])
    return [
        {"first": first, "second": second, "p_holm": p, **asdict(test)}
        for (first, second), test, p in zip(pairs, tests, corrected, strict=True)
    ]


def draw_success(summary: Mapping[str, Any], x: Mapping[str, float], groups: Sequence[Group], label: str) -> Figure:
    """Success of methods over a cost, with 95 % intervals.

    Args:
        summary: of their run.
        x: cost by method; methods without one are left out.
        groups: of methods, in a colour each.
        label: of the cost.
    """
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes, points = figure.subplots(), list[tuple[float, float, str]]()
    for number, (name, marker, methods) in enumerate(groups):
        present = [method for method in methods if method in summary["methods"] and method in x]
        if present:
            success = [summary["methods"][method]["success"] for method in present]
            at, rates = [x[method] for method in present], [rate["rate"] for rate in success]
            bars = np.abs([[rate[end] - rate["rate"] for rate in success] for end in ("low", "high")])
            axes.errorbar(at, rates, bars, fmt=marker, color=f"C{number}", markersize=6, elinewidth=0.7, label=name)
            points += zip(at, rates, present, strict=True)
    lowest = min(method["success"]["low"] for method in summary["methods"].values())
    # Labels need the space where all methods succeed often.
    axes.set(xlabel=label, ylabel="success", ylim=(max(-0.02, lowest - 0.1), 1.04))
    label_points(axes, points)
    axes.margins(x=0.12)
    axes.set_xlim(left=0.0)
    axes.set_title(f"{summary['env']}, {summary['episodes']} paired episodes", fontsize=10, color=INK)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def label_points(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Labels points; overlapping labels move down, with a line to their point.

    Args:
        axes: with the limits of the vertical axis set.
        points: x, y and the name.
    """
    width, placed = 0.12 * max(x for x, _, _ in points), list[tuple[float, float]]()
    bottom, top = axes.get_ylim()
    line_height = 0.032 * (top - bottom)
    for x, y, name in sorted(points, key=lambda point: (point[1], point[0]), reverse=True):
        label_y = y
        while any(abs(x - other) < width and abs(label_y - level) < line_height for other, level in placed):
            label_y -= line_height / 4
        placed.append((x, label_y))
        line = {"arrowstyle": "-", "color": RULE, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(name, (x, y), (x + 0.25 * width, label_y), fontsize=7, color=INK, va="center", arrowprops=line)
