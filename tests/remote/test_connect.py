"""A chunk policy on a server, in one line: real processes on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import specact
from specact.errors import ConfigError, MissError, ObservationError, RemoteError
from specact.execution.inpainting import inpainting_of
from specact.families.chunks.bundle import load_flow
from specact.families.chunks.pair import ChunkAnswers
from specact.lab.processes import ServerProcess, serving
from specact.observation import ObservationHistory
from specact.rng import Role, StepAddress, stream

TOKEN = "open-sesame-0123456789"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("ball-chase-flow", environment={"SPECACT_TOKEN": TOKEN}) as process:
        yield process


def observation(step: int) -> dict[str, np.ndarray]:
    return {"state": np.full(12, 0.01 * step)}


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_its_answers_are_those_of_the_policy_in_this_process(server: ServerProcess, scheme: str) -> None:
    local = load_flow("ball-chase-flow").policy()
    answers, history = ChunkAnswers(local), ObservationHistory(local.spec.observation)
    with specact.connect(f"{scheme}://127.0.0.1:{server.port}", token=TOKEN, deadline_ms=10_000, seed=7) as policy:
        assert policy.spec == local.spec
        for step in range(3):
            found = policy(observation(step))
            assert found.shape == (local.spec.chunk, local.spec.actions) and found.dtype == np.float32
            window = history.push(observation(step))
            assert np.array_equal(found, answers.answer(window, StepAddress(7, 0, 0, step)))
        assert policy.counts == {"steps": 3, "transmitted": 3, "missed": 0}
        # Another episode begins with another history, and other random numbers.
        policy.reset(episode=1)
        again = policy(observation(0))
        history.reset()
        assert np.array_equal(again, answers.answer(history.push(observation(0)), StepAddress(7, 0, 1, 0)))


def test_observations_between_two_calls_are_part_of_the_history(server: ServerProcess) -> None:
    local = load_flow("ball-chase-flow").policy()
    history = ObservationHistory(local.spec.observation)
    with specact.connect(f"ws://127.0.0.1:{server.port}", token=TOKEN, deadline_ms=10_000) as policy:
        policy.observe(observation(0))
        found = policy(observation(1))
    history.push(observation(0))
    window = history.push(observation(1))
    assert np.array_equal(found, ChunkAnswers(local).answer(window, StepAddress(0, 0, 0, 0)))


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_a_chunk_that_continues_another_is_that_of_the_policy_in_this_process(
    server: ServerProcess, scheme: str
) -> None:
    local = load_flow("ball-chase-flow").policy()
    window, address = local.spec.observation.zeros(), StepAddress(1, 2, 3, 4)
    rng = np.random.default_rng(0)
    inpainting = inpainting_of(rng.uniform(-1, 1, (9, local.spec.actions)).astype(np.float32), 3, local.spec.chunk)
    with specact.connect(f"{scheme}://127.0.0.1:{server.port}", token=TOKEN, deadline_ms=10_000) as policy:
        assert policy.inpaints
        found = policy.ask(window, address, inpainting)
        assert isinstance(found, np.ndarray)
        assert np.array_equal(
            found, local.infer(window, stream(1, Role.VERIFY, robot=2, episode=3, step=4), inpainting)
        )
        plain = policy.ask(window, address)
        assert isinstance(plain, np.ndarray) and not np.array_equal(found, plain)


def test_a_server_says_that_its_policy_does_not_inpaint() -> None:
    with (
        serving("ball#target") as process,
        specact.connect(f"ws://127.0.0.1:{process.port}", deadline_ms=10_000) as policy,
    ):
        assert not policy.inpaints
        assert policy({"state": np.zeros(8), "goal": np.zeros(2)}).shape == (5, 2)


@pytest.mark.usefixtures("nothing_left")
def test_what_cannot_be_answered_is_an_error_that_says_why(server: ServerProcess) -> None:
    url = f"ws://127.0.0.1:{server.port}"
    with specact.connect(url, token=TOKEN, deadline_ms=1e-3) as policy:
        with pytest.raises(ObservationError, match="no 'state'"):
            policy({"pose": np.zeros(12)})
        assert policy.counts["steps"] == 0
        with pytest.raises(MissError, match=r"no usable answer within 0\.001 ms \((deadline|expired)") as caught:
            policy(observation(0))
        # The server may be the first to see that there is no time left.
        assert caught.value.cause in ("deadline", "expired")
    with pytest.raises(RemoteError, match="token"):
        specact.connect(url, token="wrong" + TOKEN)
    with pytest.raises(ConfigError, match="deadline"):
        specact.connect(url, token=TOKEN, deadline_ms=0.0)


@pytest.mark.usefixtures("nothing_left")
def test_a_server_of_action_codes_is_refused_with_what_to_use_instead() -> None:
    before = threading.active_count()
    with (
        serving("ball") as codes,
        pytest.raises(ConfigError, match=r"family 'codes'.*load_bundle\('ball'\).*remote_verifier"),
    ):
        specact.connect(f"ws://127.0.0.1:{codes.port}")
    assert threading.active_count() == before


def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RemoteError, match=r"no connection to ws://127\.0\.0\.1:9"):
        specact.connect("ws://127.0.0.1:9", timeout=1.0)


def test_after_the_server_is_gone_a_call_says_so_and_no_thread_is_left() -> None:
    with serving("ball-chase-flow") as process:
        policy = specact.connect(f"http://127.0.0.1:{process.port}", deadline_ms=10_000)
        policy(observation(0))
    with policy, pytest.raises(MissError) as caught:
        policy(observation(1))
    assert caught.value.cause == "disconnected"
