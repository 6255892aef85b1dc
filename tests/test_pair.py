"""What a policy on a robot is made of: both families are pairs, for the type checker and in use."""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import pytest

from specact import load_pair
from specact.families.chunks.pair import ChunkParts
from specact.families.chunks.policy import Chunk
from specact.families.chunks.sources import Inputs, chunk_policy
from specact.families.codes.sampling import CodeDistribution
from specact.gates import Random
from specact.observation import ObservationHistory
from specact.pair import Drafter, Pair
from specact.policy import SpeculativePolicy
from specact.rng import Role, StepAddress, stream
from specact.types import Outcome
from specact.units import ActionUnits
from specact.verification import LocalTarget, TargetPolicy, Verifier
from specact.wire.exchange import Exchange

A = TypeVar("A")
SHAPES: Mapping[str, tuple[int, ...]] = {"state": (8,), "goal": (2,)}


@chunk_policy(observation=SHAPES, chunk=5, actions=2, rate_hz=20.0)
def constant(inputs: Inputs) -> Chunk:
    return np.full((len(inputs["state"]), 5, 2), 0.25, np.float32)


UNITS = ActionUnits.of_range(np.full(2, -1.0, np.float32), np.full(2, 1.0, np.float32))
# The annotations are what is tested here: mypy refuses a family that is no pair.
CODES: Pair[CodeDistribution] = load_pair("ball")
CHUNKS: Pair[Chunk] = ChunkParts("constant", constant, UNITS, constant.spec, lambda: constant, execute=3).pair()
ADDRESS = StepAddress(1, 2, 3, 4)


def steps(pair: Pair[A]) -> Outcome:
    """One step by hand, from the parts that a pair offers; whatever the family, the parts fit together."""
    drafter: Drafter = pair.drafter()
    target: TargetPolicy[A] = pair.target()
    verifier: Verifier = pair.verifier(LocalTarget(target))
    exchange: Exchange[A] = pair.exchange
    window = ObservationHistory(pair.observation).push({name: np.zeros(shape) for name, shape in SHAPES.items()})
    proposal = drafter.propose(window, stream(1, Role.DRAFT))
    assert proposal.window is window and len(proposal.actions) >= pair.execute
    outcome = verifier.submit(proposal, ADDRESS).result()
    assert isinstance(outcome, Outcome)
    assert set(exchange.contract.observation.fields) <= set(pair.observation.fields)
    assert exchange.contract.kinds["infer"].reply.nbytes
    return outcome


@pytest.mark.parametrize("pair", [CODES, CHUNKS], ids=["codes", "chunks"])
def test_the_parts_of_every_pair_fit_together(pair: Pair[Any]) -> None:
    outcome = steps(pair)
    assert len(outcome.actions) == len(outcome.origins) >= pair.execute
    assert 0 <= outcome.accepted <= outcome.verified > 0
    assert pair.name and pair.rate_hz == 20.0 and pair.overlap == "drop"
    actions = pair.units.to_environment(outcome.actions)
    assert actions.shape == outcome.actions.shape and np.isfinite(actions).all()


@pytest.mark.parametrize("pair", [CODES, CHUNKS], ids=["codes", "chunks"])
def test_every_pair_makes_a_policy(pair: Pair[Any]) -> None:
    policy = SpeculativePolicy(pair, Random(0.5), seed=2)
    inferences = 0
    for i in range(20):
        inferences += policy.wants_inference
        action = policy.act({name: np.full(shape, 0.01 * i) for name, shape in SHAPES.items()})
        assert action.shape == (2,) and np.isfinite(action).all()
    assert policy.counts["steps"] == inferences == -(-20 // pair.execute)
    assert 0 < policy.counts["transmitted"] < inferences
