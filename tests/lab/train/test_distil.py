"""A distilled draft: same architecture, same target, closer to it, and a run that can be stopped."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.tiny import quiet

from specact import load_pair
from specact.bundle.manifest import fingerprint_of
from specact.errors import ConfigError
from specact.families.codes.pair import PARTS
from specact.files import write_json
from specact.gates.settings import GateSettings
from specact.lab.rollout.distillation import DistillationData, collect
from specact.lab.rollout.pool import Pool
from specact.lab.train.distil import DistilRecipe, distil
from specact.observation import Window
from specact.pair import Pair

FEW = DistilRecipe(rates=(0.0, 0.5), steps=600, batch=128)


def teach(bundle: Path, out: Path, recipe: DistilRecipe = FEW) -> Pair[Any]:
    with Pool(1) as pool:

        def roll(pair: Pair[Any], gates: Sequence[GateSettings], number: int) -> DistillationData:
            return collect(pair, gates, 1500, number, pool, lambda done: None)

        return load_pair(distil(load_pair(bundle), recipe, roll, out, quiet))


@pytest.fixture(scope="module")
def distilled(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair[Any], Path]:
    out = tmp_path_factory.mktemp("distilled")
    return teach(tiny_bundle, out), out


def rejection(bundle: Pair[Any], states: DistillationData) -> float:
    """Mean total variation of draft and target over states and codebooks."""
    windows = [
        Window({name: np.asarray(values)[row] for name, values in states.observation.items()})
        for row in range(len(states))
    ]
    draft, target = (policy.infer_batch(windows) for policy in (bundle.parts.draft, bundle.parts.target))
    return float(np.mean([0.5 * np.abs(q.probs - p.probs).sum(-1) for q, p in zip(draft, target, strict=True)]))


def test_it_is_closer_to_the_target_where_the_gated_policy_goes(
    tiny_bundle: Path, distilled: tuple[Pair[Any], Path]
) -> None:
    """On the states of either pair, none of which it was taught on."""
    original, made = load_pair(tiny_bundle), distilled[0]
    for pair in (original, made):
        with Pool(1) as pool:
            states = collect(pair, [GateSettings("random", threshold=0.5)], 500, 7, pool, lambda done: None)
        assert rejection(made, states) < 0.7 * rejection(original, states)


def test_only_the_draft_is_new(tiny_bundle: Path, distilled: tuple[Pair[Any], Path]) -> None:
    original, made = load_pair(tiny_bundle), distilled[0]
    for part in ("target", "tokenizer"):
        assert fingerprint_of(made.parts.path / PARTS[part]) == fingerprint_of(original.parts.path / PARTS[part])
    assert made.name == "tiny-distilled"
    assert made.parts.spec == original.parts.spec
    assert made.parts.manifest.distilled["from"] == original.fingerprint
    assert made.fingerprint != original.fingerprint
    assert not (made.parts.path / "calibration").exists()  # the old thresholds are not for this draft


class StoppedError(Exception):
    """Stands for a kill."""


def test_a_stopped_run_ends_like_one_that_was_not(tiny_bundle: Path, tmp_path: Path) -> None:
    recipe = structs.replace(FEW, steps=300, rounds=1)
    whole = teach(tiny_bundle, tmp_path / "whole", recipe)

    with Pool(1) as pool:

        def roll(pair: Pair[Any], gates: Sequence[GateSettings], number: int) -> DistillationData:
            return collect(pair, gates, 1500, number, pool, lambda done: None)

        told = 0

        def stop(stage: str, done: int, total: int) -> None:
            nonlocal told
            told += 1
            if told == 270:  # after the checkpoint at 250
                raise StoppedError

        with pytest.raises(StoppedError):
            distil(load_pair(tiny_bundle), recipe, roll, tmp_path / "stopped", stop)
    again = teach(tiny_bundle, tmp_path / "stopped", recipe)
    assert fingerprint_of(again.parts.path / PARTS["draft"]) == fingerprint_of(whole.parts.path / PARTS["draft"])


def test_a_bundle_that_does_not_say_how_its_draft_was_made_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["policies"]
    write_json(copy / "manifest.json", manifest)
    with pytest.raises(ConfigError, match="does not say how its draft was made"):
        teach(copy, tmp_path / "out")
