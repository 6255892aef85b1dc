"""A family that is not specact's: the target gives actions and a bound, within which drafted actions are kept."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specact.gates import Gate
from specact.observation import Field, ObservationSpec, Window
from specact.pair import Answer, Pair, TargetVerifier
from specact.rng import StepAddress
from specact.types import ActionUnits, Chunk, Origin, Outcome, Proposal
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Contract, Kind, Request

CHUNK, EXECUTE = 8, 4
OBSERVATION = ObservationSpec({"state": Field((4,)), "goal": Field((2,), history=0)})
ONE = np.ones(2, np.float32)


class Advice(NamedTuple):
    """What the target answers: actions ``[8, 2]``, and how far each of their dimensions may be missed, ``[2]``."""

    actions: Chunk
    bound: NDArray[np.float32]


def steer(window: Window, damping: float) -> Chunk:
    position, velocity, actions = window["state"][-1, :2], window["state"][-1, 2:], []
    for _ in range(CHUNK):
        actions.append(np.clip(4.0 * (window["goal"] - position) - damping * velocity, -1.0, 1.0))
        velocity = 0.9 * velocity + 0.1 * actions[-1]
        position = position + 0.2 * velocity
    return np.asarray(actions, np.float32)


def to_go(window: Window) -> NDArray[np.float32]:
    return np.asarray(np.abs(window["goal"] - window["state"][-1, :2]), np.float32)


class Drafter:
    """Brakes too late. Its evidence is the distance from the goal."""

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        return Proposal(window, steer(window, damping=1.0), evidence=float(np.linalg.norm(to_go(window))))


class Expert:
    """The target. Far from the goal it does not matter much."""

    def answer(self, window: Window, address: StepAddress) -> Advice:
        return Advice(steer(window, damping=3.0), 0.05 + to_go(window))


class BoundVerifier(TargetVerifier[Advice]):
    """Accepts drafted actions up to the first beyond the bound; from there on the target's are taken."""

    def judge(self, answer: Answer[Advice], proposal: Proposal, address: StepAddress) -> Outcome:
        wanted, bound = answer.value
        within = (np.abs(proposal.actions - wanted) <= bound).all(axis=1)
        accepted = int(np.logical_and.accumulate(within).sum())
        actions = np.concatenate([proposal.actions[:accepted], wanted[accepted:]])
        origins = np.where(np.arange(CHUNK) < accepted, Origin.ACCEPTED, Origin.REPLACED).astype(np.uint8)
        return Outcome(actions, origins, CHUNK, accepted, answer.times, bound, kept=float(accepted >= EXECUTE))


class AdviceExchange:
    """What crosses the wire; both sides must agree on the name and the numbers."""

    name = "bounded-trolley"
    contract = Contract(
        "bounds",
        {"chunk": CHUNK, "actions": 2},
        OBSERVATION,
        {
            "infer": Kind(
                Layout({}),
                Layout({"actions": ArraySpec((CHUNK, 2), np.float32), "bound": ArraySpec((2,), np.float32, 0.0)}),
            )
        },
        fingerprint="expert-1",
    )

    def read(self, arrays: Arrays) -> Advice:
        return Advice(arrays["actions"], arrays["bound"])

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays]:
        """What the server does."""
        return [Expert().answer(request.window, request.address)._asdict() for request in requests]


def make() -> Pair[Advice]:
    return Pair(
        name="bounded-trolley", observation=OBSERVATION, units=ActionUnits.of_range(-ONE, ONE), execute=EXECUTE,
        rate_hz=20.0, drafter=Drafter, target=Expert, verifier=BoundVerifier, exchange=AdviceExchange(),
    )  # fmt: skip


pair = make()


class Nearness(Gate):
    """Queries the target near the goal. A gate that reads a family's evidence names the family."""

    family = "bounds"

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return -float(proposal.evidence)
