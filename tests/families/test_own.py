"""Families of somebody else by ``MODULE:NAME``: what is found and filled in, and what is said of all else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specact.errors import BundleError, ConfigError
from specact.gates import Random
from specact.gates.calibration import Calibration, calibrated_gate
from specact.gates.settings import gate_settings
from specact.load import load_exchange, load_pair
from specact.pair import PairSource
from specact.policy import SpeculativePolicy

THIRD_PARTY = Path(__file__).parents[1] / "thirdparty" / "my_family.py"
MODULE = """
from dataclasses import replace
from pathlib import Path
import numpy as np
import specact
from specact.errors import BundleError
from plug_family import AdviceExchange, Expert, pair

def on_server():
    raise BundleError("the target is only on its server")

named = replace(pair, env="ball", fingerprint="weights-1", path=Path("kept/here"), recommended_gates={"alpha": 0.25})
draft_only = replace(pair, target=on_server)
spaced = replace(pair, name="two words")
number = 3

@specact.chunk_policy(observation={"state": (2,)}, chunk=2, actions=1, rate_hz=10.0)
def policy(inputs):
    return np.zeros((len(inputs["state"]), 2, 1), np.float32)
"""


@pytest.fixture(autouse=True)
def here(plugs: Path) -> None:
    """The current directory, with modules in it."""
    (plugs / "plug_family.py").write_text(THIRD_PARTY.read_text())
    (plugs / "plug_pairs.py").write_text(MODULE)


@pytest.mark.parametrize("source", ["plug_family:pair", "plug_family:make"])
def test_an_object_and_a_function_are_pairs(source: str) -> None:
    pair = load_pair(source)
    assert pair.name == "bounded-trolley" and pair.source == PairSource(source)
    policy = SpeculativePolicy(pair, Random(0.5), seed=1)
    for _ in range(16):
        assert policy.act({"state": np.zeros(4), "goal": np.full(2, 0.5)}).shape == (2,)
    assert 0 < policy.counts["transmitted"] < policy.counts["steps"] == 4
    assert 0 < policy.counts["accepted"] <= policy.counts["verified"]
    assert load_exchange(source).contract.family == "bounds"


def test_what_a_pair_leaves_out_is_filled_in() -> None:
    pair, second = load_pair("plug_family:pair"), load_pair("plug_family:make")
    assert (pair.env, pair.path, dict(pair.recommended_gates)) == ("", Path("plug_family.pair"), {})
    assert pair.fingerprint == load_pair("plug_family:pair").fingerprint != second.fingerprint


def test_what_a_pair_says_counts() -> None:
    pair = load_pair("plug_pairs:named")
    assert (pair.env, pair.fingerprint, pair.path) == ("ball", "weights-1", Path("kept/here"))
    assert dict(gate_settings("adahi", pair).options)["alpha"] == 0.25


def test_a_calibration_is_found_again_and_refused_for_other_weights() -> None:
    pair, second = load_pair("plug_family:pair"), load_pair("plug_pairs:named")
    settings = gate_settings("adahi", pair)
    assert pair.path is not None and second.path is not None
    made = Calibration(pair.fingerprint, 0.5, settings, {}, [], {}, {})
    made.save(pair.path / "calibration")
    assert calibrated_gate(pair, "adahi", 0.5).threshold == settings.threshold
    made.save(second.path / "calibration")
    with pytest.raises(BundleError, match="specact calibrate plug_pairs:named"):
        calibrated_gate(second, "adahi", 0.5)


def test_a_target_that_is_only_on_its_server_is_asked_for_late() -> None:
    pair = load_pair("plug_pairs:draft_only")
    assert pair.drafter().propose(pair.observation.zeros(), np.random.default_rng(0)).actions.shape == (8, 2)
    with pytest.raises(BundleError, match="only on its server"):
        pair.target()


def test_an_exchange_and_a_chunk_policy_are_served_by_name() -> None:
    assert load_exchange("plug_pairs:AdviceExchange").contract.fingerprint == "expert-1"
    assert load_exchange("plug_pairs:policy").contract.family == "chunks"


@pytest.mark.parametrize(
    ("source", "said"),
    [("number", "It must be a pair of policies"), ("Expert", "it must make a specact.Pair"), ("spaced", "two words")],
)
def test_what_is_no_pair_is_refused(source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_pair(f"plug_pairs:{source}")


@pytest.mark.parametrize("source", ["plug_pairs:number", "plug_pairs:Expert"])
def test_what_cannot_be_served_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="It must be a target: a chunk policy, a pair of policies or an exchange"):
        load_exchange(source)


def test_only_a_pair_of_chunk_policies_has_another_draft() -> None:
    with pytest.raises(ConfigError, match=r"--target plug_pairs:policy, .* a pair of chunk policies"):
        load_pair("plug_family:pair", target="plug_pairs:policy")
    with pytest.raises(ConfigError, match="decoding"):
        load_pair(PairSource("pusht-flow"), decoding="full_2")
