"""A remote policy acts bit for bit like a local one, whatever carries its messages and wherever codes are drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from tests.children import wait_for

from specact import Bundle, SpeculativePolicy, calibrated_gate
from specact.families.codes.values import executed_codes
from specact.families.codes.verify import TargetSampler
from specact.gates import Always, Gate
from specact.lab.processes import ServerProcess, serving
from specact.remote.client import Client
from specact.remote.target import RemoteTarget, remote_verifier
from specact.remote.transport import Endpoint
from specact.types import StepRecord
from specact.verification import LocalTarget, Verifier

STEPS = 1000
PATIENT_MS = 20_000.0


def observations(bundle: Bundle, seed: int) -> np.ndarray:
    """A walk through the state space, clipped to where the policies were trained."""
    rng = np.random.default_rng(seed)
    walk = np.cumsum(0.05 * rng.standard_normal((STEPS, *bundle.observation["state"].shape)), axis=0)
    return np.asarray(np.clip(walk, -1.0, 1.0))


@dataclass
class Player:
    """Steps a policy through observations, one inference per step, starting an episode every 200."""

    bundle: Bundle
    policy: SpeculativePolicy
    seed: int

    def __post_init__(self) -> None:
        self.walk = observations(self.bundle, self.seed)
        self.records: list[StepRecord] = []
        self.actions: list[np.ndarray] = []
        self.count = itertools.count()

    def step(self) -> None:
        i = next(self.count)
        if i % 200 == 0:
            self.policy.reset(i // 200)
        goal = np.array([0.3, -0.2])
        self.actions.append(self.policy.act({"state": self.walk[i], "goal": goal}))
        while not self.policy.wants_inference:
            self.actions.append(self.policy.act({"state": self.walk[i], "goal": goal}))
        assert self.policy.record is not None
        self.records.append(self.policy.record)

    def run(self, steps: int = STEPS) -> Player:
        for _ in range(steps):
            self.step()
        return self


def assert_same(remote: Player, local: Player) -> None:
    assert [record.miss for record in remote.records] == [None] * len(remote.records)
    for ours, theirs in zip(remote.records, local.records, strict=True):
        assert executed_codes(ours).tolist() == executed_codes(theirs).tolist()
        assert ours.decision == theirs.decision
        assert ours.origins.tolist() == theirs.origins.tolist()
        if theirs.outcome is not None:
            assert ours.outcome is not None
            verdict, expected = ours.outcome.evidence.verdict, theirs.outcome.evidence.verdict
            assert verdict.accepted.tolist() == expected.accepted.tolist()
            np.testing.assert_array_equal(verdict.rejection, expected.rejection)
    np.testing.assert_array_equal(np.stack(remote.actions), np.stack(local.actions))


def gates(bundle: Bundle) -> dict[str, Callable[[], Gate]]:
    return {"always": Always, "deviation": lambda: calibrated_gate(bundle, "deviation", 0.6)}


@pytest.mark.parametrize("scheme", ["ws", "http"])
@pytest.mark.parametrize("sampling", ["device", "server"])
def test_a_thousand_steps_are_those_of_a_local_policy(
    ball: Bundle, server: ServerProcess, scheme: str, sampling: str
) -> None:
    make = gates(ball)["deviation"]
    local = Player(ball, SpeculativePolicy(ball, make(), seed=5, robot=1), seed=0).run()
    with Client(Endpoint(scheme, "127.0.0.1", server.port), ball.codec.dialect) as client:
        client.connect(10.0)
        verifier = remote_verifier(client, ball, PATIENT_MS, sampling)  # type: ignore[arg-type]
        policy = SpeculativePolicy(ball, make(), verifier=verifier, seed=5, robot=1)
        remote = Player(ball, policy, seed=0).run()
    assert_same(remote, local)
    verified = sum(record.outcome is not None for record in remote.records)
    assert 0.3 * STEPS < verified < STEPS
    assert client.counts["sent"] == verified


def test_the_remote_target_draws_what_the_local_one_draws(ball: Bundle, server: ServerProcess) -> None:
    here = TargetSampler(LocalTarget(ball.target), ball.tokenizer)
    local = Player(ball, SpeculativePolicy(ball, Always(), verifier=here, seed=2), seed=1).run(200)
    with Client(Endpoint("ws", "127.0.0.1", server.port), ball.codec.dialect) as client:
        client.connect(10.0)
        there = TargetSampler(RemoteTarget(client, ball.codec, PATIENT_MS), ball.tokenizer)
        remote = Player(ball, SpeculativePolicy(ball, Always(), verifier=there, seed=2), seed=1).run(200)
    assert_same(remote, local)


@pytest.mark.parametrize("sampling", ["device", "server"])
def test_a_reconnection_in_between_changes_nothing(ball: Bundle, sampling: str) -> None:
    local = Player(ball, SpeculativePolicy(ball, Always(), seed=5), seed=0).run()
    with serving("ball") as first, Client(Endpoint("ws", "127.0.0.1", first.port), ball.codec.dialect) as client:
        client.connect(10.0)
        verifier = remote_verifier(client, ball, PATIENT_MS, sampling)  # type: ignore[arg-type]
        remote = Player(ball, SpeculativePolicy(ball, Always(), verifier=verifier, seed=5), seed=0).run(STEPS // 2)
        port = first.port
        first.kill()
        with serving("ball", "--port", str(port)):
            wait_for(lambda: client.problem is None and client.counts["connections"] == 2)
            remote.run(STEPS // 2)
    assert_same(remote, local)


def test_two_interleaved_robots_act_as_each_does_alone(ball: Bundle, server: ServerProcess) -> None:
    def player(verifier: Verifier | None, robot: int) -> Player:
        return Player(ball, SpeculativePolicy(ball, Always(), verifier=verifier, seed=5, robot=robot), seed=robot)

    endpoint = Endpoint("ws", "127.0.0.1", server.port)
    alone = [player(None, robot).run() for robot in (0, 1)]
    with Client(endpoint, ball.codec.dialect, "one") as one, Client(endpoint, ball.codec.dialect, "two") as two:
        for client in (one, two):
            client.connect(10.0)
        together = [player(remote_verifier(client, ball, PATIENT_MS), robot) for robot, client in enumerate((one, two))]
        for _ in range(STEPS):
            for remote in together:
                remote.step()
    for remote, local in zip(together, alone, strict=True):
        assert_same(remote, local)
    # The streams differ by robot, so the two did not merely do the same.
    assert [executed_codes(r).tolist() for r in alone[0].records] != [
        executed_codes(r).tolist() for r in alone[1].records
    ]


def test_codes_of_a_batch_are_those_of_single_requests_away_from_ties(ball: Bundle) -> None:
    """Batching changes the last bits of a float, so codes agree except where a uniform falls between two sums.

    Tolerance: probabilities agree to 1e-5, on whichever processor; a code may differ only where the step's uniform lies
    that close to the edge of its interval. The chance of that is below 1e-5 * K per draw, and two draws in 1,600 steps
    are the most that is let pass.
    """
    from specact.families.codes.sampling import sample_codes
    from specact.observation import Window
    from specact.rng import Role, stream

    rng = np.random.default_rng(3)
    windows = [
        Window(
            {
                name: rng.uniform(-1, 1, ball.spec.target[name].window_shape).astype(np.float32)
                for name in ("state", "goal")
            }
        )
        for _ in range(1600)
    ]
    differing = 0
    for start in range(0, len(windows), 16):
        batch = windows[start : start + 16]
        for i, (window, together) in enumerate(zip(batch, ball.target.infer_batch(batch), strict=True)):
            alone = ball.target.infer(window)
            assert np.abs(alone.probs - together.probs).max() < 1e-5
            np.testing.assert_allclose(together.offsets, alone.offsets, atol=1e-5)
            draws = [sample_codes(law, stream(0, Role.VERIFY, step=start + i)).tolist() for law in (alone, together)]
            differing += draws[0] != draws[1]
    assert differing <= 2
