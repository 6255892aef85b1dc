"""The learned gate: exact where its head is right, taught from the target alone, and tied to its pair."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
from msgspec import structs
from tests.gates.steps import RNG, Fixed, distribution, proposal, tokenizer
from tests.tiny import KilledError, kill_at, quiet

from specact import load_pair
from specact.bundle.bundle import HEAD, find_bundle
from specact.bundle.manifest import fingerprint_of
from specact.errors import BundleError, ConfigError
from specact.families.codes.sampling import CodeDistribution, Drafted, sample_codes
from specact.gates import Learned, Oracle
from specact.gates.learned import TargetHead
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.rollout.distillation import DistillationData, collector
from specact.lab.rollout.pool import Pool
from specact.lab.train.head import HeadRecipe, train_head
from specact.observation import Window
from specact.types import Proposal

FEW = HeadRecipe(hidden=32, steps=400, batch=128, rounds=2)


@dataclass(frozen=True)
class Knows:
    """A head that estimates this, whatever it sees."""

    probs: np.ndarray
    fingerprint: str = "none"

    def estimate(self, window: Window, draft: CodeDistribution) -> np.ndarray:
        return self.probs


def drafted(seed: int) -> tuple[Proposal, CodeDistribution]:
    """A drafted step, and a target with the draft's offsets."""
    draft, target = distribution(seed), distribution(seed + 100)
    codes = sample_codes(draft, RNG(seed))
    actions = tokenizer().decode(codes, draft.offsets)
    return replace(proposal(draft=draft, codes=codes), actions=actions), replace(target, offsets=draft.offsets)


def seen(data: DistillationData, row: int) -> Window:
    return Window({name: np.asarray(column)[row] for name, column in data.observation.items()})


@pytest.mark.parametrize("on", ["rejection", "action_change"])
@pytest.mark.parametrize("seed", range(5))
def test_a_head_that_knows_the_target_makes_it_the_oracle(on: Any, seed: int) -> None:
    step, target = drafted(seed)
    learned = Learned(0.5, head=cast(TargetHead, Knows(target.probs)), tokenizer=tokenizer(), on=on)
    oracle = Oracle(0.5, target=Fixed(target), tokenizer=tokenizer(), on=on)
    assert learned.score(step, RNG(0)) == oracle.score(step, RNG(0))
    wrong = Learned(0.5, head=cast(TargetHead, Knows(step.evidence.draft.probs)), tokenizer=tokenizer(), on=on)
    assert wrong.score(step, RNG(0)) == pytest.approx(0.0, abs=1e-6)  # it thinks that both say the same


def test_a_taught_head_finds_most_of_what_the_oracle_would_and_is_there_after_the_last_round_alone(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    """Chance has efficiency 0 and the oracle 1; this tiny pair is easy."""
    bundle = load_pair(shutil.copytree(tiny_bundle, tmp_path / "tiny"))
    path, before = bundle.parts.path, {file.name for file in tiny_bundle.iterdir()}
    with Pool(1) as pool:
        roll = collector(2000, pool, quiet)
        with pytest.raises(KilledError):
            train_head(bundle, FEW, roll, path / "gate", kill_at("head-1", 15))
        assert {file.name for file in path.iterdir()} == {*before, "gate"}
        with pytest.raises(ConfigError, match=r"has no learned gate.*specact calibrate .* --gate learned"):
            gate_settings("learned", load_pair(path))
        metrics = train_head(bundle, FEW, roll, path / "gate", quiet)
    assert metrics["efficiency_0.2"] > 0.5 and metrics["efficiency_0.6"] > 0.3
    pair = load_pair(path)
    assert pair.fingerprint == bundle.fingerprint
    assert fingerprint_of(path / HEAD) == pair.parts.manifest.head


def test_a_direct_regression_answers_with_rejection_probabilities_for_the_same_gate(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    """It never sees the target's distribution, only how likely drawn codes are rejected; chance has efficiency 0."""
    bundle = load_pair(shutil.copytree(tiny_bundle, tmp_path / "tiny"))
    recipe = structs.replace(FEW, objective="rejection", rounds=1)
    with Pool(1) as pool:
        roll = collector(2000, pool, quiet)
        metrics = train_head(bundle, recipe, roll, bundle.parts.path / "gate", quiet)
        data = collector(20, pool, quiet)(bundle, [GateSettings("always")], 5)
    assert metrics["efficiency_0.2"] > 0.4
    gate = gate_settings("learned", bundle).build(bundle)
    head = TargetHead(bundle)
    for row in range(20):
        window = seen(data, row)
        draft = bundle.parts.draft.infer(window)
        step = Proposal(window, np.zeros((1, 1), np.float32), Drafted(draft, np.zeros(len(draft.probs), np.int64)))
        estimate = head.estimate(window, draft)
        assert (estimate <= draft.probs + 1e-6).all()
        rejected = 1.0 - np.prod(estimate[:, 0] / draft.probs[:, 0])
        assert gate.score(step, RNG(0)) == pytest.approx(rejected, abs=1e-5)


def test_a_head_of_another_pair_or_none_is_refused(tmp_path: Path) -> None:
    copy = shutil.copytree(find_bundle("ball"), tmp_path / "other")
    bundle, content = load_pair(copy), (copy / HEAD).read_bytes()
    model = onnx.load(copy / HEAD)
    model.metadata_props[0].value = "0123456789abcdef"
    onnx.save(model, copy / HEAD)
    with pytest.raises(BundleError, match="0123456789abcdef"):
        TargetHead(bundle)
    (copy / HEAD).write_bytes(content[:-100])
    with pytest.raises(BundleError, match="ONNX"):
        TargetHead(bundle)


def test_a_threshold_found_for_another_head_is_refused() -> None:
    bundle = load_pair("ball")
    for name, on in (("learned", "rejection"), ("learned_action", "action_change")):
        assert vars(gate_settings(name, bundle).build(bundle))["on"] == on
    options = (("on", "rejection"), ("weights", "0123456789abcdef"))
    with pytest.raises(BundleError, match="calibrated for 0123456789abcdef"):
        GateSettings("learned", threshold=0.5, options=options).build(bundle)
