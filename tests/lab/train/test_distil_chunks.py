"""A draft of chunks distilled in states of the gated pair: closer to the target there, and only the draft is new."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import quiet

from specact.errors import ConfigError
from specact.families.chunks.pair import ChunkParts, PairSettings
from specact.gates.settings import GateSettings
from specact.lab.rollout.distillation import DistillationData, collect
from specact.lab.rollout.pool import Pool
from specact.lab.train.distil import DistilRecipe, distil
from specact.lab.train.recipe import ChunkRecipe
from specact.lab.train.train import train
from specact.load import load_pair, make_pair
from specact.pair import Pair

LARGE = "tests.gates.chunk_policies:large"
DRAFT = ChunkRecipe(
    kind="regression", bundle="small", env="ball", generate_episodes=6, window=2, chunk=4, layers=1, heads=2,
    width=16, dropout=0.0, steps=250, batch=64, learning_rate=4e-3, warmup=20, average=0.9, bfloat16=False,
)  # fmt: skip
FEW = DistilRecipe(rates=(0.0, 0.5), rounds=2)


def lessons(pair: Pair[Any], number: int, wanted: int = 400) -> DistillationData:
    with Pool(1) as pool:
        return collect(pair, [GateSettings("random", threshold=0.5)], wanted, number, pool, quiet)


def teach(pair: Pair[Any], out: Path, *, shuffled: bool = False) -> Pair[Any]:
    def roll(now: Pair[Any], gates: Sequence[GateSettings], number: int) -> DistillationData:
        data = lessons(now, number)
        if not shuffled:
            return data
        rows = np.random.default_rng(0).permutation(len(data))
        return replace(data, outputs={**data.outputs, "wanted": data.outputs["wanted"][rows]})

    made = load_pair(distil(pair, FEW, roll, out, quiet), target=LARGE)
    assert isinstance(made.parts, ChunkParts)
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair[Any]:
    """A draft of the expert's demonstrations before a target that acts by another law."""
    folder = tmp_path_factory.mktemp("chunks")
    made = train(DRAFT, folder, folder / "run", quiet)
    return make_pair(folder / "pair", str(made.bundles[0]), LARGE, PairSettings(execute=2, env="ball"))


def test_it_is_closer_to_the_target_where_the_gated_pair_goes(pair: Pair[Any], tmp_path: Path) -> None:
    """On states of either pair that nobody was taught on; with answers to other states it is not."""
    made, wrong = teach(pair, tmp_path / "right"), teach(pair, tmp_path / "wrong", shuffled=True)
    mean = {each.name: float(lessons(each, 7).outputs["drafted_distance"].mean()) for each in (pair, made)}
    assert mean[made.name] < 0.5 * mean[pair.name]
    assert mean[made.name] < 0.5 * float(lessons(wrong, 7).outputs["drafted_distance"].mean())
    # The same command again finds its rounds finished, and ends with the same draft.
    assert teach(pair, tmp_path / "right").fingerprint == made.fingerprint != wrong.fingerprint
    assert made.name == "pair-distilled" and made.parts.draft.spec == pair.parts.draft.spec
    assert (made.execute, made.env, made.fingerprint != pair.fingerprint) == (2, "ball", True)


def test_a_draft_of_unknown_making_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    made = make_pair(tmp_path / "pair", f"{tiny_bundle}#draft", f"{tiny_bundle}#target", PairSettings(env="ball"))
    with pytest.raises(ConfigError, match=r'the draft of pair is no bundle .* kind = "regression" or "flow"'):
        distil(made, FEW, lambda *_: lessons(made, 0), tmp_path / "out", quiet)
