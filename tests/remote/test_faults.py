"""A policy in a control loop while its link and its server fail: real sockets, a real server, bounded real time.

Every test drives three robots at once, each with a client of its own: one that transmits every step, one with the
deviation gate whose requests leave ahead of the draft, and one as in the paper, JSON over HTTP with sampling on the
server. What holds for all of them whatever happens is in ``Robot.check``: no exception, no stall beyond the deadline
and a period, every miss counted under its cause, and every action bit for bit the one of its own step.

What a wall clock says is bounded from above by a lot more than what is seen; the machine may be busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from specact.lab.processes import ServerProcess, serving
from specact.links.link import Link, load_link
from specact.links.shaper import Shaper
from specact.remote import client as client_module
from specact.remote.client import ClientSettings

if TYPE_CHECKING:
    from tests.remote.conftest import Robot

Driving = Callable[..., AbstractContextManager[None]]
WaitFor = Callable[..., float]
Fleet = Callable[..., AbstractContextManager[Sequence["Robot"]]]

pytestmark = pytest.mark.usefixtures("nothing_left")
LOST = ("deadline", "disconnected")
DEADLINE_S = 0.04


def more(robots: Sequence[Robot], verified: int) -> Callable[[], bool]:
    """Whether each robot had so many more steps verified than now."""
    wanted = [robot.verified + verified for robot in robots]
    return lambda: all(robot.verified >= count for robot, count in zip(robots, wanted, strict=True))


def missed(robots: Sequence[Robot], misses: int) -> Callable[[], bool]:
    """Whether each robot had so many more misses than now."""
    wanted = [robot.causes.total() + misses for robot in robots]
    return lambda: all(robot.causes.total() >= count for robot, count in zip(robots, wanted, strict=True))


def connected(robots: Sequence[Robot], times: int) -> Callable[[], bool]:
    return lambda: all(robot.client.counts["connections"] >= times for robot in robots)


def check(robots: Sequence[Robot], *causes: str) -> None:
    for robot in robots:
        robot.check(*causes)


def test_a_server_killed_and_started_again_mid_episode(fleet: Fleet, driving: Driving, wait_for: WaitFor) -> None:
    settings = ClientSettings(longest_delay_s=0.5)
    with ExitStack() as servers:
        first = servers.enter_context(serving("ball", "--max-batch", "1"))
        with fleet(first.port, settings) as robots, driving(*robots):
            wait_for(more(robots, 10))
            killed = time.monotonic()
            first.kill()
            wait_for(missed(robots, 10))
            started = time.monotonic()
            servers.enter_context(serving("ball", "--max-batch", "1", "--port", str(first.port)))
            wait_for(more(robots, 10), settings.longest_delay_s + 4.0)
    check(robots, *LOST)
    assert connected(robots, 2)()
    for robot in robots:
        # While nothing listens, a step costs nothing: what was lost is at most the request that was under way.
        assert robot.causes["disconnected"] >= 9
        assert robot.waited(killed, started) < 2 * DEADLINE_S + robot.noise


def test_a_peer_that_is_gone_without_a_word_is_noticed(
    exact_server: ServerProcess, fleet: Fleet, driving: Driving, wait_for: WaitFor
) -> None:
    silence_s = 1.0
    with (
        Shaper(load_link("wifi-paper"), "127.0.0.1", exact_server.port) as shaper,
        fleet(shaper.port, ClientSettings(silence_s=silence_s)) as robots,
        driving(*robots),
    ):
        wait_for(more(robots, 5))
        gone = time.monotonic()
        shaper.half_open()
        noticed = wait_for(connected(robots, 2))
        found_back = wait_for(more(robots, 5))
    check(robots, *LOST)
    noise = max(robot.noise for robot in robots)
    assert noticed < silence_s + 1.0 + 3 * noise and found_back < 3.0 + 3 * noise
    for robot in robots:
        assert robot.client.counts["connections"] == 2
        assert robot.waited(gone, gone + noticed) < 4 * DEADLINE_S + 3 * robot.noise


def test_a_black_hole_of_three_seconds_costs_three_deadlines(
    exact_server: ServerProcess, fleet: Fleet, driving: Driving, wait_for: WaitFor
) -> None:
    # Some clients are patient and keep their connection; the others give it up and find back.
    hasty, patient = ClientSettings(silence_s=1.0), ClientSettings(silence_s=10.0)
    with (
        Shaper(load_link("wifi-paper"), "127.0.0.1", exact_server.port) as shaper,
        fleet(shaper.port, hasty) as some,
        fleet(shaper.port, patient) as others,
    ):
        robots = [*some, *others]
        with driving(*robots):
            wait_for(more(robots, 5))
            lost = time.monotonic()
            shaper.black_hole(3.0)
            wait_for(more(robots, 5), 8.0)
    check(robots, *LOST)
    for robot in robots:
        # 58 steps passed meanwhile, or fewer on a busy machine.
        meanwhile = [
            step.record for step in robot.steps if lost <= step.began < lost + 2.9 and step.record.decision.transmit
        ]
        assert robot.waited(lost, lost + 2.9) < 4 * DEADLINE_S + 3 * robot.noise
        assert sum(record.miss == "disconnected" for record in meanwhile) > len(meanwhile) / 2
        assert robot.client.counts["connections"] == (2 if robot in some else 1)


def test_without_the_rule_of_three_a_black_hole_would_cost_a_deadline_per_step(
    exact_server: ServerProcess,
    fleet: Fleet,
    driving: Driving,
    wait_for: WaitFor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "_MAX_MISSES", 10**9)
    with (
        Shaper(load_link("wifi-paper"), "127.0.0.1", exact_server.port) as shaper,
        fleet(shaper.port, ClientSettings(silence_s=10.0)) as robots,
        driving(*robots),
    ):
        wait_for(more(robots, 5))
        lost = time.monotonic()
        shaper.black_hole(1.2)
        time.sleep(1.2)
    for robot in (robots[0], robots[2]):
        steps = [step for step in robot.steps if lost <= step.began < lost + 1.2]
        assert sum(step.record.miss == "deadline" for step in steps) > 6


def test_connections_reset_and_refused(
    exact_server: ServerProcess, fleet: Fleet, driving: Driving, wait_for: WaitFor
) -> None:
    with (
        Shaper(load_link("wifi-paper"), "127.0.0.1", exact_server.port) as shaper,
        fleet(shaper.port) as robots,
        driving(*robots),
    ):
        wait_for(more(robots, 5))
        lost = time.monotonic()
        shaper.refuse(0.6)
        shaper.reset_all()
        wait_for(missed(robots, 10))
        wait_for(more(robots, 5), 8.0)
    check(robots, *LOST)
    for robot in robots:
        assert robot.client.counts["connections"] == 2
        assert robot.waited(lost, lost + 0.6) < 2 * DEADLINE_S + robot.noise


@dataclass(frozen=True)
class Until:
    """A link that is bad for some seconds and good from then on."""

    bad: Link
    good: Link
    seconds: float

    def delay(self, payload_bytes: int, up: bool, at: float, rng: np.random.Generator) -> float:
        return (self.bad if at < self.seconds else self.good).delay(payload_bytes, up, at, rng)

    def busy(self, payload_bytes: int, up: bool, at: float) -> float:
        return self.good.busy(payload_bytes, up, at)


def test_thirty_percent_loss(exact_server: ServerProcess, fleet: Fleet, driving: Driving, wait_for: WaitFor) -> None:
    # A lost segment comes 200 ms later, or 600 if lost twice, and with it all that was sent after it.
    link = Until(load_link("wifi-paper+loss=0.3"), load_link("wifi-paper"), 2.5)
    with Shaper(link, "127.0.0.1", exact_server.port, seed=1) as shaper:
        start = time.monotonic()
        with fleet(shaper.port) as robots, driving(*robots):
            time.sleep(max(0.0, start + 2.5 - time.monotonic()))
            wait_for(more(robots, 5))
    check(robots, *LOST)
    for robot in robots:
        assert robot.causes["deadline"] > 0 and robot.client.counts["late"] > 0


def test_nothing_depends_on_the_wall_clock(
    exact_server: ServerProcess, fleet: Fleet, driving: Driving, wait_for: WaitFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = np.random.default_rng(0).choice([-1e9, -3600.0, -1.0, 3600.0, 1e9], 1 << 16).tolist()
    real = time.time
    asked: list[float] = []

    def wild() -> float:
        asked.append(real() + jumps[len(asked) % len(jumps)])
        return asked[-1]

    with Shaper(load_link("wifi-paper"), "127.0.0.1", exact_server.port) as shaper:
        monkeypatch.setattr(time, "time", wild)
        monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * wild()))
        assert abs(time.time() - real()) >= 0.9
        # A deadline that a busy machine keeps, and that no jump would.
        with fleet(shaper.port, ClientSettings(silence_s=0.6), deadline_ms=200.0) as robots, driving(*robots):
            wait_for(more(robots, 10))
            shaper.reset_all()
            wait_for(connected(robots, 2))
            time.sleep(0.9)  # long enough for an idle client to be given up, had its clock jumped
            wait_for(more(robots, 10))
        monkeypatch.undo()
    check(robots, *LOST)
    for robot in robots:
        # Each jump, had it been believed, would have meant a missed deadline or a lost connection.
        assert robot.client.counts["connections"] <= 4
        assert robot.verified > robot.causes.total()
    # In fact nobody but this test has asked for it.
    assert len(asked) == 1
