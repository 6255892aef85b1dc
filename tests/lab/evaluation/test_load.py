"""The load generator's robots: what is counted of those that keep up, and of those that fall behind."""

from __future__ import annotations

import asyncio

import numpy as np

from specact.lab.evaluation.load import Load, Robot, run_robots


class Answered(Robot):
    """Has its answers after some time."""

    def __init__(self, after_s: float, batch: int) -> None:
        super().__init__(asyncio.get_running_loop())
        self._after_s, self._batch = after_s, batch
        self.gone = False

    def send(self) -> None:
        self._loop.call_later(self._after_s, self.answered, self._batch)

    def hang_up(self) -> None:
        self.gone = True


def load_of(robots: list[tuple[float, int]], seconds: float, offered_hz: float | None) -> tuple[Load, list[Answered]]:
    joined: list[Answered] = []

    async def join() -> Robot:
        joined.append(Answered(*robots[len(joined)]))
        return joined[-1]

    return asyncio.run(run_robots(join, len(robots), seconds, offered_hz)), joined


def test_at_a_rate_no_more_steps_are_asked_than_are_due_and_each_has_its_robot() -> None:
    load, joined = load_of([(0.0, 2), (0.0, 2)], 0.2, 100.0)
    asked = np.bincount(load.robot)
    assert asked.tolist() == [len(robot.results) for robot in joined] and (asked >= 1).all() and (asked <= 10).all()
    assert load.errors == 0 and load.batch == 2.0
    assert all(robot.gone for robot in joined)


def test_a_robot_that_falls_behind_stops_when_the_time_is_over() -> None:
    """It asks every tenth of a second at most: 4 of 60 due steps. The waiting counts from when each was due."""
    load, _ = load_of([(0.0, 1), (0.1, 1)], 0.3, 400.0)
    slow = load.latencies_ms[load.robot == 1]
    assert 1 <= len(slow) <= 4 and (load.robot == 0).sum() <= 60
    assert (np.diff(slow) > 0.0).all() and slow[0] >= 99.0


def test_errors_are_no_steps_and_the_time_is_that_of_the_last_answer() -> None:
    load, _ = load_of([(0.25, 0), (0.25, 1)], 0.05, None)
    assert load.errors == 1 and load.robot.tolist() == [1]
    assert load.seconds >= 0.25 and load.summary()["steps_per_s"] <= 4.0
