"""Lanes that are served in turn: the exact order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specact.errors import WireError
from specact.server.batcher import FairQueue, Lane


def queue(most: int = 1000, most_per_lane: int = 100) -> FairQueue[str]:
    return FairQueue(most, most_per_lane)


def filled(made: FairQueue[str], **lanes: int) -> dict[str, Lane[str]]:
    """Lanes with so many items each, named a0, a1, ..."""
    found = {name: made.lane() for name in lanes}
    for name, count in lanes.items():
        for number in range(count):
            assert made.put(found[name], f"{name}{number}") is None
    return found


def taken(made: FairQueue[str], most: int = 1000, dead: Sequence[str] = ()) -> list[str]:
    return made.take(most, lambda item: item not in dead)[0]


def test_lanes_take_turns_and_each_keeps_its_order() -> None:
    made = queue()
    filled(made, a=4, b=1, c=2)
    assert len(made) == 7
    assert taken(made, 2) == ["a0", "b0"]
    assert taken(made, 3) == ["c0", "a1", "c1"]
    assert taken(made) == ["a2", "a3"]
    assert len(made) == 0 and taken(made) == []


def test_a_lane_that_was_idle_goes_before_those_that_are_never_empty() -> None:
    made = queue()
    lanes = filled(made, robot=1, a=9, b=9, c=9)
    assert taken(made, 5) == ["robot0", "a0", "b0", "c0", "a1"]
    made.put(lanes["robot"], "robot1")
    assert taken(made, 3) == ["robot1", "b1", "c1"]


def test_lanes_that_are_always_new_do_not_keep_an_old_one_waiting() -> None:
    made = queue()
    lanes = filled(made, old=1)
    assert taken(made) == ["old0"]
    for number in range(5):
        made.put(made.lane(), f"before {number}")
    made.put(lanes["old"], "old1")
    for number in range(50):
        made.put(made.lane(), f"after {number}")
        batch = taken(made, 1)
        if batch == ["old1"]:
            break
    # The five that were there before it, and none that came later.
    assert number == 5


def test_what_is_dead_costs_no_turn() -> None:
    made = queue()
    filled(made, a=3, b=2)
    living, dead = made.take(2, lambda item: item not in ("a0", "a1"))
    assert (living, dead) == (["a2", "b0"], ["a0", "a1"])
    assert len(made) == 1


def test_a_lane_has_room_for_so_many() -> None:
    made = queue(most_per_lane=2)
    lanes = filled(made, a=2)
    with pytest.raises(WireError, match="2 requests of this robot are already waiting") as refused:
        made.put(lanes["a"], "a2")
    assert refused.value.code == "overloaded"
    assert made.put(made.lane(), "b0") is None


def test_in_a_full_queue_the_longest_lane_makes_room_and_equals_do_not() -> None:
    made = queue(most=4)
    lanes = filled(made, a=3, b=1)
    assert made.put(made.lane(), "c0") == "a2"
    with pytest.raises(WireError, match="4 requests are waiting already") as refused:
        made.put(lanes["b"], "b1")
    assert refused.value.code == "overloaded"
    assert len(made) == 4
    assert taken(made) == ["a0", "b0", "c0", "a1"]
    made = queue(most=3)
    filled(made, a=2, b=1)
    assert made.put(made.lane(), "c0") == "a1"


@pytest.mark.parametrize("seed", range(5))
def test_between_two_turns_of_a_waiting_lane_every_other_has_one_at_most(seed: int) -> None:
    rng = random.Random(seed)
    made = queue(most_per_lane=4)
    lanes = [made.lane() for _ in range(6)]
    waits = dict.fromkeys(range(6), 0)
    for _ in range(2000):
        lane = rng.choices(range(6), weights=(1, 1, 5, 20, 20, 20))[0]
        if len(lanes[lane].items) < 4:
            made.put(lanes[lane], str(lane))
        if rng.random() < 0.7 and len(made):
            [served] = taken(made, 1)
            for other in waits:
                waits[other] = waits[other] + 1 if lanes[other].items and other != int(served) else 0
            assert max(waits.values()) <= 5
    assert sum(len(lane.items) for lane in lanes) == len(made)
