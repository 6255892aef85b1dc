"""What a robot does where its policy or its own sensors fail, by both actors alike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specact.errors import ConfigError, ObservationError
from specact.robot.chunks import ActionRange
from specact.safety import Fallback, Safety
from specact.types import ActionUnits, VirtualClock

STILL = (0.5, -0.5)
BLIND = ObservationError("the camera is black", "not_finite")
RANGE = ActionRange([-1.0, -2.0], [1.0, 2.0])
USUAL_S = 3.0


class Stoppable:
    def stop(self) -> None:
        pass


def safety(fallback: Fallback, robot: object = None, usual_s: float = USUAL_S) -> tuple[Safety, VirtualClock]:
    clock = VirtualClock()
    made = Safety(fallback, RANGE, clock, usual_s)
    made.attach(robot)
    return made, clock


def action(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("fallback", "robot", "max_age_s"),
    [
        (Fallback(), None, math.inf),
        (Fallback(), Stoppable(), USUAL_S),
        (Fallback(stop_action=STILL), None, USUAL_S),
        (Fallback(max_chunk_age_ms=500.0), None, 0.5),
        (Fallback(stop_action=STILL, max_chunk_age_ms=500.0), Stoppable(), 0.5),
    ],
)
def test_a_robot_that_can_be_stopped_has_a_maximum_age_of_its_actions(
    fallback: Fallback, robot: object, max_age_s: float
) -> None:
    assert safety(fallback, robot)[0].max_age_s == max_age_s


def test_an_unusable_observation_holds_the_last_action_until_it_is_too_old() -> None:
    rule, clock = safety(Fallback(stop_action=STILL))
    with pytest.raises(ObservationError, match="black"):
        rule.hold(BLIND)
    rule.see(clock.now())
    moving = rule.send(action(0.25, 0.75))
    held = []
    for _ in range(6):
        clock.sleep(1.0)
        chosen = rule.hold(BLIND)
        assert chosen is not None and rule.overrides and not rule.stopped
        held.append(chosen.tolist())
    assert held == 3 * [moving.tolist()] + 3 * [list(STILL)]
    # The policy goes on with the next usable observation.
    rule.see(clock.now())
    rule.send(action(0.0, 0.0))
    assert not rule.expired and not rule.overrides
    assert np.array_equal(rule.hold(BLIND), [0.0, 0.0])  # type: ignore[arg-type]


def test_after_so_many_idle_steps_the_robot_stands_still_until_it_has_seen_something_newer() -> None:
    rule, clock = safety(Fallback(stop_action=STILL, max_consecutive_idle=2))
    rule.see(clock.now())
    moving = rule.send(action(0.25, 0.75)).tolist()
    held = []
    for _ in range(4):
        clock.sleep(0.1)
        held.append(rule.hold(BLIND).tolist())  # type: ignore[union-attr]
    assert held == [moving, moving, list(STILL), list(STILL)]
    assert rule.outages == 1 and rule.outage and rule.fresh_s == pytest.approx(0.3)
    # What is left of the old chunk is not played.
    assert rule.expired
    clock.sleep(0.1)
    rule.see(clock.now())
    rule.send(action(0.0, 0.0))
    assert not rule.outage and not rule.expired
    assert np.array_equal(rule.hold(BLIND), [0.0, 0.0]), "the count begins anew"


def test_a_robot_that_only_has_a_method_stop_is_stopped_for_good() -> None:
    rule, clock = safety(Fallback(), Stoppable())
    rule.send(action(0.25, 0.75))
    assert rule.hold(BLIND) is not None
    clock.sleep(USUAL_S + 1.0)
    assert rule.hold(BLIND) is None and rule.stopped
    rule.reset()
    assert not rule.stopped


def test_a_robot_that_nothing_stops_holds_on() -> None:
    rule, clock = safety(Fallback())
    rule.send(action(0.25, 0.75))
    clock.sleep(1e6)
    assert rule.hold(BLIND) is not None and not rule.stopped and not rule.expired


@pytest.mark.parametrize("blind", [0, 3, 5])
def test_failed_requests_and_unusable_observations_are_one_run_of_misses(blind: int) -> None:
    rule, _ = safety(Fallback(max_consecutive_misses=5, stop_action=STILL))
    rule.send(action(0.0, 0.0))
    for _ in range(blind):
        rule.hold(BLIND)
    for _ in range(5 - blind):
        rule.missed()
    assert not rule.stopped
    rule.missed()
    assert rule.stopped and np.array_equal(rule.hold(BLIND), STILL)


@pytest.mark.parametrize(("on_miss", "held"), [("execute_draft", False), ("hold_last", True), ("stop", False)])
def test_a_miss_executes_what_the_rule_says(on_miss: str, held: bool) -> None:
    drafted = np.ones((3, 2), np.float32)
    rule, _ = safety(Fallback(on_miss, stop_action=STILL))  # type: ignore[arg-type]
    rule.missed()
    before = rule.instead(drafted)
    assert np.array_equal(before, np.broadcast_to(STILL, (3, 2)) if held else drafted)
    rule.send(action(0.25, 0.75))
    rule.send(action(0.75, 0.75))
    rule.withdraw()
    last = np.broadcast_to(action(0.25, 0.75), (3, 2))
    assert np.array_equal(rule.instead(drafted), last if held else drafted)
    assert rule.stopped == (on_miss == "stop")


def test_an_action_that_is_held_after_misses_grows_old_like_any_other() -> None:
    rule, clock = safety(Fallback("hold_last", stop_action=STILL, max_chunk_age_ms=500.0))
    rule.see(clock.now())
    moving = rule.send(action(0.25, 0.75)).tolist()
    sent = []
    for _ in range(7):
        clock.sleep(0.1)
        rule.see(clock.now())  # every inference asks, in vain
        rule.missed()
        sent.append(rule.send(rule.instead(np.ones((1, 2), np.float32))[0], held=True).tolist())
    assert sent == 5 * [moving] + 2 * [list(STILL)] and rule.outages == 1
    clock.sleep(0.1)
    rule.see(clock.now())
    assert rule.send(action(0.0, 0.0)).tolist() == [0.0, 0.0] and not rule.outage


def test_an_observation_without_an_action_makes_a_held_action_no_younger() -> None:
    rule, clock = safety(Fallback(stop_action=STILL, max_chunk_age_ms=500.0))
    rule.see(clock.now())
    moving = rule.send(action(0.25, 0.75)).tolist()
    held = []
    for _ in range(7):
        clock.sleep(0.1)
        rule.see(clock.now())  # the observation is usable, but the draft's action is not finite
        held.append(rule.hold(BLIND).tolist())  # type: ignore[union-attr]
    assert held == 5 * [moving] + 2 * [list(STILL)] and rule.outages == 1


def test_after_a_suspension_the_last_action_is_too_old() -> None:
    rule, clock = safety(Fallback())
    rule.send(action(0.0, 0.0))
    clock.sleep(0.1)
    rule.expire()
    assert rule.expired
    rule.see(clock.now() - 0.1)
    assert rule.expired, "what was seen before is too old, too"
    rule.see(clock.now())
    assert not rule.expired


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_action_that_is_not_finite_is_not_sent(value: float) -> None:
    rule = Safety(Fallback(), ActionRange.unknown(2), VirtualClock(), math.inf)
    with pytest.raises(ObservationError, match="not finite"):
        rule.send(action(0.0, value))


@pytest.mark.parametrize("still", [(0.0,), (0.0, 3.0), (math.nan, 0.0), (math.inf, 0.0)])
def test_a_stop_action_outside_the_robots_range_is_refused(still: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        safety(Fallback(stop_action=still))


def test_actions_are_clipped_to_the_range_and_far_outside_are_no_answer() -> None:
    assert RANGE.to_environment(action(5.0, -1.5)).tolist() == [1.0, -1.5]
    assert RANGE.is_near(action(3.0, -6.0)) and not RANGE.is_near(action(3.01, 0.0))
    assert not RANGE.is_near(action(0.0, math.nan)) and not ActionRange.unknown(2).is_near(action(0.0, 1e30))
    assert ActionRange.unknown(2).is_near(action(0.0, 1e6))
    narrow = RANGE.narrowed(ActionRange([-0.5, -9.0], [9.0, 9.0]))
    assert (narrow.low.tolist(), narrow.high.tolist()) == ([-0.5, -2.0], [1.0, 2.0])
    for low, high in (([0.0], [0.0, 1.0]), ([1.0, 0.0], [0.0, 1.0]), ([[0.0]], [[1.0]]), ([math.nan], [1.0])):
        with pytest.raises(ConfigError, match="range"):
            ActionRange(low, high)
    with pytest.raises(ConfigError, match="numbers"):
        RANGE.narrowed(ActionRange([0.0], [1.0]))


def test_a_pair_holds_its_action_in_the_environments_units() -> None:
    units = ActionUnits(action(1.0, 1.0), action(2.0, 4.0))
    rule = Safety(Fallback(stop_action=STILL), units, VirtualClock(), math.inf)
    sent = rule.send(action(0.5, 2.0))
    assert sent.tolist() == [2.0, 5.0]
    assert np.array_equal(rule.hold(BLIND), sent)  # type: ignore[arg-type]
    assert rule.instead(np.zeros((1, 2), np.float32)).tolist() == [[0.0, 0.0]]
