"""Addressed random streams."""

import itertools

import numpy as np
import pytest

from specact.rng import Role, StepAddress, StepStreams, stream, streams

LAST = 2**64 - 1


def test_numbers_are_those_of_the_first_release() -> None:
    # Different addresses are different keys and counters of Philox, 2^64 blocks apart, hence independent.
    # Recorded results depend on these values: if this fails, every published number loses its seed.
    assert [int(role) for role in (Role.DRAFT, Role.GATE, Role.VERIFY)] == [0, 1, 2]
    reference = np.random.Philox(
        key=np.array([7, 2], dtype=np.uint64), counter=np.array([0, 4, 3, 2], dtype=np.uint64)
    ).random_raw(8)
    numbers = stream(7, Role.VERIFY, robot=2, episode=3, step=4).bit_generator.random_raw(8)
    np.testing.assert_array_equal(numbers, reference)


def test_streams_of_a_batch_are_each_the_steps_own_in_whatever_order_they_are_drawn_from() -> None:
    addresses = [StepAddress(5, robot, 2, step) for robot, step in itertools.product((0, 1), (3, 0, 3))]
    made = streams(Role.VERIFY, addresses)
    drawn = {place: made[place].random(3) for place in (4, 0, 5, 1, 3, 2)}
    for place, address in enumerate(addresses):
        seed, robot, episode, step = address
        expected = stream(seed, Role.VERIFY, robot=robot, episode=episode, step=step).random(3)
        np.testing.assert_array_equal(drawn[place], expected)


def test_step_streams_are_the_same_streams_in_any_order_and_after_any_use() -> None:
    streams = StepStreams()
    for step, role in itertools.product((3, 0, 3, 7), Role):
        # Leaves half a word and half a buffer behind, which the next address must not see.
        streams(role, StepAddress(5, 1, 2, step + 1)).integers(0, 9, 3, dtype=np.uint32)
        expected = stream(5, role, robot=1, episode=2, step=step)
        np.testing.assert_array_equal(streams(role, StepAddress(5, 1, 2, step)).random(10), expected.random(10))


def test_the_following_address_is_that_of_the_next_step() -> None:
    assert StepAddress(1, 2, 3, 4).following == StepAddress(1, 2, 3, 5)


def test_the_largest_address_is_usable_and_what_lies_beyond_is_refused() -> None:
    top = stream(LAST, Role.DATA, robot=LAST, episode=LAST, step=LAST).random(4)
    assert not np.array_equal(top, stream(0, Role.DATA).random(4))
    for field in ("robot", "episode", "step"):
        for value in (-1, LAST + 1):
            with pytest.raises(OverflowError):
                stream(0, Role.DRAFT, **{field: value})
