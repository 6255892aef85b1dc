"""What every kind of training keeps: a stopped run ends with the same bytes, exports are checked, folders are one's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.lab.train.test_drafters import RECIPE as DRAFTERS
from tests.lab.train.test_drafters import write_target
from tests.lab.train.test_resume import RECIPE
from tests.tiny import KilledError, kill_at, quiet

from specact.bundle.manifest import read_manifest
from specact.errors import ConfigError
from specact.lab.train.chunks import ChunkTraining
from specact.lab.train.codes import CodesTraining
from specact.lab.train.corrector import CorrectorTraining
from specact.lab.train.drafters import DrafterTraining
from specact.lab.train.export import PARITY
from specact.lab.train.flash import FlashTraining
from specact.lab.train.recipe import AnyRecipe, ChunkRecipe, CorrectorRecipe, FlashRecipe
from specact.lab.train.train import train
from specact.load import load_pair

CODES = structs.replace(RECIPE, bundles={"made": ("target", "target@snapshot")})
CHUNKS = ChunkRecipe(
    kind="flow", bundle="made", env="ball", generate_episodes=5, generate_noise=0.3, window=2, chunk=3, layers=1,
    heads=2, width=8, steps=30, batch=16, warmup=3, state_noise=0.1, bfloat16=False,
)  # fmt: skip
# By kind: the recipe, and moments at which its run is stopped, once.
KINDS: dict[str, tuple[Callable[[Path, Path], AnyRecipe], list[tuple[str, int]]]] = {
    "codes": (
        lambda flow, tokens: CODES,
        [
            ("demonstrations", 2),
            ("tokenizer", 95),  # codes are revived after this one
            ("target", 10),  # told the step, killed before its checkpoint
            ("target", 17),  # the snapshot is made twice
            ("draft", 17),
        ],
    ),
    "flow": (lambda flow, tokens: CHUNKS, [("flow", 17)]),
    "regression": (lambda flow, tokens: structs.replace(CHUNKS, kind="regression", snapshots=1), [("regression", 17)]),
    "tokens": (lambda flow, tokens: structs.replace(CHUNKS, kind="tokens"), [("tokens", 17)]),
    "drafters": (
        lambda flow, tokens: structs.replace(DRAFTERS, target=str(tokens), bundle="made", steps=30),
        [("rollouts", 1), ("head", 17)],
    ),
    "flash": (
        lambda flow, tokens: FlashRecipe(
            kind="flash", bundle="made", target=str(flow), execute=3, heads=2, steps=30, batch=8, warmup=3
        ),
        [("target's answers", 64), ("block", 17)],
    ),
    "corrector": (
        lambda flow, tokens: CorrectorRecipe(
            kind="corrector", bundle="made", target=str(flow), episodes=20, most_delay=2, steps=30, batch=8, warmup=3
        ),
        [("rollouts", 1), ("corrector", 17)],
    ),
}


@pytest.fixture(scope="module", params=list(KINDS))
def made(request: Any, tiny_flow: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, AnyRecipe, Path]:
    """A kind, its recipe, and a run that was never stopped."""
    folder = tmp_path_factory.mktemp(request.param)
    tokens = write_target(folder / "small").path if request.param == "drafters" else folder
    recipe = KINDS[request.param][0](tiny_flow, tokens)
    train(recipe, Path(), folder / "run", quiet, every=10)
    return request.param, recipe, folder / "run"


def test_a_stopped_run_ends_with_the_bytes_of_one_never_stopped(
    made: tuple[str, AnyRecipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, recipe, whole = made
    out = tmp_path / "run"
    for training in (CodesTraining, ChunkTraining, DrafterTraining, FlashTraining, CorrectorTraining):
        monkeypatch.setattr(training, "export", lambda *_: [])  # which takes long, and is the same for the same weights
    for moment in KINDS[kind][1]:
        with pytest.raises(KilledError):
            train(recipe, Path(), out, kill_at(*moment), every=10)
        assert not (out / f"{moment[0]}.safetensors").exists()
    recorded, begun = {path: path.stat().st_mtime_ns for path in out.glob("rollouts/*")}, list[int]()
    train(recipe, Path(), out, lambda stage, done, total: begun.extend([done] * (stage == moment[0])), every=10)
    assert begun[0] == 11, "it did not go on from its checkpoint"
    files = sorted(path.relative_to(out) for path in out.rglob("*.safetensors"))
    assert files == sorted(
        path.relative_to(whole) for path in whole.rglob("*.safetensors") if "bundles" not in path.parts
    )
    for file in files:
        assert (out / file).read_bytes() == (whole / file).read_bytes(), file
    assert {path: path.stat().st_mtime_ns for path in recorded} == recorded, "nothing is recorded twice"
    assert not [path for path in out.iterdir() if path.suffix in (".npy", ".checkpoint") or path.name == "frames"]


def test_bundles_are_checked_and_say_how_they_were_made(made: tuple[str, AnyRecipe, Path]) -> None:
    kind, _, run = made
    names = ["made", "made-15"] if kind == "regression" else ["made"]  # the second on the way
    assert sorted(path.name for path in (run / "bundles").iterdir()) == names
    for path in (run / "bundles").iterdir():
        manifest = read_manifest(path)
        assert manifest.kind == {"codes": "pair"}.get(kind, kind)
        assert manifest.parity and 0.0 <= max(manifest.parity.values()) < PARITY
        assert min(manifest.parameters.values()) > 0
        assert manifest.recipe == json.loads((run / "recipe.json").read_text())
        assert manifest.training and all(
            line["held_out"]
            for name, line in manifest.training.items()
            if name != "boundary"  # fitted, not trained
        )
    if kind == "codes":
        assert load_pair(run / "bundles" / "made").name == "made"


def test_a_folder_of_another_recipe_is_refused_and_left_as_it_is(made: tuple[str, AnyRecipe, Path]) -> None:
    _, recipe, run = made
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="another recipe"):
        train(structs.replace(recipe, seed=99), Path(), run, quiet)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
