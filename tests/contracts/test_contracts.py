"""The checks accept what comes with the package, and find every fault that is put into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from tests.lab.envs.test_tasks import loaded
from tests.lab.rollout import chunk_policies
from tests.systems.test_corrector import Stub
from tests.systems.test_corrector import pair_of as corrector_pair
from tests.thirdparty import my_family

from specact import load_pair
from specact.contracts import check_gate, check_pair, check_policy, check_robot, check_task
from specact.errors import ContractError
from specact.families.chunks.flow import load_flow
from specact.families.chunks.pair import ChunkParts, PairSpec
from specact.families.chunks.policy import ChunkSpec
from specact.gates import ActionDeviation, Gate
from specact.gates.settings import GATES, gate_settings, load_gate
from specact.lab.envs import TASKS
from specact.lab.envs.ball import TASK, BallEnv
from specact.observation import Field, ObservationSpec, Window, vectors
from specact.types import ActionUnits, Proposal

STILL = np.array([0.1, 0.0], np.float32)


def subclass(base: type, **members: Any) -> Any:
    """The class with other members."""
    return type(f"Faulty{base.__name__}", (base,), members)


# ---- environments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_every_built_in_environment_keeps_the_contract(name: str) -> None:
    check_task(loaded(name), steps=20)


class Worn(BallEnv):
    """The second episode differs from the first."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episodes += 1
        return super().reset(seed=(seed or 0) + self.episodes, options=options)


def stepping(change: Callable[[list[Any]], Any]) -> Any:
    """The ball, with something else as the result of a step."""

    def step(self: Any, action: Any) -> Any:
        result = list(BallEnv.step(self, action))
        return change(result) or tuple(result)

    return subclass(BallEnv, step=step)


def observing(**changes: Any) -> Any:
    return stepping(lambda result: result.__setitem__(0, result[0] | changes))


def informing(**changes: Any) -> Any:
    return stepping(lambda result: result[4].update(changes))


def spaces(**changes: gym.Space[Any]) -> Any:
    def make(self: Any, render_mode: str | None = None, pace: float | None = 0.0) -> None:
        BallEnv.__init__(self, render_mode, pace)
        vars(self).update(changes)

    return subclass(BallEnv, __init__=make)


def falling() -> Any:
    scores = iter(range(1000, 0, -1))
    return stepping(lambda result: result[4].update(score=float(next(scores))))


BOX = gym.spaces.Box(-1, 1, (8,), np.float64)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rate_hz": 0.0}, "rate_hz"),
        ({"max_steps": 0}, "max_steps"),
        ({"make": spaces(observation_space=BOX)}, "observation_space.*Dict"),
        ({"make": spaces(observation_space=gym.spaces.Dict(state=BOX))}, "'state'.*Box"),
        ({"make": spaces(action_space=gym.spaces.Discrete(3))}, "action_space"),
        ({"make": Worn}, "reset.*again"),
        ({"make": observing(state=np.full(8, np.inf, np.float32))}, "'state' of step.*finite"),
        ({"make": observing(more=1)}, "more"),
        ({"make": informing(success=1)}, "'success'.*bool"),
        ({"make": stepping(lambda result: result[4].pop("score"))}, "step.*'score'"),
        ({"make": falling()}, "'score'.*best so far"),
        ({"make": stepping(lambda result: result.__setitem__(2, 0))}, "terminated"),
        ({"features": None}, "features"),
        ({"hold": lambda last: last + 5}, "hold.*action space"),
        ({"effector": lambda env: [0.0]}, "effector"),
        ({"roll_forward": lambda seen, actions: {}}, "roll_forward"),
        ({"expert": lambda seed: None}, "expert.*'reset'"),
    ],
)
def test_a_fault_of_an_environment_is_found(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ContractError, match=named):
        check_task(replace(TASK, **change), steps=10)


# ---- robots ---------------------------------------------------------------------------------------------------------


class Plain:
    """A robot for the ball bundle."""

    def __init__(self) -> None:
        self.stops, self.sent = 0, list[Any]()

    def observe(self) -> Any:
        return {"state": np.zeros(8), "goal": np.zeros(2)}

    def act(self, action: Any) -> None:
        self.sent.append(action.tolist())


class Arm(Plain):
    """A robot that can be stopped."""

    def stop(self) -> None:
        self.stops += 1


def test_a_robot_that_keeps_the_contract_passes_and_is_stopped() -> None:
    arm, plain = Arm(), Plain()
    check_robot(arm, load_pair("ball"), STILL)
    check_robot(plain, load_pair("ball"), STILL)
    assert arm.stops == 2 and plain.sent == 4 * [STILL.tolist()]


def test_what_the_code_under_test_raises_passes_through() -> None:
    def jammed(self: Any) -> None:
        raise OSError("jammed")

    with pytest.raises(OSError, match="jammed"):
        check_robot(subclass(Arm, stop=jammed)(), load_pair("ball"), STILL)


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"observe": None}, "'observe'"),
        ({"observe": lambda self: {"state": np.zeros(7), "goal": np.zeros(2)}}, r"observe.*state.*\(7,\)"),
        ({"observe": lambda self: None}, "observe.*None"),
        ({"act": lambda self, action: action.__imul__(0.5)}, "act must not change"),
    ],
)
def test_a_fault_of_a_robot_is_found(members: dict[str, Any], named: str) -> None:
    with pytest.raises(ContractError, match=named):
        check_robot(subclass(Arm, **members)(), load_pair("ball"), STILL)


def test_the_action_to_try_has_to_fit() -> None:
    with pytest.raises(ContractError, match=r"\(3,\)"):
        check_robot(Arm(), load_pair("ball"), np.zeros(3, np.float32))


# ---- gates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GATES)
def test_every_built_in_gate_keeps_the_contract(name: str) -> None:
    # Some read what a memory of token chunks proposes, one what a corrector does.
    if name in ("verify_skip", "fixed_skip", "similarity"):
        pair = load_pair("relocate-tokens", decoding="heisd_no_switch")
    else:
        pair = corrector_pair(Stub()) if name == "staleness" else load_pair("ball")
    check_gate(load_gate(name), pair, steps=20, **dict(gate_settings(name, pair).options))


def scoring(score: Callable[[Any, Any], float]) -> Any:
    return subclass(ActionDeviation, score=lambda self, proposal, rng: score(proposal, rng))


def meddle(proposal: Any, rng: Any) -> float:
    proposal.actions[0] = 0.0
    return 1.0


def begin_once(gate: Any) -> None:
    (Gate if hasattr(gate, "begun") else ActionDeviation).reset(gate)
    gate.begun = True


def made(make: Callable[..., None]) -> Any:
    return subclass(ActionDeviation, __init__=make)


@pytest.mark.parametrize(
    ("gate", "named"),
    [
        (ActionDeviation(0.1), "subclass of Gate"),
        (int, "subclass of Gate"),
        (made(lambda self, threshold, **limits: ActionDeviation.__init__(self, 0.1)), "threshold of inf"),
        (made(lambda self, threshold, **limits: ActionDeviation.__init__(self, threshold)), "max_skips"),
        (scoring(lambda proposal, rng: float("nan")), "score.*finite"),
        (scoring(lambda proposal, rng: float(np.random.default_rng().random())), "rng"),
        (scoring(meddle), "score must not change"),
        (subclass(ActionDeviation, reset=begin_once), "reset"),
    ],
)
def test_a_fault_of_a_gate_is_found(gate: Any, named: str) -> None:
    with pytest.raises(ContractError, match=named):
        check_gate(gate, load_pair("ball"))


# ---- policies -------------------------------------------------------------------------------------------------------


class Constant:
    """The simplest policy there is: it follows the state, and draws a little noise."""

    inpaints, calls = False, 0
    spec = ChunkSpec(vectors(2, goal=2, state=3), chunk=4, actions=2, rate_hz=10.0)

    def infer_batch(self, windows: Any, rngs: Any) -> Any:
        return [self.infer(window, rng) for window, rng in zip(windows, rngs, strict=True)]

    def infer(self, window: Any, rng: np.random.Generator, inpainting: Any = None) -> Any:
        noise = rng.normal(size=(4, 2)).astype(np.float32)
        return window["state"][-1, :2] + 0.1 * noise


def inferring(change: Callable[..., Any]) -> Any:
    """Another chunk for each window, from the policy's own, the policy and the window."""
    return subclass(Constant, infer=lambda self, window, rng: change(Constant.infer(self, window, rng), self, window))()


def batching(change: Callable[[list[Any]], Any]) -> Any:
    return subclass(Constant, infer_batch=lambda self, *given: change(Constant.infer_batch(self, *given)))()


def queued(chunk: Any, self: Any, window: Any) -> Any:
    """Like LeRobot's select_action: what it was asked before decides what it says now."""
    self.calls += 1
    return chunk + np.float32(self.calls % 7)


def test_policies_that_keep_the_contract_pass() -> None:
    check_policy(load_flow("pusht-flow").policy(steps=2))
    fields = dict(Constant.spec.observation.fields) | {"image.top": Field((8, 8, 3), "uint8")}
    spec = ChunkSpec(ObservationSpec(fields, instruction=True), chunk=4, actions=2, rate_hz=10.0)
    for members in ({}, {"spec": spec}):
        check_policy(subclass(Constant, **members)())


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (inferring(queued), "earlier calls"),
        (subclass(Constant, infer=lambda self, window, rng: Constant.infer(self, window, np.random.default_rng()))(),
         "earlier calls"),
        (batching(lambda chunks: [chunk + np.float32(i == 2) for i, chunk in enumerate(chunks)]), "its batch"),
        (batching(lambda chunks: [chunk + np.float32(1) for chunk in chunks]), "infer must give what infer_batch"),
        (batching(lambda chunks: chunks[:1]), "4 chunks"),
        (inferring(lambda chunk, self, window: chunk * np.float32(np.inf)), "finite"),
        (inferring(lambda chunk, self, window: chunk + window["state"].__imul__(0)[0, 0]), "windows"),
    ],
)  # fmt: skip
def test_a_fault_of_a_policy_is_found(policy: Any, named: str) -> None:
    with pytest.raises(ContractError, match=named):
        check_policy(policy)


# ---- pairs ----------------------------------------------------------------------------------------------------------


def test_every_family_keeps_the_contract() -> None:
    check_pair(load_pair("ball"))
    units = ActionUnits.of_range(np.full(2, -1.0, np.float32), np.full(2, 1.0, np.float32))
    small, large = chunk_policies.small, chunk_policies.large
    for within in (0.0, 0.4):
        check_pair(ChunkParts("chunks", small, units, PairSpec(large.spec, 3, within), lambda: large).pair())
    check_pair(my_family.pair)
    check_gate(my_family.Nearness, my_family.pair)


def with_parts(**parts: Any) -> Any:
    """The bounded trolley with other parts."""
    return replace(my_family.pair, **parts)


def proposing(change: Callable[[Proposal], Proposal]) -> Any:
    original = my_family.Drafter.propose
    return with_parts(drafter=subclass(my_family.Drafter, propose=lambda self, *given: change(original(self, *given))))


def answering(change: Callable[[list[Any]], Any]) -> Any:
    original = my_family.AdviceExchange.answer
    members = {"answer": lambda self, *given: change(original(self, *given))}
    return with_parts(exchange=subclass(my_family.AdviceExchange, **members)())


def judging(change: Callable[[Any], dict[str, Any]]) -> Any:
    """The outcome with other fields."""

    def judge(self: Any, *given: Any) -> Any:
        outcome = my_family.BoundVerifier.judge(self, *given)
        return replace(outcome, **change(outcome))

    return with_parts(verifier=subclass(my_family.BoundVerifier, judge=judge))


NOISE = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("pair", "named"),
    [
        (with_parts(name="two words"), "name"),
        (with_parts(execute=0), "execute"),
        (with_parts(overlap="blend"), "overlap"),
        (with_parts(observation={"state": (4,)}), "ObservationSpec"),
        (with_parts(observation=ObservationSpec({"state": Field((4,))})), "goal"),
        (proposing(lambda made: replace(made, actions=made.actions + np.float32(NOISE.normal()))), "same proposal"),
        (proposing(lambda made: replace(made, actions=np.zeros((3, 2), np.float32))), "proposal.*at least 4"),
        (proposing(lambda made: replace(made, window=Window(dict(made.window.arrays)))), "carry the window"),
        (answering(lambda answers: [{**reply, "actions": -reply["actions"]} for reply in answers]), "target in this"),
        (answering(lambda answers: answers[::-1]), "its batch"),
        (answering(lambda answers: [{**reply, "actions": reply["actions"].astype(np.float64)} for reply in answers]),
         "contract"),
        (judging(lambda outcome: {"kept": 1.5}), "kept"),
        (judging(lambda outcome: {"actions": outcome.actions[:2], "origins": outcome.origins[:2]}), "at least 4"),
        (judging(lambda outcome: {"origins": outcome.origins.astype(np.int64)}), "int64"),
    ],
)  # fmt: skip
def test_a_fault_of_a_pair_is_found(pair: Any, named: str) -> None:
    with pytest.raises(ContractError, match=named):
        check_pair(pair)
