"""Servers that are killed, links that break, lose or hold back: a robot goes on and finds back by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from tests.children import wait_for
from tests.remote.conftest import Cable, Robot, at, driving, listening

from specact import Pair
from specact.lab.rollout.processes import ServerProcess, serving
from specact.remote import Client, ClientSettings

LOST = ("deadline", "disconnected", "expired")
DEADLINE_MS = 200.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One request per inference: an answer is then that of a local target to its last bit."""
    with serving("ball", "--max-batch", "1") as process:
        yield process


@contextmanager
def robots(ball: Pair[Any], port: int, settings: ClientSettings) -> Iterator[list[Robot]]:
    """Two, one of which has the server sample."""
    with ExitStack() as stack:
        made = []
        for sampling in ("device", "server"):
            client = stack.enter_context(Client(at(port), ball.exchange.contract, sampling, settings))
            client.connect(60.0)
            made.append(Robot(ball, client, deadline_ms=DEADLINE_MS, sampling=sampling))
        yield made


def more(made: list[Robot], steps: int) -> None:
    """Waits until each has verified so many more steps."""
    wanted = [robot.verified + steps for robot in made]
    wait_for(lambda: all(robot.verified >= least for robot, least in zip(made, wanted, strict=True)))


def missed(made: list[Robot], steps: int) -> None:
    """Waits until each has missed so many more steps."""
    wanted = [robot.causes.total() + steps for robot in made]
    wait_for(lambda: all(robot.causes.total() >= least for robot, least in zip(made, wanted, strict=True)))


def test_a_server_is_killed_and_started_again(ball: Pair[Any]) -> None:
    with ExitStack() as servers:
        first = servers.enter_context(serving("ball", "--max-batch", "1"))
        with robots(ball, first.port, ClientSettings(longest_delay_s=0.5)) as made, driving(*made):
            more(made, 5)
            first.kill()
            missed(made, 10)
            servers.enter_context(serving("ball", "--max-batch", "1", "--port", str(first.port)))
            more(made, 5)
    for robot in made:
        robot.check(*LOST)
        # While nothing listens a step costs nothing.
        assert robot.causes["disconnected"] >= 8 and robot.client.counts["connections"] == 2


@pytest.mark.parametrize("fault", ["half open", "reset and refused", "black hole", "patient"])
def test_a_link_that_breaks_costs_few_deadlines(fault: str, ball: Pair[Any], server: ServerProcess) -> None:
    settings, cable = ClientSettings(silence_s=60.0 if fault == "patient" else 1.0), Cable(server.port)
    with listening(cable.serve) as port, robots(ball, port, settings) as made:
        try:
            with driving(*made):
                more(made, 5)
                before = [robot.causes["deadline"] for robot in made]
                if fault == "half open":
                    cable.endings.append("freeze")
                elif fault == "reset and refused":
                    cable.plugged.clear()
                    cable.endings.append("reset")
                else:
                    cable.flows.clear()
                missed(made, 8)
                cable.mend()
                more(made, 5)
        finally:
            cable.end()
    for robot, earlier in zip(made, before, strict=True):
        robot.check(*LOST)
        assert robot.client.counts["connections"] >= (2 if fault in ("half open", "reset and refused") else 1)
        # Three in a row, and nothing more is sent before a sign of life; later ones are the machine's doing.
        assert robot.causes["deadline"] - earlier < robot.causes.total() - earlier
