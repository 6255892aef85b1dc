"""Whose request is next, in virtual time; test_fairness.py has the same of a server."""

from __future__ import annotations

import random

import pytest

from specact.server.queue import Job, Lane, Queue
from specact.wire.messages import Ask


def job(lane: Lane, due: float = 1.0, arrived: float = 0.0) -> Job:
    return Job(Ask("infer", 0, 1.0, (0, 0, 0, 0), bytearray()), lane, arrived, due)


def served(queue: Queue, cost: float = 1.0) -> Lane:
    """The lane of the next request, which is charged so much [s]."""
    [taken] = queue.take(1, 0.0)[0]
    queue.charge([taken], cost)
    return taken.lane


def filled(queue: Queue, *counts: int, due: float = 1.0) -> list[Lane]:
    """Lanes with so many requests each."""
    lanes = [Lane() for _ in counts]
    for lane, count in zip(lanes, counts, strict=True):
        for _ in range(count):
            queue.put(job(lane, due))
    return lanes


def test_the_earliest_deadline_is_next_though_it_came_last() -> None:
    queue = Queue()
    filled(queue, *[1] * 39, due=0.9)
    [urgent] = filled(queue, 1, due=0.5)
    assert urgent in [taken.lane for taken in queue.take(4, 0.0)[0]]


def test_a_lane_with_earlier_deadlines_has_no_more_than_its_share() -> None:
    queue = Queue()
    lanes = filled(queue, 200, due=0.5) + filled(queue, *[50] * 4)
    turns = [served(queue) for _ in range(100)]
    counts = [sum(turn is lane for turn in turns) for lane in lanes]
    assert max(counts) - min(counts) <= 4


def test_what_waits_behind_others_of_its_robot_is_not_urgent_for_it() -> None:
    queue = Queue()
    filled(queue, *[50] * 20, due=60.0)
    queue.charge(queue.take(20, 5.0)[0], 1.0)
    robot = Lane()
    queue.put(job(robot, due=5.15, arrived=5.1))
    assert robot in [taken.lane for taken in queue.take(5, 5.1)[0]]


def test_an_idle_lane_saves_nothing_up() -> None:
    queue = Queue()
    idle, busy = filled(queue, 1, 100)
    for _ in range(50):
        served(queue)
    for _ in range(20):
        queue.put(job(idle, due=0.5))
    # Its turn comes at once, and then they alternate, but for the few by which a lane may be ahead.
    lanes = [served(queue) for _ in range(20)]
    assert lanes[0] is idle and 8 <= sum(lane is busy for lane in lanes) <= 12


def test_lanes_that_are_always_new_do_not_keep_an_old_one_waiting() -> None:
    queue = Queue()
    [old] = filled(queue, 1)
    assert served(queue) is old
    queue.put(job(old, due=60.0))
    # One a tenth of a second, each with a deadline as short: a deadline of a minute counts as one of a second.
    turns = []
    for number in range(50):
        queue.put(job(Lane(), due=0.1 * number + 0.1, arrived=0.1 * number))
        turns.append(served(queue))
    assert old in turns[:15]


@pytest.mark.parametrize("seed", range(5))
def test_whoever_waits_is_served_before_any_other_has_had_much_more(seed: int) -> None:
    """Random arrivals, costs and deadlines: a waiting lane falls behind by a bounded time."""
    rng, queue, clock = random.Random(seed), Queue(), 0.0
    lanes, since = [Lane() for _ in range(6)], dict[int, float]()
    for _ in range(2000):
        index = rng.choices(range(6), weights=(1, 1, 5, 20, 20, 20))[0]
        if len(lanes[index].jobs) < 4:
            queue.put(job(lanes[index], due=1e6 * rng.random()))
            since.setdefault(index, clock)
        if rng.random() < 0.7 and len(queue):
            cost = rng.choice((0.5, 1.0, 2.0))
            index, clock = lanes.index(served(queue, cost)), clock + cost
            # Each of the others may be ahead by two usual requests, and have one more.
            assert clock - since.pop(index) <= 6 * 3 * 2.0 + 6 * 2.0
            if lanes[index].jobs:
                since[index] = clock
    assert sum(len(lane.jobs) for lane in lanes) == len(queue)
