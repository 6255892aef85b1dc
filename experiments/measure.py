"""What several studies measure and draw alike: times on equal observations, paired contrasts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specact.gates import Always
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.evaluation.run import read_table
from specact.lab.rollout.rollout import episode_seed
from specact.lab.rollout.statistics import Interval, contrast, holm, mean_interval
from specact.pair import Pair
from specact.policy import SpeculativePolicy
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.types import StepRecord
from specact.wire.exchange import Contract

CONNECT_S = 60.0

T = TypeVar("T")
Item = TypeVar("Item")


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


@contextmanager
def connected(port: int, contract: Contract, name: str) -> Iterator[Client]:
    """A client that is connected to a server of this machine."""
    with Client(Endpoint("ws", "127.0.0.1", port), contract, name) as client:
        client.connect(CONNECT_S)
        yield client


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
        # The mean of logarithms, because one outlier would dominate the mean of ratios.
        ratio = mean_interval(np.log(spent) - np.log(baseline))
        low, mean, high = (math.exp(value) for value in (ratio.low, ratio.mean, ratio.high))
        costs[name] = {
            "ms": 1e3 * float(np.median(spent)), "relative": mean, "relative_low": low, "relative_high": high,
        }  # fmt: skip
    return costs


def ratio_interval(sums: np.ndarray, counts: np.ndarray) -> Interval:
    """A ratio of sums, linearised: its value, and an interval over episodes of different lengths, ``[episodes]``."""
    ratio = sums.sum() / counts.sum()
    return mean_interval(ratio + (sums - ratio * counts) / counts.mean())


def outcomes(folder: Path, method: str, column: str = "success") -> np.ndarray:
    """An end point of every episode of a method in the folder of an evaluation, in order."""
    table = read_table(folder / "episodes" / method)
    return np.asarray(table[column][np.argsort(table["episode"])], np.float64)


def to_digits(outcomes: Iterable[Any]) -> str:
    """Outcomes as stored results have them: one digit for each, 1 for a success."""
    return "".join(str(int(outcome)) for outcome in outcomes)


def from_digits(digits: str) -> NDArray[np.float64]:
    """The outcomes that :func:`to_digits` wrote."""
    return np.array([float(digit) for digit in digits])


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


def largest_p(contrasts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Contrasts that were stored with corrected p alone, each with the largest p before Holm's correction."""
    rows = sorted(contrasts, key=lambda row: row["p_holm"])
    before = (1.0 if row["p_holm"] >= 1.0 else row["p_holm"] / (len(rows) - at) for at, row in enumerate(rows))
    return [{"p": p, **row} for row, p in zip(rows, before, strict=True)]
