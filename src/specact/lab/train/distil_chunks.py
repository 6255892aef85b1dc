"""Distillation of a chunk draft: retrains it on the target's chunks in states visited by the gated policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specact import __version__
from specact.bundle.manifest import read_manifest
from specact.errors import ConfigError
from specact.families.chunks.bundle import FlowBundle, RegressionBundle, load_flow, load_regression
from specact.families.chunks.flow import FlowUnits
from specact.families.chunks.folder import DRAFT, PairSettings, make_pair
from specact.families.chunks.pair import ChunkPair
from specact.families.tokens.bundle import TokenBundle, load_tokens
from specact.gates.settings import GateSettings
from specact.lab.data.distillation import DistillationData, join
from specact.lab.data.locks import locked
from specact.lab.rollout.distillation import Collect
from specact.lab.train.chunk_export import WRITERS
from specact.lab.train.chunk_recipe import ChunkRecipe
from specact.lab.train.chunk_train import TrainingBatch, chunk_stage
from specact.lab.train.distil import DistilRecipe, observation_statistics
from specact.lab.train.folder import last_lines
from specact.lab.train.loop import run
from specact.lab.train.stages import Progress
from specact.rng import Role, stream
from specact.toml import build
from specact.units import ActionUnits

_LOADERS: dict[str, Callable[[Path], FlowBundle | RegressionBundle | TokenBundle]] = {
    "flow": load_flow, "regression": load_regression, "tokens": load_tokens,
}  # fmt: skip
# Maximum size of the validation batch.
_HELD_OUT = 1024


def distil_chunks(
    pair: ChunkPair, recipe: DistilRecipe, collect: Collect, out: Path, progress: Progress, *, threads: int = 1
) -> Path:
    """Makes the pair ``NAME-distilled``: the same target, and the draft distilled from its answers.

    The draft keeps its recipe and is trained from scratch, on the target's chunks in states that gated rollouts visit
    (DAgger, Ross et al. 2011, with the target as the expert). A stopped run resumes in its last round.

    Args:
        pair: its draft is a bundle made by ``specact train``.
        recipe: rates, rounds and seed; the optimizer's settings are those of the draft's own recipe.
        collect: rolls a pair out under gates and returns the data of a round, given its number.
        out: folder of the run: weights and ``log.jsonl`` of every round, drafts and pairs.
        progress: called with (stage, done, total).
        threads: of PyTorch, in the whole process; results are exact for the same number.

    Raises:
        ConfigError: if the draft is no such bundle, or ``out`` is locked by another process.
    """
    settings, units = _draft_of(pair)
    spec, name = pair.draft.spec, f"{pair.name}-distilled"
    with locked(out):
        torch.set_num_threads(threads)
        gates = [GateSettings("random", threshold=rate) for rate in recipe.rates]
        collected: list[DistillationData] = []
        current = pair
        for number in range(recipe.rounds):
            collected.append(collect(current, gates, number))
            train, held_out = join(collected).split()
            held_out_batches = _Batches(held_out, pair.units, units, spec.chunk)
            stage = chunk_stage(
                f"distilled-{number}", settings, spec, observation_statistics(spec.observation, train), None,
                partial(_Batches(train, pair.units, units, spec.chunk).draw, recipe.seed, settings.batch),
                partial(held_out_batches.at, np.arange(min(len(held_out), _HELD_OUT))),
            )  # fmt: skip
            stage.module.load_state_dict(
                run(stage, out, lambda done: progress("distilled draft", done, settings.steps))
            )
            distilled = {"from": pair.fingerprint, **vars(recipe), "held_out": last_lines(out)[stage.name]["held_out"]}
            draft = out / "drafts" / f"{name}-{number}"
            WRITERS[settings.kind](
                draft,
                manifest={
                    "name": name, "env": pair.env, "specact": __version__, "recipe": asdict(settings),
                    "distilled": distilled,
                },
                model=stage.module,
                units=units,
                half=settings.precision == "float16",
            )  # fmt: skip
            current = _with_draft(pair, draft, out / ("bundles" if number == recipe.rounds - 1 else "rounds") / name)
    assert current.path is not None, "it was just written"
    return current.path


def _with_draft(pair: ChunkPair, draft: Path, folder: Path) -> ChunkPair:
    """Writes the pair with another draft to a new folder; removes what an interrupted run left there."""
    assert pair.path is not None, "its draft was read there"
    manifest = read_manifest(pair.path)
    steps = {f"{part}_steps": manifest.steps[part] for part in ("draft", "target")}
    settings = PairSettings(pair.execute, pair.accept_within, pair.overlap, pair.env, **steps)
    shutil.rmtree(folder, ignore_errors=True)
    target = pair.named.target or manifest.sources["target"]
    assert target is not None, "it was loaded"
    return make_pair(folder, str(draft), target, settings)


class _Batches:
    """Training batches of distillation data: observations, and the target's chunks in the flow's units."""

    def __init__(self, data: DistillationData, normalised: ActionUnits, units: FlowUnits, chunk: int) -> None:
        self._observation = data.observation
        wanted = data.outputs["wanted"]
        action = np.clip(normalised.to_environment(wanted), units.low, units.high)
        padding = ((0, 0), (0, chunk - action.shape[1]), (0, 0))
        self._chunks = torch.from_numpy(np.pad(units.to_flow(action), padding).astype(np.float32))
        # The target's chunks may be shorter than the draft's; the rest has no label.
        self._real = (torch.arange(chunk) < action.shape[1]).float()

    def draw(self, seed: int, count: int, step: int) -> TrainingBatch:
        return self.at(stream(seed, Role.DATA, step=step).integers(len(self._chunks), size=count))

    def at(self, rows: np.ndarray) -> TrainingBatch:
        observation = {name: torch.from_numpy(np.asarray(column[rows])) for name, column in self._observation.items()}
        return TrainingBatch(observation, self._chunks[rows], self._real.expand(len(rows), -1))


def _draft_of(pair: ChunkPair) -> tuple[ChunkRecipe, FlowUnits]:
    folder = Path() if pair.path is None else pair.path / DRAFT
    kind = read_manifest(folder).kind if folder != Path() and folder.is_dir() else "pair"
    if kind not in WRITERS:
        raise ConfigError(
            f"the draft of {pair.name} is no bundle of a chunk policy that specact train made, so how to train it is "
            'not known; train one with a recipe of kind = "regression" or "flow" and make the pair with it'
        )
    if pair.draft.spec.observation.images or pair.draft.spec.observation.instruction:
        raise ConfigError(
            f"the draft of {pair.name} has a camera or follows an instruction, and states of rollouts are kept without "
            "frames and words; distil it along demonstrations: specact train RECIPE --teacher TARGET"
        )
    bundle = _LOADERS[kind](folder)
    recipe = {name: value for name, value in bundle.manifest.recipe.items() if name != "teacher"}
    return build(
        ChunkRecipe, json.loads(json.dumps(recipe), object_hook=_without_none), "the recipe of the draft"
    ), bundle.units


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    """A recipe's table without None, which TOML does not have."""
    return {name: value for name, value in table.items() if value is not None}
