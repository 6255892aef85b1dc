"""What a server may send instead of an answer: nothing but this step's own, valid and in time, moves a robot."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from specact import Bundle
from specact.fallback import Fallback
from specact.families.codes.values import CodeDistribution
from specact.remote.client import Client, ClientSettings
from specact.remote.transport import Endpoint
from specact.wire import msgpack
from specact.wire.checks import ErrorCode
from specact.wire.messages import ErrorReply, reply_fields
from specact.wire.sizes import max_message_bytes

if TYPE_CHECKING:
    from tests.remote.conftest import Misbehaving, Peer, Robot, Rogue

Make = Callable[..., "Robot"]
Request = Any
Behave = Callable[["Rogue", "Peer", Request], None]

pytestmark = pytest.mark.usefixtures("nothing_left")
# Where nothing is to be waited for, no noise of the machine shall make a step miss.
PATIENT_MS = 1000.0


def ride(rogue: Rogue, rover: Robot, behave: Behave, steps: int = 6) -> None:
    """Some steps as it should be, some with a server that behaves so, and on until it is as it should be again."""
    rover.play(4)
    rogue.behave = lambda peer, request: behave(rogue, peer, request)
    rover.play(steps)
    rogue.behave = rogue.honest
    wanted, until = rover.verified + 4, time.monotonic() + 60.0
    rover.run(lambda: rover.verified < wanted and time.monotonic() < until, period_s=0.01)
    assert rover.verified >= wanted


def assert_nothing_twice(rogue: Rogue) -> None:
    """No request left twice, under whatever id."""
    assert max(Counter(request.id for request in rogue.requests).values()) == 1
    assert max(Counter(request.window["state"].tobytes() for request in rogue.requests).values()) == 1


# ---- the right id, and something that is no answer ------------------------------------------------------------------


def changed(**fields: Any) -> Behave:
    """Answers with these fields instead of the right ones; None leaves one out."""

    def behave(rogue: Rogue, peer: Peer, request: Request) -> None:
        reply = {name: value for name, value in (rogue.answer(request) | fields).items() if value is not None}
        peer.say(reply)

    return behave


def probs(change: Callable[[np.ndarray], Any]) -> Behave:
    return lambda rogue, peer, request: changed(probs=change(rogue.answer(request)["probs"]))(rogue, peer, request)


def offsets(change: Callable[[np.ndarray], Any]) -> Behave:
    return lambda rogue, peer, request: changed(offsets=change(rogue.answer(request)["offsets"]))(rogue, peer, request)


def times(**fields: Any) -> Behave:
    return changed(times={"queue_ms": 0.0, "target_ms": 0.0, "total_ms": 0.0, "batch": 1} | fields)


def put(array: np.ndarray, value: float) -> np.ndarray:
    """The array with this value in its first place."""
    other = array.copy()
    other.flat[0] = value
    return other


NO_ANSWER: dict[str, Behave] = {
    "probs of fewer codes": probs(lambda p: np.full((2, 8), 0.125)),
    "probs of one codebook": probs(lambda p: p[:1]),
    "probs of one axis": probs(lambda p: p.ravel()),
    "probs in single precision": probs(lambda p: p.astype(np.float32)),
    "probs that are NaN": probs(lambda p: put(p, np.nan)),
    "probs that are infinite": probs(lambda p: put(p, np.inf)),
    "probs that do not sum to one": probs(lambda p: 0.99 * p),
    "probs below zero": probs(lambda p: p + np.eye(2, 16) - np.eye(2, 16, k=3)),
    "probs as a list": probs(lambda p: p.tolist()),
    "no probs": changed(probs=None),
    "offsets of a shorter chunk": offsets(lambda o: o[:, :, :-1]),
    "offsets in double precision": offsets(lambda o: o.astype(np.float64)),
    "offsets that are NaN": offsets(lambda o: put(o, np.nan)),
    "offsets that are infinite": offsets(lambda o: put(o, -np.inf)),
    "another version": changed(v=1),
    "no version": changed(v=None),
    "another type": changed(type="welcome"),
    "a type that is none": changed(type=[1]),
    "a verdict": changed(
        type="verdict",
        codes=np.zeros(2, np.int64),
        accepted=np.ones(2, np.bool_),
        rejection=np.zeros(2),
        chunk=np.zeros((5, 2), np.float32),
    ),
    "no times": changed(times=None),
    "times that are NaN": times(total_ms=float("nan")),
    "times below zero": times(queue_ms=-1.0),
    "a batch of none": times(batch=0),
    "an error of an unknown code": changed(type="error", code="tired", message="no"),
    "an error without a sentence": changed(type="error", code="expired", message=7),
}


@pytest.mark.parametrize("gated", [False, True], ids=["always", "gated"])
@pytest.mark.parametrize("behave", NO_ANSWER.values(), ids=NO_ANSWER.keys())
def test_what_is_no_valid_answer_is_a_miss(
    ball: Bundle, misbehaving: Misbehaving, robot: Make, behave: Behave, gated: bool
) -> None:
    with misbehaving() as rogue, Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client, gated=gated, deadline_ms=PATIENT_MS)
        ride(rogue, rover, behave)
        rover.check("invalid")
        assert rover.causes["invalid"] >= (1 if gated else 6)
        assert client.counts["connections"] == 1
        assert_nothing_twice(rogue)


VERDICTS: dict[str, Behave] = {
    "codes out of range": changed(codes=np.array([0, 16])),
    "codes below zero": changed(codes=np.array([-1, 0])),
    "codes that are no integers": changed(codes=np.zeros(2)),
    "codes of three codebooks": changed(codes=np.zeros(3, np.int64)),
    "a chunk that is NaN": changed(chunk=np.full((5, 2), np.nan, np.float32)),
    "a chunk of one action": changed(chunk=np.zeros((1, 2), np.float32)),
    "a rejection above one": changed(rejection=np.array([0.0, 1.5])),
    "a rejection that is NaN": changed(rejection=np.array([0.0, np.nan])),
    "an acceptance in numbers": changed(accepted=np.ones(2)),
    "a distribution": lambda rogue, peer, request: peer.say(
        rogue.answer(request)
        | {"type": "distribution", "probs": np.full((2, 16), 1 / 16), "offsets": np.zeros((2, 16, 5, 2), np.float32)}
    ),
}


@pytest.mark.parametrize("behave", VERDICTS.values(), ids=VERDICTS.keys())
def test_what_is_no_valid_verdict_is_a_miss(
    ball: Bundle, misbehaving: Misbehaving, robot: Make, behave: Behave
) -> None:
    with misbehaving() as rogue, Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client, sampling="server", deadline_ms=PATIENT_MS)
        ride(rogue, rover, behave)
        rover.check("invalid")
        assert rover.causes["invalid"] == 6
        assert_nothing_twice(rogue)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_an_error_is_a_miss_of_its_kind(ball: Bundle, misbehaving: Misbehaving, robot: Make, code: ErrorCode) -> None:
    def behave(rogue: Rogue, peer: Peer, request: Request) -> None:
        peer.say(reply_fields(ErrorReply(request.id, code, "no")))

    with misbehaving() as rogue, Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client, deadline_ms=PATIENT_MS)
        ride(rogue, rover, behave)
        cause = {ErrorCode.OVERLOADED: "overloaded", ErrorCode.EXPIRED: "expired"}.get(code, "refused")
        rover.check(cause)
        assert rover.causes == {cause: 6}
        assert client.counts["connections"] == 1


@pytest.mark.parametrize("claimed", [{"total_ms": 1e9}, {"queue_ms": 1e9}, {"target_ms": 1e9}, {"total_ms": True}])
def test_times_a_server_cannot_have_needed_spoil_no_record(
    ball: Bundle, misbehaving: Misbehaving, robot: Make, claimed: dict[str, Any]
) -> None:
    with misbehaving() as rogue, Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client, deadline_ms=PATIENT_MS)
        ride(rogue, rover, times(**claimed))
        rover.check("invalid")
        for step in rover.steps:
            spent = dataclasses.astuple(step.record.times.offload)
            assert min(spent) >= 0.0 and sum(spent) <= step.stall
            assert 0.0 <= step.record.times.finish <= step.stall


# ---- an answer, but not this step's ---------------------------------------------------------------------------------


def duplicated(rogue: Rogue, peer: Peer, request: Request) -> None:
    for _ in range(3):
        peer.say(rogue.answer(request))


def after_the_last_one(rogue: Rogue, peer: Peer, request: Request) -> None:
    """First the answer to the request before, then this one's."""
    peer.say(rogue.answer(rogue.requests[-2]))
    peer.say(rogue.answer(request))


def before_the_last_one(rogue: Rogue, peer: Peer, request: Request) -> None:
    """Every second request is answered with the next one, after it."""
    if len(rogue.requests) % 2:
        peer.say(rogue.answer(request))
        peer.say(rogue.answer(rogue.requests[-2]))


def under_another_id(identity: Callable[[int], Any]) -> Behave:
    """What is wanted, under an id that is not; then another step's answer under none of ours."""

    def behave(rogue: Rogue, peer: Peer, request: Request) -> None:
        peer.say(rogue.answer(request) | {"id": identity(request.id)})

    return behave


def preceded_by(payload: Any) -> Behave:
    """The right answer, after something that is none."""

    def behave(rogue: Rogue, peer: Peer, request: Request) -> None:
        peer.say(payload)
        peer.say(rogue.answer(request))

    return behave


HARMLESS: dict[str, tuple[Behave, str]] = {
    "duplicated": (duplicated, "unwanted"),
    "after the last one": (after_the_last_one, "unwanted"),
    "after a foreign id": (preceded_by({"v": 2, "type": "distribution", "id": 10**9}), "unwanted"),
    "after garbage": (preceded_by(b"\xc1\xff" * 40), "unreadable"),
    "after nothing": (preceded_by(b""), "unreadable"),
    "after text": (preceded_by("how are you?"), "unreadable"),
    "after a number": (preceded_by(msgpack.encode({"a": 1})[1:]), "unreadable"),
    "after a nest of lists": (preceded_by(b"\x91" * 5000), "unreadable"),
    "after an object": (preceded_by(b"\x81\xa1a\xc7\x02\x02\x00\x00"), "unreadable"),
    "after a huge array": (preceded_by(b"\x81\xa1a\xc7\x0a\x01\x01\x02" + b"\xff" * 8), "unreadable"),
    "after an error without an id": (
        preceded_by(reply_fields(ErrorReply(None, ErrorCode.BAD_MESSAGE, "what?"))),
        "unreadable",
    ),
    # Of a sequential secondary head, which both sides have agreed not to have; like any field that is not known.
    "with a field of another spec": (changed(conditional=np.full((16, 16), 1 / 16)), "late"),
    "in many pieces": (lambda rogue, peer, request: peer.say(rogue.answer(request), pieces=50), "late"),
}


@pytest.mark.parametrize("gated", [False, True], ids=["always", "gated"])
@pytest.mark.parametrize(("behave", "counted"), HARMLESS.values(), ids=HARMLESS.keys())
def test_the_answer_is_found_among_others(
    ball: Bundle, misbehaving: Misbehaving, robot: Make, behave: Behave, counted: str, gated: bool
) -> None:
    with misbehaving() as rogue, Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client, gated=gated, deadline_ms=PATIENT_MS)
        ride(rogue, rover, behave)
        rover.check()  # no miss at all
        assert client.counts[counted] > 0 or counted == "late"
        assert client.counts["connections"] == 1
        assert_nothing_twice(rogue)


LOST: dict[str, Behave] = {
    "the id of an earlier step": under_another_id(lambda identity: identity - 1),
    "the id of the first step": under_another_id(lambda identity: 1),
    "a foreign id": under_another_id(lambda identity: identity + 10**6),
    "an id that is no integer": under_another_id(float),
    "an id as text": under_another_id(str),
    "no id": changed(id=None),
    "a negative id": under_another_id(lambda identity: -identity),
    "text": lambda rogue, peer, request: peer.say(msgpack.encode(rogue.answer(request)).decode("latin-1")),
    "text in pieces": lambda rogue, peer, request: peer.say("x" * 100, pieces=3),
    "garbage": lambda rogue, peer, request: peer.say(b"\xc1\xff" * 40),
    "half of it": lambda rogue, peer, request: peer.say(msgpack.encode(rogue.answer(request))[:-40]),
    "nothing at all": lambda rogue, peer, request: None,
    "with the next but one": before_the_last_one,
}


@pytest.mark.parametrize("behave", LOST.values(), ids=LOST.keys())
def test_what_belongs_to_no_request_is_not_waited_for_beyond_the_deadline(
    ball: Bundle, misbehaving: Misbehaving, robot: Make, behave: Behave
) -> None:
    with misbehaving() as rogue, Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client)
        ride(rogue, rover, behave)
        # Three in a row, and the client waits for a sign of life: `disconnected`.
        rover.check("deadline", "disconnected")
        assert rover.causes["deadline"] >= 2
        assert client.counts["connections"] == 1
        assert_nothing_twice(rogue)


def slow(rogue: Rogue, peer: Peer, request: Request, seconds: float = 0.06) -> None:
    time.sleep(seconds)
    peer.say(rogue.answer(request))


def test_late_answers_are_dropped_by_id_and_counted(
    ball: Bundle, misbehaving: Misbehaving, robot: Make, wait_for: Callable[..., float]
) -> None:
    with misbehaving() as rogue, Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client).play(4)
        rogue.behave = lambda peer, request: slow(rogue, peer, request)
        before = rover.verified
        rover.play(20, period_s=0.02)
        # All of them come to be counted, and none is used.
        wait_for(lambda: client.counts["late"] == client.counts["sent"] - before)
        assert client.counts["answered"] == rover.verified == before and client.counts["late"] >= 4
        rogue.behave = rogue.honest
        rover.find_back()
        rover.check("deadline", "disconnected")
        assert_nothing_twice(rogue)


class Careless(Client):
    """What must not be: takes the next reply for the one that is waited for."""

    def wait(self, identity: int, timeout: float) -> Any:
        transport = self._transport
        payload = None if transport is None else transport.receive(timeout)
        if transport is None or payload is None:
            return "deadline"
        return transport.decode(payload) | {"id": identity}


def test_a_client_that_ignored_ids_would_be_found_out(ball: Bundle, misbehaving: Misbehaving, robot: Make) -> None:
    with misbehaving() as rogue, Careless(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client, deadline_ms=200.0).play(4)  # so long that these are in time on a busy machine too
        rover.check()
        rogue.behave = lambda peer, request: slow(rogue, peer, request, 0.3)
        rover.play(10)
        assert rover.verified > 4
        with pytest.raises(AssertionError, match="another step"):
            rover.check("deadline")


def test_a_check_of_probabilities_alone_would_see_it_too(ball: Bundle) -> None:
    # Steps follow each other closely, but their targets are never the same.
    rng = np.random.default_rng(0)
    from specact.observation import Window

    def law(state: np.ndarray) -> CodeDistribution:
        return ball.target.infer(Window({"state": state.astype(np.float32)[None], "goal": np.zeros(2, np.float32)}))

    states = 0.6 * rng.standard_normal((50, *ball.observation["state"].shape))
    laws = [law(np.clip(state, -1.0, 1.0)).probs.tobytes() for state in states]
    assert len(set(laws)) == 50


# ---- connections that end, and what is sent again -------------------------------------------------------------------


def oversized(rogue: Rogue, peer: Peer, request: Request) -> None:
    peer.say(b"\0" * (max_message_bytes(rogue._bundle.codec.dialect) + 1))


def bad_frame(rogue: Rogue, peer: Peer, request: Request) -> None:
    peer.raw(b"\x83\x00")  # an opcode nobody knows


def goodbye(rogue: Rogue, peer: Peer, request: Request) -> None:
    peer.raw(b"\x88\x02\x03\xe9")  # 1001, going away


ENDINGS: dict[str, Behave] = {
    "reset": lambda rogue, peer, request: peer.reset(),
    "an oversized reply": oversized,
    "an oversized reply in pieces": lambda rogue, peer, request: peer.say(b"\0" * 200_000, pieces=40),
    "a frame that is none": bad_frame,
    "a close frame": goodbye,
    "HTTP in the middle": lambda rogue, peer, request: peer.raw(b"HTTP/1.1 502 Bad Gateway\r\n\r\n"),
}


@pytest.mark.parametrize("gated", [False, True], ids=["always", "gated"])
@pytest.mark.parametrize("behave", ENDINGS.values(), ids=ENDINGS.keys())
def test_after_a_lost_connection_nothing_is_sent_again(
    ball: Bundle, misbehaving: Misbehaving, robot: Make, behave: Behave, gated: bool
) -> None:
    settings, said = ClientSettings(first_delay_s=0.01), ball.codec.dialect
    with misbehaving() as rogue, Client(Endpoint("ws", "127.0.0.1", rogue.port), said, settings=settings) as client:
        client.connect(10.0)
        rover = robot(client, gated=gated)
        rover.play(4)
        rogue.behave = lambda peer, request: behave(rogue, peer, request)
        # Slow enough to come back in between, and to lose more than one.
        rover.play(6, period_s=0.03)
        rogue.behave = rogue.honest
        wanted, until = rover.verified + 5, time.monotonic() + 60.0
        rover.run(lambda: rover.verified < wanted and time.monotonic() < until, period_s=0.01)
        assert rover.verified >= wanted
        rover.check("disconnected", "deadline")
        assert rover.causes["disconnected"] > 0 and client.counts["connections"] > 1
        assert_nothing_twice(rogue)


# ---- what the robot does meanwhile ----------------------------------------------------------------------------------

STILL = np.array([0.25, -0.5], np.float32)


def test_hold_last_over_a_real_socket(ball: Bundle, misbehaving: Misbehaving, robot: Make) -> None:
    with misbehaving() as rogue, Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client, fallback=Fallback("hold_last", stop_action=tuple(STILL)))
        ride(rogue, rover, LOST["nothing at all"])
        rover.check("deadline", "disconnected")
        for before, step in zip(rover.steps, rover.steps[1:], strict=False):
            if step.record.miss is not None:
                np.testing.assert_array_equal(step.action, before.action)
        assert rover.causes.total() >= 6


def test_too_many_misses_over_a_real_socket_stop_the_robot(ball: Bundle, misbehaving: Misbehaving, robot: Make) -> None:
    with misbehaving() as rogue, Client(Endpoint("ws", "127.0.0.1", rogue.port), ball.codec.dialect) as client:
        client.connect(10.0)
        rover = robot(client, fallback=Fallback(max_consecutive_misses=4, stop_action=tuple(STILL)), deadline_ms=200.0)
        rover.find_back(4)  # the last step was verified, however busy the machine is
        first = len(rover.steps)
        awake = threading.Event()

        def sleep(peer: Peer, request: Request) -> None:
            awake.wait(20.0)

        rogue.behave = sleep
        rover.play(8)
        # Three deadlines, then no sign of life; the fifth miss in a row stops it.
        missed = [step.record.miss for step in rover.steps[first : first + 5]]
        # A device that is held up for longer than a deadline misses it before it can tell why nothing was sent.
        assert missed[:3] == ["deadline"] * 3 and set(missed[3:]) <= {"disconnected", "deadline"}
        assert rover.policy.safety.stopped
        for step in rover.steps[first + 4 :]:
            np.testing.assert_array_equal(step.action, STILL)
        rogue.behave = rogue.honest
        awake.set()
        rover.policy.reset(1)
        rover.play(6, period_s=0.1)
        assert any(step.record.outcome is not None for step in rover.steps[-6:]) and not rover.policy.safety.stopped
        # Nobody was asked by the robot that had stopped.
        assert len(rogue.requests) == client.counts["sent"] <= first + 3 + 6
