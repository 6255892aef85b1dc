"""A policy in a control loop over links that were recorded, with their stalls; see ``test_faults`` for the robots."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from specact.lab.processes import ServerProcess
from specact.links.link import load_link
from specact.links.recordings import read_deliveries, read_round_trips
from specact.links.shaper import Shaper
from specact.remote.client import ClientSettings

if TYPE_CHECKING:
    from tests.remote.conftest import Robot

Driving = Callable[..., AbstractContextManager[None]]
WaitFor = Callable[..., float]
Fleet = Callable[..., AbstractContextManager[Sequence["Robot"]]]

DATA = Path(os.environ.get("SPECACT_DATA", Path(__file__).resolve().parents[2].parent / "shared/data")) / "network"
pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(not DATA.is_dir(), reason="no recorded networks; SPECACT_DATA names no folder with them"),
]


def stalled(robots: Sequence[Robot], longer_than_s: float) -> bool:
    """Whether each robot had, in a row, as many misses as pass in so long a time."""
    for robot in robots:
        lost = [step for step in robot.steps if step.record.decision.transmit]
        runs, start = [0.0], None
        for step in lost:
            start = None if step.record.miss is None else start or step.began
            runs.append(0.0 if start is None else step.began - start)
        if max(runs) < longer_than_s:
            return False
    return True


def drive_through(
    link: str, stall_s: float, port: int, fleet: Fleet, driving: Driving, wait_for: WaitFor
) -> Sequence[Robot]:
    """Drives until the stall has been met and is over; every client is patient enough to keep its connection."""
    with (
        Shaper(load_link(link), "127.0.0.1", port) as shaper,
        fleet(shaper.port, ClientSettings(silence_s=10.0), deadline_ms=50.0) as robots,
        driving(*robots),
    ):
        # Nearly all of it: the last request before it may have come through.
        wait_for(lambda: stalled(robots, 0.8 * stall_s), 30.0)
        before = [robot.verified for robot in robots]
        wait_for(lambda: all(robot.verified >= 5 + had for robot, had in zip(robots, before, strict=True)), 30.0)
    for robot in robots:
        robot.check("deadline", "disconnected")
        assert robot.client.counts["connections"] == 1
    return robots


def test_round_trips_of_a_robot_with_two_stalls_of_two_seconds(
    exact_server: ServerProcess, fleet: Fleet, driving: Driving, wait_for: WaitFor
) -> None:
    path = DATA / "telerobot_rtt" / "tyrell_roundtrip035.csv"
    rtts = read_round_trips(path)
    first, second = np.flatnonzero(rtts > 1500.0)[:2]
    assert rtts[first] > 1900.0 and rtts[second] > 1700.0 and rtts[first + 1 : second].sum() < 700.0
    start = rtts[:first].sum() / 1e3 - 0.4
    robots = drive_through(f"rtt:{path}+start={start}", 1.9, exact_server.port, fleet, driving, wait_for)
    # Late answers are counted, and each earns one try, not three: two stalls do not cost a deadline per step.
    for robot in robots:
        assert robot.client.counts["late"] > 3
        assert robot.causes["deadline"] < 0.7 * robot.causes.total()


def test_a_phone_that_cannot_send_for_two_and_a_half_seconds(
    exact_server: ServerProcess, fleet: Fleet, driving: Driving, wait_for: WaitFor
) -> None:
    up, down = (DATA / "mahimahi" / f"ATT-LTE-driving.{way}" for way in ("up", "down"))
    moments = read_deliveries(up)
    gap = int(np.argmax((np.diff(moments) > 2500) & (np.diff(moments) < 2600)))
    start = moments[gap] / 1e3 - 0.4
    link = f"mahimahi:{up},{down}+delay=8+start={start}"
    robots = drive_through(link, 2.5, exact_server.port, fleet, driving, wait_for)
    for robot in robots:
        assert robot.causes["deadline"] < 0.7 * robot.causes.total()
