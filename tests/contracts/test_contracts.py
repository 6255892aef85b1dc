"""The checks accept what comes with the package, and find every fault that is put into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from tests.lab.rollout import chunk_policies
from tests.thirdparty import my_family

from specact import load_pair
from specact.contracts import check_gate, check_pair, check_policy, check_robot, check_task
from specact.errors import ContractError, MissingExtraError, SpecactError
from specact.families.chunks.flow import load_flow
from specact.families.chunks.pair import ChunkParts
from specact.families.chunks.policy import ChunkSpec
from specact.gates import ActionDeviation, Gate
from specact.gates.settings import GATES, GateChoices, load_gate
from specact.lab.envs import TASKS, load_task
from specact.lab.envs.ball import TASK, BallEnv
from specact.observation import Field, ObservationSpec, Window, vectors
from specact.rng import StepAddress
from specact.types import Outcome, Proposal
from specact.units import ActionUnits


def test_a_contract_error_is_an_assertion_and_one_of_ours() -> None:
    assert issubclass(ContractError, AssertionError) and issubclass(ContractError, SpecactError)


# ---- environments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_every_built_in_environment_keeps_the_contract(name: str) -> None:
    try:
        task = load_task(name)
    except MissingExtraError as error:
        pytest.skip(str(error))
    check_task(task, steps=20)


class Forgetful(BallEnv):
    """Does not begin where the seed says."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=None, options=options)


class Worn(BallEnv):
    """The second episode differs from the first."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episodes += 1
        return super().reset(seed=(seed or 0) + self.episodes, options=options)


def stepping(change: Callable[[list[Any]], Any]) -> Callable[..., gym.Env[Any, Any]]:
    """The ball, with something else as the result of a step."""

    class Changed(BallEnv):
        def step(self, action: Any) -> Any:
            found = list(super().step(action))
            return change(found) or tuple(found)

    return Changed


def seen(**changes: Any) -> Callable[..., gym.Env[Any, Any]]:
    def change(found: list[Any]) -> None:
        found[0] = found[0] | changes

    return stepping(change)


def told(**changes: Any) -> Callable[..., gym.Env[Any, Any]]:
    def change(found: list[Any]) -> None:
        found[4] = found[4] | changes

    return stepping(change)


def spaces(**changes: gym.Space[Any]) -> Callable[..., gym.Env[Any, Any]]:
    class Changed(BallEnv):
        def __init__(self, render_mode: str | None = None, pace: float | None = 0.0) -> None:
            super().__init__(render_mode, pace)
            for name, space in changes.items():
                setattr(self, name, space)

    return Changed


def falling() -> Callable[..., gym.Env[Any, Any]]:
    scores = iter(range(1000, 0, -1))
    return stepping(lambda found: found[4].update(score=float(next(scores))))


def restless(**options: Any) -> gym.Env[Any, Any]:
    raise RuntimeError("no licence")


BOX = gym.spaces.Box(-1, 1, (8,), np.float64)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rate_hz": 0.0}, "rate_hz must be positive and finite"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"make": restless}, "make must work, it raised RuntimeError: no licence"),
        ({"make": spaces(observation_space=BOX)}, "observation_space must be a gymnasium Dict"),
        (
            {"make": spaces(observation_space=gym.spaces.Dict(state=BOX))},
            "'state' must be a Box, float32 or, for a camer",
        ),
        ({"make": spaces(action_space=gym.spaces.Discrete(3))}, "action_space must be a Box, float32 [A]"),
        ({"make": Forgetful}, "must give the same episode again"),
        ({"make": Worn}, "must give the same episode again"),
        ({"make": stepping(lambda found: tuple(found[:4]))}, "step must give a tuple of 5 values"),
        ({"make": seen(state=np.zeros(8))}, "'state' of step must be float32 [8], got float64 [8]"),
        ({"make": seen(state=np.full(8, np.nan, np.float32))}, "'state' of step must be finite"),
        ({"make": seen(more=1)}, "must be a dict with goal, state; got a dict with"),
        ({"make": told(success=1)}, "info['success'] must be bool, got 1"),
        ({"make": told(score=None)}, "info['score'] must be a finite number, got None"),
        ({"make": stepping(lambda found: found[4].pop("score"))}, "the info of step must have 'score'"),
        ({"make": falling()}, "info['score'] must be the best so far; it fell"),
        ({"make": stepping(lambda found: found.__setitem__(2, 0))}, "terminated and truncated as bool"),
        ({"features": None}, "features must be a function"),
        ({"hold": lambda last: np.zeros(3, np.float32)}, "hold must give an action, float32 [2], got float32 [3]"),
        ({"hold": lambda last: last + 5}, "hold must give an action within the action space"),
        ({"effector": lambda env: [0.0]}, "effector must give a position, float64 [D]"),
        ({"roll_forward": lambda seen, actions: {}}, "the observation of roll_forward must be a dict with"),
        ({"expert": lambda seed: None}, "an expert must have a method 'reset'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_an_environment_is_found(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ContractError) as raised:
        check_task(replace(TASK, **change), steps=10)
    assert sentence in str(raised.value)


def test_an_action_space_without_bounds_is_tried_on_both_sides_of_zero() -> None:
    tried: list[Any] = []

    class Open(BallEnv):
        def __init__(self, render_mode: str | None = None, pace: float | None = 0.0) -> None:
            super().__init__(render_mode, pace)
            self.action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

        def step(self, action: Any) -> Any:
            tried.extend(action)
            return super().step(action)

    check_task(replace(TASK, make=Open, expert=None), steps=20)
    assert -1.0 <= min(tried) < 0.0 < max(tried) <= 1.0


# ---- robots ---------------------------------------------------------------------------------------------------------


class Arm:
    """A robot for the ball bundle."""

    def __init__(self) -> None:
        self.stops = 0

    def observe(self) -> Any:
        return {"state": np.zeros(8), "goal": np.zeros(2)}

    def act(self, action: Any) -> None:
        assert action.shape == (2,)

    def stop(self) -> None:
        self.stops += 1


class Thin(Arm):
    def observe(self) -> Any:
        return {"state": np.zeros(7), "goal": np.zeros(2)}


class Asleep(Arm):
    def observe(self) -> Any:
        return None


class Greedy(Arm):
    def act(self, action: Any) -> None:
        action *= 0.5


class Jammed(Arm):
    def act(self, action: Any) -> None:
        raise OSError("the gear is jammed")


class Stuck(Arm):
    def stop(self) -> None:
        raise OSError("the brake is stuck")


class StopsOnce(Arm):
    def stop(self) -> None:
        super().stop()
        if self.stops > 1:
            raise OSError("already stopped")


def test_a_robot_that_keeps_the_contract_passes() -> None:
    arm = Arm()
    check_robot(arm, load_pair("ball"), np.array([0.1, 0.0], np.float32))
    assert arm.stops == 2


def test_a_robot_without_stop_is_sent_the_stop_action() -> None:
    sent = []

    class Plain:
        def observe(self) -> Any:
            return {"state": np.zeros(8), "goal": np.zeros(2)}

        def act(self, action: Any) -> None:
            sent.append(action.tolist())

    check_robot(Plain(), load_pair("ball"), np.zeros(2, np.float32))
    assert sent == 4 * [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("robot", "sentence"),
    [
        (object(), "a robot must have a method 'observe'"),
        (Thin(), "observe must give what ball needs: the observation's state has shape (7,)"),
        (Asleep(), "observe must give what ball needs: the observation is None"),
        (Greedy(), "act must not change the action"),
        (Jammed(), "act must work, it raised OSError: the gear is jammed"),
        (
            Stuck(),
            "must be able to stop after an error of the policy; the robot could not be stopped after this: OSErr",
        ),
        (StopsOnce(), "stop, called again, must work, it raised OSError: already stopped"),
    ],
)
def test_a_fault_of_a_robot_is_found(robot: Any, sentence: str) -> None:
    with pytest.raises(ContractError) as raised:
        check_robot(robot, load_pair("ball"), np.array([0.1, 0.0], np.float32))
    assert sentence in str(raised.value)


def test_the_action_to_try_has_to_fit() -> None:
    with pytest.raises(ContractError, match=r"ball has actions of 2 numbers, but the one to try has \(3,\)"):
        check_robot(Arm(), load_pair("ball"), np.zeros(3, np.float32))


# ---- gates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GATES)
def test_every_built_in_gate_keeps_the_contract(name: str) -> None:
    # Two of them read what a memory of token chunks proposes.
    recalls = name in ("verify_skip", "similarity")
    pair = load_pair("relocate-tokens", decoding="heisd_no_switch") if recalls else load_pair("ball")
    check_gate(load_gate(name), pair, steps=20, **dict(GateChoices().settings(name, pair).options))


class Deaf(Gate):
    """Does not take the limits."""

    def __init__(self, threshold: float, **limits: Any) -> None:
        super().__init__(0.1)

    def score(self, proposal: Any, rng: np.random.Generator) -> float:
        return float(abs(proposal.actions[0, 0]))


class Unlimited(Deaf):
    def __init__(self, threshold: float, **limits: Any) -> None:
        Gate.__init__(self, threshold)


class Unsure(ActionDeviation):
    def score(self, proposal: Any, rng: np.random.Generator) -> float:
        return float("nan")


class Dice(ActionDeviation):
    def score(self, proposal: Any, rng: np.random.Generator) -> float:
        return float(np.random.default_rng().random())


class Elephant(ActionDeviation):
    def reset(self) -> None:
        Gate.reset(self)


class Meddler(ActionDeviation):
    def score(self, proposal: Any, rng: np.random.Generator) -> float:
        proposal.actions[0] = 0.0
        return 1.0


class Fragile(ActionDeviation):
    def score(self, proposal: Any, rng: np.random.Generator) -> float:
        raise KeyError("evidence")


class Strict(ActionDeviation):
    def __init__(self, threshold: float) -> None:
        super().__init__(threshold)


@pytest.mark.parametrize(
    ("gate", "sentence"),
    [
        (ActionDeviation(0.1), "a gate must be a subclass of Gate"),
        (int, "a gate must be a subclass of Gate"),
        (Deaf, "with a threshold of inf every step that nothing forces must be skipped; pass threshold on"),
        (Unlimited, "with max_skips=1 no two steps in a row may be skipped; pass **limits on"),
        (Unsure, "score must give a finite number, got nan"),
        (Dice, "what is random in score must come from its rng"),
        (Elephant, "reset must forget the episode"),
        (Meddler, "score must not change the proposal"),
        (Fragile, "decide must work, it raised KeyError: 'evidence'"),
        (Strict, "for_pair must work, it raised TypeError"),
    ],
)
def test_a_fault_of_a_gate_is_found(gate: Any, sentence: str) -> None:
    with pytest.raises(ContractError) as raised:
        check_gate(gate, load_pair("ball"))
    assert sentence in str(raised.value)


# ---- policies -------------------------------------------------------------------------------------------------------


def test_a_flow_policy_keeps_the_contract() -> None:
    check_policy(load_flow("pusht-flow").policy(steps=2))


class Constant:
    """The simplest policy there is: it follows the state, and draws a little noise."""

    inpaints = False
    spec = ChunkSpec(vectors(2, goal=2, state=3), chunk=4, actions=2, rate_hz=10.0)
    scale = np.float32(1.0)

    def infer_batch(self, windows: Any, rngs: Any) -> Any:
        return [self.infer(window, rng) for window, rng in zip(windows, rngs, strict=True)]

    def infer(self, window: Any, rng: np.random.Generator, inpainting: Any = None) -> Any:
        noise = rng.normal(size=(4, 2)).astype(np.float32)
        return self.scale * window["state"][-1, :2] + 0.1 * noise


def test_a_policy_that_keeps_the_contract_passes() -> None:
    check_policy(Constant())


class Queue(Constant):
    """Like LeRobot's select_action: what it was asked before decides what it says now."""

    calls = 0

    def infer(self, window: Any, rng: np.random.Generator, inpainting: Any = None) -> Any:
        self.calls += 1
        return super().infer(window, rng) + np.float32(self.calls % 7)


class Dizzy(Constant):
    def infer(self, window: Any, rng: np.random.Generator, inpainting: Any = None) -> Any:
        return super().infer(window, np.random.default_rng())


class Averaging(Constant):
    def infer_batch(self, windows: Any, rngs: Any) -> Any:
        return list(np.asarray(super().infer_batch(windows, rngs)) - np.float32(len(windows)))


class Ranked(Constant):
    def infer_batch(self, windows: Any, rngs: Any) -> Any:
        chunks = super().infer_batch(windows, rngs)
        return [chunk + np.float32(i == 2) for i, chunk in enumerate(chunks)]


class Other(Constant):
    def infer_batch(self, windows: Any, rngs: Any) -> Any:
        return [chunk + np.float32(1) for chunk in super().infer_batch(windows, rngs)]


class Short(Constant):
    def infer(self, window: Any, rng: np.random.Generator, inpainting: Any = None) -> Any:
        return super().infer(window, rng)[:3]


class Lost(Constant):
    scale = np.float32(np.inf)


class Few(Constant):
    def infer_batch(self, windows: Any, rngs: Any) -> Any:
        return super().infer_batch(windows, rngs)[:1]


class Scaling(Constant):
    def infer(self, window: Any, rng: np.random.Generator, inpainting: Any = None) -> Any:
        window["state"][:] = 0.0
        return super().infer(window, rng)


class Missing(Constant):
    def infer(self, window: Any, rng: np.random.Generator, inpainting: Any = None) -> Any:
        return window["image.front"]


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (Queue(), "draw from the given rng alone, and keep nothing between two calls"),
        (Dizzy(), "draw from the given rng alone, and keep nothing between two calls"),
        (Averaging(), "must not depend on the other windows of its batch"),
        (Ranked(), "must not depend on"),
        (Other(), "infer must give what infer_batch gives"),
        (Short(), "infer_batch must give chunks float32 [4, 2], got float32 [3, 2]"),
        (Lost(), "infer_batch must give finite actions"),
        (Few(), "infer_batch must give a chunk per window, got 1 for 4"),
        (Scaling(), "infer_batch must not change the windows"),
        (Missing(), "infer_batch must work, it raised KeyError: 'image.front'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_a_policy_is_found(policy: Any, sentence: str) -> None:
    with pytest.raises(ContractError) as raised:
        check_policy(policy)
    assert sentence in str(raised.value)


def test_cameras_and_an_instruction_are_made_up_too() -> None:
    class Seeing(Constant):
        spec = ChunkSpec(
            ObservationSpec(dict(Constant.spec.observation.fields), instruction=True), chunk=4, actions=2, rate_hz=10.0
        )

        def infer(self, window: Any, rng: np.random.Generator, inpainting: Any = None) -> Any:
            assert window.instruction
            return super().infer(window, rng)

    check_policy(Seeing())


# ---- pairs ----------------------------------------------------------------------------------------------------------


def test_every_built_in_family_keeps_the_contract() -> None:
    check_pair(load_pair("ball"))
    units = ActionUnits.of_range(np.full(2, -1.0, np.float32), np.full(2, 1.0, np.float32))
    small, large = chunk_policies.small, chunk_policies.large
    for within in (0.0, 0.4):
        check_pair(
            ChunkParts("chunks", small, units, large.spec, lambda: large, execute=3, accept_within=within).pair()
        )


def test_somebody_elses_family_keeps_the_contract() -> None:
    check_pair(my_family.pair)
    check_gate(my_family.Nearness, my_family.pair)


def with_parts(**parts: Any) -> Any:
    """The bounded trolley with other parts."""
    return replace(my_family.pair, **parts)


class Restless(my_family.Drafter):
    """Proposes something else each time."""

    calls = 0

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        Restless.calls += 1
        found = super().propose(window, rng)
        return replace(found, actions=found.actions + np.float32(0.01 * Restless.calls))


class Hasty(my_family.Drafter):
    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        return replace(super().propose(window, rng), actions=np.zeros((3, 2), np.float32))


class Elsewhere(my_family.Drafter):
    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        found = super().propose(window, rng)
        return replace(found, window=Window(dict(window.arrays)))


class Biased(my_family.AdviceExchange):
    """Answers something else than the target."""

    def answer(self, kind: str, requests: Any) -> Any:
        return [{**found, "actions": -found["actions"]} for found in super().answer(kind, requests)]


class Batched(my_family.AdviceExchange):
    """Mixes up the requests of a batch."""

    def answer(self, kind: str, requests: Any) -> Any:
        return super().answer(kind, requests)[::-1]


class Terse(my_family.AdviceExchange):
    def answer(self, kind: str, requests: Any) -> Any:
        return [{"actions": found["actions"]} for found in super().answer(kind, requests)]


class Double(my_family.AdviceExchange):
    def answer(self, kind: str, requests: Any) -> Any:
        return [{**found, "actions": found["actions"].astype(np.float64)} for found in super().answer(kind, requests)]


class Unkept(my_family.BoundVerifier):
    def judge(self, answer: Any, proposal: Proposal, address: StepAddress) -> Outcome:
        return replace(super().judge(answer, proposal, address), kept=1.5)


class Curt(my_family.BoundVerifier):
    def judge(self, answer: Any, proposal: Proposal, address: StepAddress) -> Outcome:
        found = super().judge(answer, proposal, address)
        return replace(found, actions=found.actions[:2], origins=found.origins[:2])


class Unnamed(my_family.BoundVerifier):
    def judge(self, answer: Any, proposal: Proposal, address: StepAddress) -> Outcome:
        found = super().judge(answer, proposal, address)
        return replace(found, origins=found.origins.astype(np.int64))


def verified_by(kind: Any) -> Any:
    return with_parts(verifier=kind)


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        (with_parts(name="two words"), "name must be 1 to 64"),
        (with_parts(execute=0), "execute must be an integer of at least 1"),
        (with_parts(overlap="blend"), "overlap must be drop or average"),
        (with_parts(observation={"state": (4,)}), "observation must be an ObservationSpec"),
        (with_parts(observation=ObservationSpec({"state": Field((4,))})), "it lacks goal"),
        (with_parts(drafter=Restless), "must give the same proposal again"),
        (with_parts(drafter=Hasty), "a proposal must have actions float32 [n, 2], n at least 4; got float32 [3, 2]"),
        (with_parts(drafter=Elsewhere), "must carry the window"),
        (with_parts(exchange=Biased()), "a server's answer must give the outcome that the target"),
        (with_parts(exchange=Batched()), "must not depend on the other requests"),
        (with_parts(exchange=Terse()), "answer must give the arrays that the contract says"),
        (with_parts(exchange=Double()), "answer must give the arrays that the contract says"),
        (verified_by(Unkept), "kept must lie in [0, 1]"),
        (verified_by(Curt), "an outcome must have actions float32 [n, 2], n at least 4"),
        (verified_by(Unnamed), "uint8 [8]; got int64 [8]"),
        (with_parts(target=lambda: None), "verification must work, it raised AttributeError"),
    ],
)
def test_a_fault_of_a_pair_is_found(pair: Any, sentence: str) -> None:
    with pytest.raises(ContractError) as raised:
        check_pair(pair)
    assert sentence in str(raised.value)
