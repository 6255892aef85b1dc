"""A sequential secondary head, from the recipe over the bundle to the wire: both policies have one, or neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from msgspec import structs
from tests.tiny import quiet

from specact import Pair, SpeculativePolicy, load_pair
from specact.errors import BundleError, ConfigError, RemoteError
from specact.families.codes.policy import OnnxPolicy, executed_codes
from specact.gates import Always
from specact.lab.rollout.processes import ServerProcess, serving
from specact.lab.train.recipe import CodesRecipe, PolicyRecipe, TokenizerRecipe
from specact.lab.train.train import train
from specact.pair import Verifier
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.target import remote_verifier
from specact.types import StepRecord

PLAIN = PolicyRecipe(
    layers=1, heads=2, width=8, head_width=0, steps=30, batch=16, warmup=3, average=0.9, bfloat16=False, snapshot=0.5
)
RECIPE = CodesRecipe(
    env="ball",
    generate_episodes=5,
    generate_noise=0.3,
    tokenizer=TokenizerRecipe(codes=4, latent=4, hidden=8, steps=50, batch=64),
    policies={
        "target": structs.replace(PLAIN, sequential=True),
        "draft": structs.replace(PLAIN, sequential=True),
        "other": PLAIN,
    },
    bundles={"pair": ("target", "draft@snapshot")},
)
MIXED: list[tuple[str, str]] = [("target", "other"), ("other@snapshot", "target")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Pair[Any]:
    made = train(RECIPE, Path(), tmp_path_factory.mktemp("sequential") / "run", quiet)
    return load_pair(made.bundles[0])


@pytest.fixture(scope="module")
def server(trained: Pair[Any]) -> Iterator[ServerProcess]:
    with serving(trained.parts.path) as process:
        yield process


@pytest.mark.parametrize("pair", MIXED)
def test_a_bundle_of_both_kinds_is_refused_before_it_is_trained(pair: tuple[str, str]) -> None:
    with pytest.raises(
        ConfigError, match=f"'mixed': one of {' and '.join(pair)} is sequential .* to the same value for both"
    ):
        structs.replace(RECIPE, bundles={"mixed": pair})


def test_a_policy_without_two_codebooks_is_refused_before_it_is_trained() -> None:
    with pytest.raises(ConfigError, match="'target': sequential needs 2 codebooks, the tokenizer has 3"):
        structs.replace(RECIPE, tokenizer=structs.replace(RECIPE.tokenizer, codebooks=3))


def test_the_bundle_says_so_and_its_policies_are_such(trained: Pair[Any]) -> None:
    assert trained.parts.spec.sequential and trained.parts.manifest.spec["sequential"] is True
    assert load_pair("ball").parts.spec.sequential is False
    for record in play(trained, None, steps=5):
        draft = record.proposal.evidence.draft
        assert draft.conditional is not None and draft.conditional.shape == (4, 4)
        np.testing.assert_allclose(draft.conditional.sum(axis=1), 1.0, rtol=1e-12)
        np.testing.assert_allclose(draft.probs[1], draft.probs[0] @ draft.conditional, rtol=1e-12)


def test_a_policy_of_the_other_kind_belongs_to_another_bundle(trained: Pair[Any], tiny_bundle: Path) -> None:
    for pair in (trained, load_pair(tiny_bundle)):
        spec = structs.replace(pair.parts.spec, sequential=not pair.parts.spec.sequential)
        with pytest.raises(BundleError, match=r"draft\.onnx gives .*conditional"):
            OnnxPolicy(pair.parts.path / "draft.onnx", spec, spec.draft)


def play(bundle: Pair[Any], verifier: Verifier | None, steps: int = 200) -> list[StepRecord]:
    rng = np.random.default_rng(3)
    policy = SpeculativePolicy(bundle, Always(), verifier=verifier, seed=5, robot=1)
    records = []
    for _ in range(steps):
        policy.act({name: rng.uniform(-1, 1, field.shape) for name, field in bundle.observation.fields.items()})
        assert policy.record is not None
        records.append(policy.record)
    return records


@pytest.mark.parametrize("sampling", ["device", "server"])
def test_a_remote_pair_draws_what_a_local_one_draws(
    trained: Pair[Any], server: ServerProcess, sampling: Literal["device", "server"]
) -> None:
    here = play(trained, None)
    with Client(Endpoint("ws", "127.0.0.1", server.port), trained.exchange.contract) as client:
        client.connect(10.0)
        remote = play(trained, remote_verifier(client, trained, 20_000.0, sampling))
    assert [record.miss for record in remote] == [None] * len(here)
    verdicts = [record.outcome.evidence for record in here if record.outcome is not None]
    assert {tuple(verdict.accepted.tolist()) for verdict in verdicts} >= {(True, True), (True, False), (False, False)}
    for ours, theirs in zip(here, remote, strict=True):
        assert executed_codes(ours).tolist() == executed_codes(theirs).tolist()
        np.testing.assert_array_equal(ours.actions, theirs.actions)


def test_a_device_of_the_other_kind_is_refused_at_the_handshake(trained: Pair[Any], server: ServerProcess) -> None:
    # Only the manifest's word differs, as where one side has an export of before there were such heads.
    plain = trained.composed(spec=structs.replace(trained.parts.spec, sequential=False))
    refusal = pytest.raises(RemoteError, match="differ in sequential False / True; deploy the same bundle on both")
    with Client(Endpoint("ws", "127.0.0.1", server.port), plain.exchange.contract) as client, refusal:
        client.connect(1.0)
