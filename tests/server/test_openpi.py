"""A client of openpi's protocol gets the target's own chunks; whatever else it sends, it is told why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from tests.serving import Here, Robot, frame

from specact.errors import ObservationError
from specact.families.chunks.flow import load_flow
from specact.families.chunks.policy import ChunkExchange
from specact.families.chunks.sources import chunk_policy
from specact.load import load_exchange
from specact.observation import Field, ObservationHistory, ObservationSpec, Window
from specact.rng import Role, stream
from specact.server.openpi import read_window
from specact.wire import openpi

Fields = dict[str, Any]
CLOSED = 1008
TOKEN = "correct-horse-battery-staple"
FRONT = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
WRIST = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)


@chunk_policy(
    observation={"state": Field((3,), history=3), "image.front": Field((4, 6, 3), "uint8", 1),
                 "wrist_image": Field((2, 2, 3), "uint8", 0)},
    chunk=2, actions=4, rate_hz=10.0, instruction=True, seeded=True,
)  # fmt: skip
def seer(seen: Any, instruction: Any, rngs: Any) -> Any:
    """It says what it sees: states, the length of the text, two pixels, a random number."""
    if 7.0 in seen["state"]:
        raise RuntimeError("secret inside")
    return np.array([
        [[*seen["state"][row, :, 0], len(text)],
         [seen["image.front"][row, 0, 1, 2, 1], seen["wrist_image"][row, 1, 0, 2], rng.random(), 0.0]]
        for row, (text, rng) in enumerate(zip(instruction, rngs, strict=True))
    ])  # fmt: skip


def seen(number: float = 1.0, /, **changed: Any) -> Fields:
    """An observation for the seer; None leaves something out."""
    whole = {
        "observation/state": np.full(3, number), "observation.images.front": FRONT,
        "observation": {"wrist_image": WRIST}, "prompt": "pick it up", "session_id": "38DSA3hd3",
    }  # fmt: skip
    return {name: value for name, value in (whole | changed).items() if value is not None}


def actions_of(episode: int, step: int) -> np.ndarray:
    """The second action that the seer answers with."""
    drawn = stream(0, Role.VERIFY, robot=0, episode=episode, step=step).random()
    return np.array([FRONT[1, 2, 1], WRIST[1, 0, 2], drawn, 0], np.float32)


@pytest.fixture(scope="module")
def seeing() -> Iterator[Here]:
    with Here(ChunkExchange(seer.spec, "seer", "0" * 16, lambda: seer)) as server:
        yield server


@contextmanager
def client(server: Here, **headers: str) -> Iterator[tuple[Robot, Fields]]:
    """A client's connection, and the metadata."""
    with server.connect("/", **headers) as robot:
        yield robot, openpi.decode(robot.connection.recv(timeout=60))  # type: ignore[arg-type]


def ask(robot: Robot, message: Fields | bytes) -> Fields | str:
    robot.connection.send(message if isinstance(message, bytes) else openpi.encode(message))
    answer = robot.connection.recv(timeout=60)
    return answer if isinstance(answer, str) else openpi.decode(answer)


def actions(robot: Robot, message: Fields | bytes) -> Any:
    reply = ask(robot, message)
    assert isinstance(reply, dict), reply
    return reply["actions"]


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_the_real_client_gets_the_policys_own_chunks() -> None:
    reason = "needs openpi-client 0.1.2 (see the Makefile)"
    theirs = pytest.importorskip("openpi_client.websocket_client_policy", reason=reason)
    flow = load_flow("ball-chase-flow")
    # One request per inference: a served chunk is the local one to its last bit.
    with Here(load_exchange("ball-chase-flow"), max_batch=1) as server:
        robot = theirs.WebsocketClientPolicy("127.0.0.1", server.port)
        said = robot.get_server_metadata()
        assert (said["bundle"], said["fingerprint"]) == ("ball-chase-flow", flow.fingerprint)
        assert (said["action_horizon"], said["action_dim"], said["rate_hz"]) == (16, 2, 20.0)
        assert said["observation"] == {"state": {"shape": [12], "dtype": "float32", "history": 2}}
        rng, policy = np.random.default_rng(3), flow.policy()
        states = rng.uniform(-0.5, 0.5, (4, 12)).astype(np.float32)
        for step, state in enumerate(states):
            reply = robot.infer({"observation/state": state, "prompt": "chase it"})
            window = Window({"state": states[[max(0, step - 1), step]]})
            local = policy.infer(window, stream(0, Role.VERIFY, robot=0, episode=0, step=step))
            assert reply["actions"].dtype == np.float32
            np.testing.assert_array_equal(reply["actions"], local)
            assert reply["server_timing"]["infer_ms"] > 0.0
        with pytest.raises(RuntimeError, match="state has shape") as refused:
            robot.infer({"state": states[0, :3]})
        assert "Traceback" not in str(refused.value) and "File" not in str(refused.value)
        robot._ws.close()


def test_the_history_is_that_of_the_connection_until_it_is_reset(seeing: Here) -> None:
    with client(seeing) as (robot, said), client(seeing) as (neighbour, _):
        assert said["instruction"] is True and set(said["observation"]) == {"state", "image.front", "wrist_image"}
        for step, expected in enumerate(([1, 1, 1], [1, 1, 2], [1, 2, 3], [2, 3, 4])):
            first, second = actions(robot, seen(step + 1, endpoint="infer"))
            np.testing.assert_array_equal(first, [*expected, len("pick it up")])
            np.testing.assert_array_equal(second, actions_of(0, step))
        np.testing.assert_array_equal(actions(neighbour, seen(9))[0], [9, 9, 9, 10])
        assert ask(robot, {"endpoint": "reset"}) == "reset successful"
        np.testing.assert_array_equal(actions(robot, seen(5, prompt="")), [[5, 5, 5, 0], [*actions_of(1, 0)]])


ALIKE: list[Fields] = [
    {"observation.images.front": np.moveaxis(FRONT, -1, 0)},
    {"observation.images.front": None, "image.front": FRONT},
    {"observation.images.front": None, "observation/image": FRONT},
    {"observation.images.front": None, "observation/front_image": FRONT},
    {"observation.images.front": None, "images": {"front": FRONT}},
    {"observation": {"wrist_image": WRIST, "images": {"front": FRONT}}, "observation.images.front": None},
    {"observation.images.front": FRONT[None], "observation/state": None, "state": np.ones((3, 3))},
    {"observation/state": None, "observation.state": [1, 1.0, True]},
    {"prompt": None, "instruction": "pick it up"},
    {"unknown": np.zeros(3), "deep": {"a": {"b": {"c": {"d": {"e": 1}}}}}},
]


@pytest.mark.parametrize("changed", ALIKE, ids=", ".join)
def test_names_and_shapes_that_mean_the_same(seeing: Here, changed: Fields) -> None:
    with client(seeing) as (robot, _):
        np.testing.assert_array_equal(actions(robot, seen(1, **changed)), [[1, 1, 1, 10], actions_of(0, 0)])


def test_frames_have_the_names_of_openpis_client_for_libero() -> None:
    spec = ObservationSpec(
        {"state": Field((8,)), "image.agentview": Field((4, 6, 3), "uint8"), "image.wrist": Field((2, 2, 3), "uint8")},
        instruction=True,
    )
    sent = {
        "observation/image": FRONT,
        "observation/wrist_image": WRIST,
        "observation/state": np.ones(8),
        "prompt": "go",
    }
    window = read_window(sent, spec, ObservationHistory(spec))
    assert np.array_equal(window.arrays["image.agentview"][-1], FRONT) and window.instruction == "go"
    assert np.array_equal(window.arrays["image.wrist"][-1], WRIST) and window.arrays["state"].shape[-1] == 8
    # With two fixed cameras it could be either.
    two = ObservationSpec({"image.left": Field((4, 6, 3), "uint8"), "image.right": Field((4, 6, 3), "uint8")})
    with pytest.raises(ObservationError, match="left"):
        read_window({"image": FRONT, "right_image": FRONT}, two, ObservationHistory(two))


UNUSABLE = [
    ({"observation/state": np.full(3, np.nan)}, "state"), ({"observation/state": np.full(3, 1e300)}, "state"),
    ({"observation/state": None}, "state"), ({"observation/state": np.zeros(4)}, "state"),
    ({"observation/state": "x"}, "state"), ({"observation/state": [[1.0], [2.0, 3.0]]}, "state"),
    ({"observation/state": [[1.0, 2.0, 3.0]] * 2}, "state"), ({"state": np.zeros(3)}, "twice"),
    ({"observation.images.front": FRONT.astype(np.float32)}, "uint8"),
    ({"observation.images.front": FRONT[:3]}, "front"),
    ({"prompt": None}, "instruction"), ({"prompt": 3}, "text"), ({"prompt": "x" * 1001}, "1000"),
    ({"prompt": np.zeros(3)}, "text"), ({"endpoint": "kill"}, "infer"), ({"endpoint": np.zeros(3)}, "infer"),
    ({"address": np.zeros(4)}, "address"), ({"address": [1, 2, 3]}, "address"),
    ({"state": {"nd": True, "type": "|O", "shape": [1], "data": b"."}}, "dtype"), (b"", "message"), (b"\x80", "state"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "name"), UNUSABLE, ids=range(len(UNUSABLE)))
def test_an_observation_that_cannot_be_used_ends_the_connection(seeing: Here, changed: Any, name: str) -> None:
    with client(seeing) as (robot, _):
        text = ask(robot, changed if isinstance(changed, bytes) else seen(**changed))
        assert isinstance(text, str) and name in text and len(text) <= 500 and "Traceback" not in text
        assert robot.end() == CLOSED


def test_a_target_that_fails_says_nothing_of_its_inside(seeing: Here) -> None:
    with client(seeing) as (robot, _):
        assert ask(robot, seen(7.0)) == "the target failed; see the server's log"
        assert robot.end() == CLOSED


def test_observations_are_answered_in_their_order_and_a_reset_comes_after_the_replies(seeing: Here) -> None:
    with client(seeing) as (robot, _):
        for message in map(seen, range(10, 30)):
            robot.connection.send(openpi.encode(message))
        answers = [openpi.decode(robot.connection.recv(timeout=60)) for _ in range(20)]  # type: ignore[arg-type]
        assert [answer["actions"][0][2] for answer in answers] == list(range(10, 30))
        assert ask(robot, {"endpoint": "reset"}) == "reset successful" and actions(robot, seen(30))[0][0] == 30
        robot.raw(frame(0x2, openpi.encode(seen(1))) + frame(0x2, openpi.encode({"endpoint": "reset"})))
        assert "reset" in str(robot.connection.recv(timeout=60)) and robot.end() == CLOSED


def test_a_token_is_an_api_key() -> None:
    with Here(load_exchange("ball-chase-flow"), TOKEN, max_robots=3) as server:
        for headers in ({}, {"Authorization": f"Api-Key {TOKEN}x"}, {"Origin": "http://evil.example"}):
            with server.connect("/", **headers) as refused:
                assert refused.end() == CLOSED
        for scheme in ("Api-Key", "Bearer"):
            with client(server, Authorization=f"{scheme} {TOKEN}") as (robot, _), ExitStack() as stack:
                # With the token it is not pending, and makes no room for others.
                for _ in range(4):
                    stack.enter_context(server.connect())
                assert actions(robot, {"state": np.zeros(12)}).shape == (16, 2)


def test_a_client_may_build_its_simulator_before_the_first_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As openpi's for LIBERO does; one of specact's own protocol has its hello ready."""
    monkeypatch.setattr("specact.server.session.HELLO_TIMEOUT_S", 0.1)
    with Here(load_exchange("ball-chase-flow")) as server, client(server) as (robot, _):
        with server.connect() as silent:
            assert silent.end() == CLOSED
        assert actions(robot, {"state": np.zeros(12)}).shape == (16, 2)


def test_a_target_without_chunks_says_so_at_once(doubling: Here) -> None:
    with doubling.connect("/") as robot:
        assert robot.end() == CLOSED
        assert "doubling#target" in str(robot.connection.protocol.close_reason)
