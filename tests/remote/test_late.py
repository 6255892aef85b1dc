"""Late verification over real sockets: nobody waits, and what arrives in time is what waiting would have given."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest

from specact import Bundle, SpeculativePolicy
from specact.errors import ConfigError
from specact.execution.verdicts import LateVerdicts
from specact.families.codes.values import executed_codes
from specact.gates import Always, Never
from specact.lab.processes import ServerProcess, serving
from specact.remote.client import Client
from specact.remote.target import remote_verifier
from specact.remote.transport import Endpoint

WaitFor = Callable[..., float]

pytestmark = pytest.mark.usefixtures("nothing_left")
PATIENT_MS = 20_000.0
SEEN = {"state": np.full(8, 0.1, np.float32), "goal": np.array([0.3, -0.2], np.float32)}


def late_policy(ball: Bundle, client: Client, sampling: Literal["device", "server"] = "device") -> SpeculativePolicy:
    verifier = remote_verifier(client, ball, PATIENT_MS, sampling)
    return SpeculativePolicy(ball, Always(), verifier=verifier, verdicts=LateVerdicts(math.inf), seed=3)


@pytest.mark.parametrize("sampling", ["device", "server"])
@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_a_verdict_replaces_the_rest_of_its_chunk(
    ball: Bundle, server: ServerProcess, wait_for: WaitFor, scheme: str, sampling: Literal["device", "server"]
) -> None:
    waiting, drafting = (SpeculativePolicy(ball, gate, seed=3) for gate in (Always(), Never()))
    with Client(Endpoint(scheme, "127.0.0.1", server.port), ball.codec.dialect) as client:
        client.connect(10.0)
        policy = late_policy(ball, client, sampling)
        client.report = policy.counts
        replaced = 0
        for chunk in range(12):
            before = policy.counts["in_time"]
            actions = [policy.act(SEEN)]
            sent = policy.record
            assert sent is not None and sent.decision.transmit
            if policy.counts["in_time"] == before:
                assert isinstance(policy._verdicts, LateVerdicts)
                under_way = policy._verdicts._in_flight
                assert under_way is not None and under_way[1] == sent.address
                wait_for(under_way[0].done)
            first_late = policy.counts["in_time"] == before  # the first action had gone before the verdict was there
            actions += [policy.act(SEEN) for _ in range(ball.spec.execute - 1)]
            verified = [waiting.act(SEEN) for _ in range(ball.spec.execute)]
            drafted = [drafting.act(SEEN) for _ in range(ball.spec.execute)]
            assert np.array_equal(actions[0], (drafted if first_late else verified)[0])
            assert np.array_equal(actions[1:], verified[1:]), chunk
            assert policy.record is not None and waiting.record is not None
            assert executed_codes(policy.record).tolist() == executed_codes(waiting.record).tolist()
            assert policy.record.outcome is not None
            replaced += ball.spec.execute - first_late
        assert policy.counts["transmitted"] == policy.counts["in_time"] == 12
        assert policy.counts["replaced"] == replaced
        assert policy.counts["accepted"] == waiting.counts["accepted"]
        assert policy.counts["missed"] == 0


def test_a_server_that_stands_still_stops_nobody(ball: Bundle) -> None:
    """A policy that waited would need its deadline of 20 s for every inference; this one goes on with the draft."""
    with serving("ball") as child, Client(Endpoint("ws", "127.0.0.1", child.port), ball.codec.dialect) as client:
        client.connect(10.0)
        policy, drafting = late_policy(ball, client), SpeculativePolicy(ball, Never(), seed=3)
        os.kill(child.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            for _ in range(10 * ball.spec.execute):
                assert np.array_equal(policy.act(SEEN), drafting.act(SEEN))
            assert time.monotonic() - started < PATIENT_MS / 1e3
        finally:
            os.kill(child.pid, signal.SIGCONT)
        # One request is under way, and no second one is sent before it is known what became of it.
        assert policy.counts["wanted"] == 10
        assert policy.counts["transmitted"] == 1
        assert policy.counts["in_time"] == 0


def test_without_a_connection_every_step_is_a_miss_at_once(ball: Bundle) -> None:
    with Client(Endpoint("ws", "127.0.0.1", 1), ball.codec.dialect) as client:
        policy, drafting = late_policy(ball, client), SpeculativePolicy(ball, Never(), seed=3)
        for _ in range(4 * ball.spec.execute):
            assert np.array_equal(policy.act(SEEN), drafting.act(SEEN))
        assert policy.counts["missed"] == 4
        assert policy.record is not None and policy.record.miss == "disconnected"


def test_what_makes_no_sense_is_refused(ball: Bundle) -> None:
    with pytest.raises(ConfigError, match="must be above 0 s"):
        SpeculativePolicy(ball, Always(), verdicts=LateVerdicts(0.0))
