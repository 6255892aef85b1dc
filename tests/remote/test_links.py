"""Servers that are killed, links that break, lose or hold back: a robot goes on and finds back by itself."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.children import wait_for
from tests.remote.conftest import at, listening

from specact import Pair, SpeculativePolicy
from specact.families.codes.policy import executed_codes
from specact.families.codes.sampling import verify
from specact.gates import Always
from specact.lab.rollout.processes import ServerProcess, serving
from specact.remote import Client, ClientSettings, remote_verifier
from specact.rng import Role, stream
from specact.types import StepRecord

LOST = ("deadline", "disconnected", "expired")
DEADLINE_MS = 200.0


class Cable:
    """A relay to a server of this machine, for :func:`listening`, that breaks as told.

    Attributes:
        flows: cleared, nothing passes, and nothing is lost.
        plugged: cleared, new connections end at once.
        endings: each ends all connections there are: ``reset``, or ``freeze``, after which they look open.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.flows, self.plugged, self._over = threading.Event(), threading.Event(), threading.Event()
        self.endings: list[str] = []
        self.mend()

    def mend(self) -> None:
        self.flows.set()
        self.plugged.set()

    def end(self) -> None:
        """Lets go of what is frozen."""
        self._over.set()
        self.mend()

    def serve(self, side: socket.socket) -> None:
        before = len(self.endings)
        if not self.plugged.is_set():
            return
        with socket.create_connection(("127.0.0.1", self._port)) as server:
            other = {side: server, server: side}
            while not self._over.is_set():
                for ready in select.select(list(other), [], [], 0.01)[0]:
                    self.flows.wait(60)
                    if len(self.endings) == before:
                        other[ready].sendall(data := ready.recv(65536))
                        if not data:
                            return
                if len(self.endings) > before:
                    if self.endings[-1] == "freeze":
                        self._over.wait(60)
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return


class Robot:
    """A policy whose chunks are cut to one action, every step of which asks the target."""

    def __init__(self, bundle: Pair[Any], client: Client, sampling: Any) -> None:
        self.bundle = bundle.composed(spec=msgspec.structs.replace(bundle.parts.spec, execute=1))
        self.client, verifier = client, remote_verifier(client, bundle, DEADLINE_MS, sampling)
        self.policy = SpeculativePolicy(self.bundle, Always(), verifier=verifier, seed=5)
        client.report = self.policy.counts
        self.records: list[StepRecord] = []
        self.actions: list[np.ndarray] = []
        self._walk = np.random.default_rng(0)

    def step(self) -> None:
        state = np.clip(0.6 * self._walk.standard_normal(self.bundle.observation["state"].shape), -1.0, 1.0)
        self.actions.append(self.policy.act({"state": state, "goal": np.array([0.3, -0.2])}))
        assert self.policy.record is not None
        self.records.append(self.policy.record)

    @property
    def verified(self) -> int:
        return sum(record.outcome is not None for record in self.records)

    @property
    def causes(self) -> Counter[str]:
        """Misses so far, by cause."""
        return Counter(record.miss for record in self.records if record.miss is not None)

    def check(self, *causes: str) -> None:
        """What holds whatever link and server do: misses have these causes, and no step has another's answer."""
        assert set(self.causes) <= set(causes), self.causes
        counts = self.policy.counts
        assert counts["missed"] == self.causes.total() and counts["transmitted"] == self.verified + counts["missed"]
        for record, action in zip(self.records, self.actions, strict=True):
            proposal, number = record.proposal, record.address.step
            codes, chunk = proposal.evidence.codes, proposal.actions
            if record.outcome is not None:
                target = self.bundle.parts.target.infer(proposal.window)
                rng = stream(5, Role.VERIFY, robot=0, episode=record.address.episode, step=number)
                codes = verify(target, proposal.evidence.draft, codes, rng).codes
                chunk = self.bundle.parts.tokenizer.decode(codes, target.offsets)
            assert np.array_equal(executed_codes(record), codes), f"step {number} has the answer to another step"
            assert np.array_equal(action, self.bundle.parts.tokenizer.to_environment(chunk[0])), f"step {number}"


@contextmanager
def driving(*robots: Robot) -> Iterator[None]:
    """Drives robots at 20 Hz, each in a thread, while the block does something to their link."""
    stop = threading.Event()

    def drive(robot: Robot) -> None:
        while not stop.is_set():
            robot.step()
            time.sleep(0.05)

    with ThreadPoolExecutor(len(robots)) as pool:
        runs = [pool.submit(drive, robot) for robot in robots]
        try:
            yield
        finally:
            stop.set()
            for run in runs:
                run.result()


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
            made.append(Robot(ball, client, sampling))
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
