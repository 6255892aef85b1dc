"""FLASH: its check where the flow is known in closed form, and rounds of a flow policy, here and over a real server."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.served import served, verifying

from specact.bundle.bundle import find_bundle
from specact.errors import BundleError, ConfigError, WireError
from specact.families.chunks.flow import FlowPolicy, load_flow
from specact.families.chunks.pair import accepted_length
from specact.gates.gate import Always, Never
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.processes import serving
from specact.load import load_exchange, load_pair, load_policy
from specact.observation import ObservationHistory, Window
from specact.pair import Pair
from specact.policy import SpeculativePolicy
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.target import remote_verifier
from specact.rng import Role, StepAddress, streams
from specact.systems.flash import (
    Check,
    Round,
    RoundRequest,
    Rounds,
    deviations,
    implied,
    judge,
    noised,
)
from specact.systems.flow import ROUNDS, load_flash, load_flow_pair
from specact.types import OffloadTimes, Origin, Proposal, StepRecord
from specact.wire.exchange import Exchange, Request

LEVELS = np.array([0.05, 0.1, 0.4, 1.0], np.float32)


def chunks(seed: int, count: int = 6, width: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    drafted, clean, noise = (rng.standard_normal((count, width)).astype(np.float32) for _ in range(3))
    return drafted, clean, noise


def estimates(drafted: np.ndarray, clean: np.ndarray, noise: np.ndarray, expert: str) -> np.ndarray:
    x = noised(drafted, noise, LEVELS)
    # Both of a flow with a single clean chunk: the straight path's velocity, and the ideal denoiser's.
    velocity = np.broadcast_to(clean - noise, x.shape) if expert == "constant" else (clean - x) / LEVELS[:, None, None]
    return implied(x, velocity, LEVELS)


def rms(difference: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(np.square(difference).mean(-1)))


@pytest.mark.parametrize("seed", range(5))
def test_the_deviation_is_known_for_experts_in_closed_form(seed: int) -> None:
    """A constant velocity scales the true error by the share of noise; an ideal denoiser gives it at any noise."""
    drafted, clean, noise = chunks(seed)
    error = rms(drafted - clean)
    deviation = deviations(drafted, estimates(drafted, clean, noise, "constant"))
    np.testing.assert_allclose(deviation, LEVELS[:, None] * error, rtol=1e-4, atol=1e-6)
    deviation = deviations(drafted, estimates(drafted, clean, noise, "denoiser"))
    np.testing.assert_allclose(deviation, np.broadcast_to(error, deviation.shape), rtol=1e-3, atol=1e-5)
    for expert in ("constant", "denoiser"):  # a draft without error is accepted whole
        assert accepted_length(deviations(clean, estimates(clean, clean, noise, expert)), 1e-4) == len(clean)


bounded = st.integers(0, 2**32 - 1)


@given(seed=bounded, low=st.floats(0, 2), more=st.floats(0, 2))
@settings(deadline=None, max_examples=100)
def test_accepted_length_grows_with_delta_and_not_with_another_share(seed: int, low: float, more: float) -> None:
    deviation = np.random.default_rng(seed).exponential(size=(4, 8)).astype(np.float32)
    assert accepted_length(deviation, low) <= accepted_length(deviation, low + more)
    assert accepted_length(deviation, low) <= accepted_length(deviation[:3], low)
    # As it is written in the paper.
    lengths = [int(np.cumprod(row <= low).sum()) for row in deviation]
    assert accepted_length(deviation, low) == (min(lengths) if low > 0.0 else 0)
    assert accepted_length(np.zeros((2, 5), np.float32), 0.0) == 0
    assert accepted_length(np.array([[0.0, np.nan, 0.0]], np.float32), 1.0) == 1


def test_a_gripper_is_no_part_of_the_distance_unless_there_is_nothing_else() -> None:
    drafted = np.zeros((2, 3), np.float32)
    estimate = np.array([[[3.0, 4.0, 100.0]] * 2], np.float32)
    np.testing.assert_allclose(deviations(drafted, estimate, (2,)), np.sqrt(12.5), rtol=1e-6)
    np.testing.assert_allclose(deviations(drafted[:, 2:], estimate[..., 2:], (0,)), 100.0)


STILL, OPENING = [-1.0] * 4, [-1.0, -1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("drafted", "estimated", "guards", "held", "wanted"),
    [
        (STILL, STILL, True, False, (4, False)),
        # The flow wants to move the gripper, and the draft does not know; or only the draft wants to.
        (STILL, OPENING, True, False, (0, True)),
        (OPENING, STILL, True, False, (2, True)),
        (OPENING, OPENING, True, True, (0, True)),
        (OPENING, STILL, True, None, (2, True)),
        (OPENING, OPENING, False, False, (4, False)),
    ],
)
def test_guards(
    drafted: list[float], estimated: list[float], guards: bool, held: bool | None, wanted: tuple[int, bool]
) -> None:
    """The gripper is the second dimension; its deviation is not counted."""
    chunk, estimate = (np.array([[0.0, value] for value in values], np.float32) for values in (drafted, estimated))
    closed, check = None if held is None else np.array([held]), Check((0.1,), 1.0, guards)
    deviation = deviations(chunk, estimate[None], (1,))
    assert judge(check, deviation, chunk, estimate[None], (1,), np.zeros(1, np.float32), closed) == wanted
    assert judge(check, deviation, chunk, estimate[None], (), np.zeros(0, np.float32), closed) == (4, False)


PATIENT_MS = 30_000.0
BUNDLE = "pusht-flow"


def windows(count: int) -> list[Window]:
    """Observations of a robot that follows the target, eight actions of a chunk at a time."""
    bundle = load_flow(BUNDLE)
    robot, history = SimulatedRobot(load_task("pusht")), ObservationHistory(bundle.spec.observation)
    robot.start(7)
    seen = []
    for number in range(count):
        seen.append(history.push(robot.observe()))
        for action in bundle.policy().infer(seen[-1], np.random.default_rng(number))[:8]:
            robot.act(action)
            history.push(robot.observe())
        if robot.done:
            robot.start(8 + number)
            history.reset()
    return seen


SEEN = windows(40)


@pytest.fixture(scope="module")
def pair() -> Pair[Any]:
    return load_flow_pair(load_flow(BUNDLE))


def composed(pair: Pair[Any], rounds: Rounds | str, **settings: Any) -> Pair[Any]:
    chosen = ROUNDS[rounds] if isinstance(rounds, str) else rounds
    return pair.composed(rounds=chosen, settings=replace(pair.parts.settings, **settings))


def played(pair: Pair[Any], inferences: int = len(SEEN), **parts: Any) -> tuple[list[np.ndarray], list[StepRecord]]:
    """What the robot did between one inference and the next, and the records."""
    policy = SpeculativePolicy(pair, parts.pop("gate", Always()), **parts)
    actions, records = [], []
    for window in SEEN[:inferences]:
        done = [policy.act_on(window)]
        while not policy.wants_inference:
            done.append(policy.act_on(window))
        actions.append(np.stack(done))
        assert policy.record is not None
        records.append(policy.record)
    return actions, records


def round_of(record: StepRecord) -> Round:
    assert record.outcome is not None
    evidence: Round = record.outcome.evidence
    return evidence


def own_answers(policy: FlowPolicy, count: int = len(SEEN)) -> list[np.ndarray]:
    rngs = streams(Role.VERIFY, [StepAddress(0, 0, 0, step) for step in range(count)])
    return [policy.infer(window, rng) for window, rng in zip(SEEN, rngs, strict=False)]


def same(actions: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert [len(chunk) for chunk in actions] == [len(chunk) for chunk in wanted]
    np.testing.assert_array_equal(np.concatenate(actions), np.concatenate(wanted))


@pytest.mark.parametrize("steps", [1, 10])
def test_full_rounds_are_the_flow_itself(pair: Pair[Any], steps: int) -> None:
    actions, records = played(composed(pair, replace(ROUNDS["full"], steps=steps)))
    policy = FlowPolicy(pair.parts.policy.networks, pair.parts.policy.units, pair.parts.policy.spec, steps=steps)
    wanted = [chunk[: pair.execute] for chunk in own_answers(policy)]
    np.testing.assert_allclose(np.concatenate(actions), np.concatenate(wanted), atol=1e-3)
    assert all((record.origins == Origin.REPLACED).all() for record in records)


def reference(pair: Pair[Any], check: Check, period: int) -> list[tuple[bool, np.ndarray]]:
    """The algorithm as it is in the paper, with loops and without this package's check: full or not, and actions."""
    policy, networks, units = pair.parts.policy, pair.parts.policy.networks, pair.parts.policy.units
    assert pair.parts.block is not None
    rounds, since, due = list[tuple[bool, np.ndarray]](), 0, True
    for step, window in enumerate(SEEN):
        (rng,) = streams(Role.VERIFY, [StepAddress(0, 0, 0, step)])
        start = rng.standard_normal((policy.spec.chunk, policy.spec.actions), dtype=np.float32)
        cache, length = networks.cache([window]), 0
        drafted = pair.parts.block.chunks(networks.tokens([window]))[0]
        drafted = units.to_flow(units.to_environment(drafted))
        if not due and not 0 < period <= since:
            noise = rng.standard_normal(start.shape, dtype=np.float32)
            lengths = []
            for level in check.levels:
                s = np.float32(level)
                x = s * noise + (1 - s) * drafted
                v = networks.velocity(x[None], np.array([1 - s]), cache)[0]
                away = np.sqrt(np.mean((x + s * v - drafted) ** 2, axis=1))
                inside = 0
                while inside < pair.execute and away[inside] <= check.within:
                    inside += 1
                lengths.append(inside)
            length = min(lengths)
        if length:
            since, due = since + 1, False
            rounds.append((False, units.to_environment(drafted)[:length]))
        else:
            since, due = 0, False
            rounds.append((True, policy.to_environment(policy.denoised(start[None], cache, 10)[0])[: pair.execute]))
    return rounds


@pytest.mark.parametrize(
    ("levels", "within", "period"), [((0.1, 0.05), 0.15, 4), ((0.8,), 0.2, 0), ((0.4, 1.0), 0.5, 2)]
)
def test_rounds_are_those_of_the_paper(pair: Pair[Any], levels: tuple[float, ...], within: float, period: int) -> None:
    rounds = replace(ROUNDS["flash"], levels=levels, within=within)
    executed, records = played(composed(pair, rounds, period=period))
    wanted = reference(pair, Check(levels, within), period)
    assert [round_of(record).full for record in records] == [full for full, _ in wanted]
    for actions, (_, expected) in zip(executed, wanted, strict=True):
        np.testing.assert_allclose(actions, expected, atol=2e-3)
    # Both happen, or the test would say little.
    assert 0.05 < np.mean([full for full, _ in wanted]) < 1.0


@pytest.fixture(scope="module")
def server() -> Any:
    dialect = load_flow_pair(load_flow(BUNDLE)).exchange.contract
    with serving(BUNDLE) as process, Client(Endpoint("ws", "127.0.0.1", process.port), dialect, "test") as client:
        client.connect(30.0)
        yield client


@pytest.mark.parametrize("rounds", ["full_2", "flash", "flash_device", "flash_last"])
def test_over_a_server_it_is_the_same(pair: Pair[Any], server: Client, rounds: str) -> None:
    """Bit for bit: the question holds all that the server needs."""
    chosen = composed(pair, rounds)
    here, known = played(chosen, seed=5)
    remote, records = played(chosen, seed=5, verifier=remote_verifier(server, chosen, PATIENT_MS))
    assert all(record.miss is None for record in records)
    same(remote, here)
    for told, kept in zip(map(round_of, records), map(round_of, known), strict=True):
        assert (told.accepted, told.checked, told.switches) == (kept.accepted, kept.checked, kept.switches)


def test_a_full_round_that_is_due_stays_due_where_a_step_is_skipped(pair: Pair[Any]) -> None:
    """A skipped step shows the target nothing: neither an episode's start nor a gripper's change is over."""
    skipped = played(pair, 1, gate=Never())[1][0]
    switching = played(composed(pair, replace(ROUNDS["flash"], within=1e6)), 2)[1][1]
    assert switching.outcome is not None and round_of(switching).checked
    switched = replace(switching.outcome, evidence=replace(round_of(switching), switches=True))

    def tell(record: StepRecord) -> None:
        drafter.on_inference(record)
        if record.outcome is not None:
            drafter.on_verified(record)

    drafter, rng = cast(Any, composed(pair, "flash", period=0).drafter()), np.random.default_rng(0)
    assert drafter.propose(SEEN[0], rng).evidence.full
    for known in ((), (replace(switching, result=switched),)):
        drafter.reset()
        for record in (*known, skipped):
            tell(record)
        assert drafter.propose(SEEN[0], rng).evidence.full
    tell(replace(switching, result=switched))
    assert drafter.propose(SEEN[0], rng).evidence.full
    tell(switching)
    assert not drafter.propose(SEEN[0], rng).evidence.full


def arrays_of(pair: Pair[Any], question: RoundRequest) -> dict[str, np.ndarray]:
    return dict(verifying(pair).request(Proposal(SEEN[0], np.zeros((1, 2), np.float32), question)))


def respond(exchange: Exchange[Any], arrays: dict[str, np.ndarray]) -> Any:
    try:
        (answer,) = served(exchange, "verify", [Request(SEEN[0], StepAddress(0, 0, 0, 0), arrays)])
    except WireError as error:
        return error
    return answer


def test_what_a_gripper_holds_reaches_the_server(pair: Pair[Any]) -> None:
    """The same draft is accepted where the gripper already is as the draft wants it, and not where it is not."""
    gripping, seen, here = composed(pair, "flash", grippers=(1,)), set[tuple[int, ...]](), StepAddress(0, 0, 0, 0)
    for window in SEEN:
        lengths = []
        for held in (True, False):
            question = RoundRequest(False, check=Check((0.05,), 100.0), held=np.array([held]))
            arrays = verifying(gripping).request(Proposal(window, np.zeros((1, 2), np.float32), question))
            (answer,) = served(gripping.exchange, "verify", [Request(window, here, dict(arrays))])
            local = gripping.target().answer(window, here).round(question)
            assert not isinstance(answer, WireError)
            told = [answer[name].item() for name in ("accepted", "checked", "switches")]
            assert told == [local.accepted, local.checked, local.switches]
            lengths.append(local.accepted)
        seen.add(tuple(lengths))
    assert any(closed != opened for closed, opened in seen)


def test_a_server_cannot_have_more_accepted_than_is_executed(pair: Pair[Any]) -> None:
    reply = pair.exchange.contract.kinds["verify"].reply.example() | {"accepted": np.array([16], np.int16)}
    outcome = verifying(pair).outcome(reply, OffloadTimes())
    assert len(outcome.actions) == outcome.accepted == pair.execute < 16


@pytest.mark.parametrize(
    ("checks", "level", "said"), [(1, 0.1, "no block"), (2, 0.0, "noise levels"), (3, 0.1, "0 to 2")]
)
def test_what_a_server_cannot_do_is_refused(pair: Pair[Any], checks: int, level: float, said: str) -> None:
    arrays = arrays_of(pair, RoundRequest(True))
    arrays["checks"][:], arrays["levels"][:] = checks, level
    answer = respond(pair.composed(block=None).exchange, arrays)
    assert isinstance(answer, WireError) and answer.code == "bad_message" and said in str(answer)


@pytest.mark.parametrize("served_steps", [None, 3])
def test_no_request_has_more_steps_than_the_served_policy(pair: Pair[Any], served_steps: int | None) -> None:
    exchange, most = load_exchange(BUNDLE, steps=served_steps), served_steps or 10
    assert exchange.contract.stated["steps"] == most
    for full in (True, False):
        for steps in (0, 1, most, most + 1, 100):
            answer = respond(exchange, arrays_of(pair, RoundRequest(full, steps=steps)))
            if 1 <= steps <= most:
                assert not isinstance(answer, WireError)
            else:
                assert answer.code == "bad_message" and "steps" in str(answer) and f"1 to {most}" in str(answer)


def test_a_pair_that_asks_for_more_steps_is_refused_before_a_robot_moves(pair: Pair[Any]) -> None:
    spec = load_exchange(BUNDLE, steps=2).contract.stated
    client: Any = SimpleNamespace(welcome=SimpleNamespace(spec=spec))
    remote_verifier(client, composed(pair, "full_2"), PATIENT_MS)
    for rounds in ("full", "full_3", "flash"):
        with pytest.raises(ConfigError, match="2 Euler steps at most"):
            remote_verifier(client, composed(pair, rounds), PATIENT_MS)


def test_rounds_of_a_batch_are_those_alone_and_cheap_ones_can_go_first(pair: Pair[Any]) -> None:
    """Full rounds of 1, 2 and 10 steps, and checks that pass and fail, side by side."""
    exchange: Any = pair.exchange
    questions = [RoundRequest(True, steps=steps) for steps in (10, 1, 2, 10, 1)]
    questions += [RoundRequest(False, check=Check((0.05,), within), steps=2) for within in (100.0, 0.0)]
    requests = [
        Request(window, StepAddress(0, row, 0, 0), arrays_of(pair, questions[row % len(questions)]))
        for row, window in enumerate(SEEN[: 3 * len(questions)])
    ]
    together = served(exchange, "verify", requests)
    for request, answer in zip(requests, together, strict=True):
        (alone,) = served(exchange, "verify", [request])
        assert not isinstance(answer, WireError) and not isinstance(alone, WireError)
        for name, values in alone.items():
            np.testing.assert_allclose(answer[name] + 0.0, values + 0.0, atol=1e-3)
    work = [exchange.work("verify", request) for request in requests]
    steps = [question.steps + (not question.full) for question in questions] * 3
    assert np.argsort(work, kind="stable").tolist() == np.argsort(steps, kind="stable").tolist()
    assert len(set(work)) == 4 and max(work) == exchange.work("infer", requests[0])


def test_no_question_within_the_dialect_hurts_the_server(pair: Pair[Any]) -> None:
    """100 questions of numbers that are allowed and make no sense; each is answered, or refused with a sentence."""
    rng = np.random.default_rng(0)
    answered = 0
    for _ in range(100):
        arrays = arrays_of(pair, RoundRequest(False))
        arrays["drafted"] = (10.0 ** rng.uniform(-3, 38) * rng.standard_normal((16, 2))).astype(np.float32)
        arrays["levels"] = rng.uniform(0.0, 1.0, 4).astype(np.float32) * (rng.random(4) < 0.6)
        arrays["within"] = (10.0 ** rng.uniform(-3, 38, 1)).astype(np.float32)
        arrays["held"], arrays["known"] = rng.random(2) < 0.5, rng.random(1) < 0.5
        arrays["checks"][:], arrays["steps"][:], arrays["guarded"][:] = rng.integers(0, [4, 4, 2])
        answer = respond(pair.exchange, arrays)
        if not isinstance(answer, WireError):
            answered += 1
    assert answered > 30


def test_what_needs_a_block_or_a_draft_says_so(pair: Pair[Any]) -> None:
    with pytest.raises(ConfigError, match='kind = "flash"'):
        pair.composed(block=None, rounds=ROUNDS["flash"]).drafter()
    with pytest.raises(ConfigError, match="--draft"):
        composed(pair, "flash_policy").drafter()


def test_a_flow_policy_is_loaded_as_a_pair() -> None:
    pair = load_pair(BUNDLE, decoding="flash")
    assert pair.parts.rounds == ROUNDS["flash"] and pair.parts.block is not None
    assert load_pair(BUNDLE, draft=BUNDLE, decoding="flash_policy").fingerprint != pair.fingerprint


def test_without_a_block_the_whole_chunk_is_executed(tmp_path: Path) -> None:
    shutil.copytree(find_bundle(BUNDLE), tmp_path / "alone", ignore=shutil.ignore_patterns("flash"))
    pair = load_flow_pair(load_flow(tmp_path / "alone"))
    assert pair.execute == pair.parts.policy.spec.chunk and pair.parts.block is None


def test_a_block_of_another_target_is_refused(tmp_path: Path) -> None:
    policy, flash = load_policy("ball-chase-flow"), find_bundle(BUNDLE) / "flash"
    with pytest.raises(BundleError, match="made for the target"):
        load_flash(flash, policy)
    shutil.copytree(flash, tmp_path / "flash")
    (tmp_path / "flash" / "block.onnx").write_bytes(b"no network")
    with pytest.raises(BundleError):
        load_flash(tmp_path / "flash", load_policy(BUNDLE))
