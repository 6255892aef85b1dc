"""Drafts that are trained again on their target's outputs, in states that the gated policy visits.

This is DAgger (Ross et al. 2011) with the target as the expert: rounds of rollouts, each with what the last one made.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specact import __version__
from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import read_manifest
from specact.errors import ConfigError
from specact.families.chunks.flow import read_flow_units
from specact.families.chunks.pair import DRAFT, ChunkParts, PairSettings
from specact.families.chunks.policy import ChunkSpec
from specact.families.codes.pair import PARTS, CodeParts, codes_of, load_codes
from specact.gates.settings import GateSettings
from specact.lab.data.frames import FrameWindows
from specact.lab.rollout.distillation import Collect, DistillationData, join
from specact.lab.train.attention import Statistics, module_name
from specact.lab.train.chunks import CHUNK_PARTS, TrainingBatch, chunk_stage, write_chunk_bundle
from specact.lab.train.codes import architecture, export_policy, rebuild
from specact.lab.train.dataset import moments
from specact.lab.train.encoder import PatchEmbedding, features_of
from specact.lab.train.export import BundleFolder
from specact.lab.train.fit import Training, fit
from specact.lab.train.flow import Flow, TokenModel
from specact.lab.train.loop import Losses, Progress, Stage, last_lines
from specact.lab.train.recipe import Optimisation, chunk_recipe_of, plain
from specact.lab.train.vqbet import VQBeT
from specact.load import make_pair
from specact.observation import Field
from specact.pair import Pair
from specact.records import Count, NotNegative, Positive, Seed, Share
from specact.rng import Role, stream

_FRAMES = 256  # maximum windows of frames in a validation batch
_HELD_OUT = 1024  # maximum size of a validation batch
# A pair and the gates under which it is rolled out.
Rollout = tuple[Pair[Any], Sequence[GateSettings]]


class RoundsRecipe(Optimisation, frozen=True, kw_only=True):
    """The settings of rounds, each a training.

    The first of the ``rounds`` rolls out the pair as it is, under random gates of these transmission ``rates``; every
    further one what the previous one trained.
    """

    rates: tuple[Share, ...] = (0.0, 0.2, 0.4, 0.6)
    rounds: Count = 2
    steps: Count = 12_000
    batch: Count = 512
    learning_rate: Positive = 2e-3
    seed: Seed = 0


class DistilRecipe(RoundsRecipe, frozen=True, kw_only=True):
    """The settings of a distillation; the optimizer of a chunk draft has those of the draft's own recipe.

    ``offset_weight`` is that of the offsets' L1 distance to the target's, weighted with p, relative to the codes'
    cross-entropy.
    """

    offset_weight: NotNegative = 10.0
    weight_decay: NotNegative = 1e-3


class Rounds(Training):
    """Alternating rounds of rollouts and training; a stopped run repeats the rollouts and resumes in its last round.

    ``collect`` rolls out a pair under gates, in the first round this ``pair``, and returns the lessons of a round,
    given its number. The stage of a round is called ``name`` and that number, and has the recipe's number of steps
    unless ``steps`` is given. ``encoders`` are of the draft's cameras: features are learned from in place of frames.
    """

    def __init__(
        self, pair: Pair[Any], name: str, recipe: RoundsRecipe, collect: Collect, *,
        encoders: Mapping[str, nn.Module] | None = None, steps: int = 0,
    ) -> None:  # fmt: skip
        self._pair, self._name, self._rounds, self._collect = pair, name, recipe, collect
        self._encoders, self._steps = encoders or {}, steps or recipe.steps
        self._gates = [GateSettings("random", threshold=rate) for rate in recipe.rates]
        self._rollout: Rollout = (pair, self._gates)
        self._lessons: list[DistillationData] = []
        self.request = {"from": pair.fingerprint, **plain(recipe)}

    @abstractmethod
    def stage_on(self, name: str, train: DistillationData, held_out: DistillationData) -> Stage:
        """The stage of a round, given the lessons of all rounds so far."""

    @abstractmethod
    def publish(self, stage: Stage, held_out: DistillationData, metrics: Mapping[str, float], *, last: bool) -> Rollout:
        """Writes the trained networks; returns the pair and gates of the next rollout, no gates for the random ones."""

    def plan(self) -> list[dict[str, int]]:
        return [{f"{self._name}-{number}": self._steps} for number in range(self._rounds.rounds)]

    def stage(self, name: str) -> Stage:
        while (number := len(self._lessons)) <= int(name.rpartition("-")[2]):
            if number:
                self._rollout = self._published(last=False)
            pair, gates = self._rollout
            self._lessons.append(encoded(self._collect(pair, gates or self._gates, number), self._encoders))
            train, self._held_out = join(self._lessons).split()
            torch.manual_seed(self._rounds.seed)
            self._stage = self.stage_on(f"{self._name}-{number}", train, self._held_out)
        return self._stage

    def export(self, progress: Progress) -> list[Path]:
        self.stage(f"{self._name}-{self._rounds.rounds - 1}")  # where all were finished before
        path = self._published(last=True)[0].path
        assert path is not None, "it was just written"
        return [path]

    def _published(self, *, last: bool) -> Rollout:
        """Publishes the newest stage."""
        stage = self._stage
        stage.module.load_state_dict(self.weights(stage.name))
        return self.publish(stage, self._held_out, last_lines(self.out)[stage.name]["held_out"], last=last)

    def _rows(self, step: int, data: DistillationData, size: int) -> np.ndarray:
        """The rows of the batch of a step."""
        return stream(self._rounds.seed, Role.DATA, step=step).integers(len(data), size=size)


def distil(
    pair: Pair[Any], recipe: DistilRecipe, collect: Collect, out: Path, progress: Progress, *, threads: int = 1
) -> Path:
    """Makes ``NAME-distilled``, and returns its folder: the same target, and the draft trained on its outputs.

    The draft, of action codes or chunks, is trained from scratch and keeps its architecture. An image encoder that was
    trained before the draft stays frozen. A draft that ``specact train`` did not make is refused.
    """
    kind = ChunkDistillation if isinstance(pair.parts, ChunkParts) else CodesDistillation
    return fit(kind(pair, recipe, collect), out, progress, threads=threads).bundles[0]


class CodesDistillation(Rounds):
    """A draft of action codes; see :func:`distil`."""

    def __init__(self, pair: Pair[Any], recipe: DistilRecipe, collect: Collect) -> None:
        self._bundle, self.recipe = codes_of(pair, "distillation"), recipe
        self._policy, self._shapes = architecture(self._bundle, "draft")
        encoders = draft_encoders(self._bundle) if self._policy.encoder.learns else {}
        super().__init__(pair, "distilled", recipe, collect, encoders=encoders)

    def stage_on(self, name: str, train: DistillationData, held_out: DistillationData) -> Stage:
        statistics = lesson_statistics(self._shapes.observation.fields, train)
        network, recipe = VQBeT(self._shapes, self._policy, statistics), self.recipe
        for camera, encoder in self._encoders.items():
            network.freeze(camera, encoder)
        temperature = self._bundle.spec.temperature

        def losses(data: DistillationData, rows: np.ndarray) -> dict[str, Tensor]:
            prediction = network.heads(network.features(observation_at(data, rows))[:, -1:])
            p = torch.from_numpy(data.outputs["target_probs"][rows])
            logs = (prediction.logits[:, 0] / temperature).log_softmax(-1)
            offsets = torch.from_numpy(data.outputs["target_offsets"][rows].astype(np.float32))
            offset_error = (prediction.offsets[:, 0] - offsets).abs().mean((-2, -1))
            return {
                "cross_entropy": -(p * logs).sum((-2, -1)).mean(),
                "offset": (p * offset_error).sum((-2, -1)).mean(),
                "rejection": (p - logs.exp()).abs().sum(-1).mean() / 2,
            }

        def update(step: int) -> Losses:
            parts = losses(train, self._rows(step, train, recipe.batch))
            return parts["cross_entropy"] + recipe.offset_weight * parts["offset"], parts

        # Frames without precomputed features take memory, so a subset is used.
        has_frames = any(isinstance(values, FrameWindows) for values in held_out.observation.values())
        rows_held_out = np.arange(min(len(held_out), _FRAMES) if has_frames else len(held_out))
        return Stage(
            name, network, recipe, update, lambda module: losses(held_out, rows_held_out), recipe.seed, small=True
        )  # fmt: skip

    def publish(self, stage: Stage, held_out: DistillationData, metrics: Mapping[str, float], *, last: bool) -> Rollout:
        bundle, network = self._bundle, stage.module
        assert isinstance(network, VQBeT)
        folder = BundleFolder(self.out / "bundles" / f"{bundle.name}-distilled", PARTS)
        for part in ("tokenizer", "target"):
            folder.take(part, bundle.files[part])
        folder.parity["draft"] = export_policy(network, folder.files["draft"])
        made_from = {"from": bundle.fingerprint, **plain(self.recipe), "held_out": metrics}
        folder.finish(bundle.manifest.values() | {"name": folder.path.name, "distilled": made_from}, bundle.spec)
        return load_codes(folder.path).pair(), ()


class ChunkDistillation(Rounds):
    """A draft of chunks; see :func:`distil`."""

    def __init__(self, pair: Pair[Any], recipe: DistilRecipe, collect: Collect) -> None:
        parts: ChunkParts = pair.parts
        bundle = _draft_bundle(parts)
        self._parts, self.recipe, self._units = parts, recipe, read_flow_units(bundle)
        self._draft = chunk_recipe_of(bundle.manifest.recipe, f"the draft of {parts.name}")
        super().__init__(pair, "distilled", recipe, collect, steps=self._draft.steps)

    def stage_on(self, name: str, train: DistillationData, held_out: DistillationData) -> Stage:
        spec = self._parts.draft.spec

        def batch(data: DistillationData, chunks: Tensor, real: Tensor, rows: np.ndarray) -> TrainingBatch:
            return TrainingBatch(observation_at(data, rows), chunks[rows], real.expand(len(rows), -1))

        labels, rows_held_out = self._labels(train), np.arange(min(len(held_out), _HELD_OUT))
        return chunk_stage(
            name, self._draft, spec, lesson_statistics(spec.observation.fields, train), None,
            lambda step: batch(train, *labels, self._rows(step, train, self._draft.batch)),
            partial(batch, held_out, *self._labels(held_out), rows_held_out),
        )  # fmt: skip

    def publish(self, stage: Stage, held_out: DistillationData, metrics: Mapping[str, float], *, last: bool) -> Rollout:
        pair, name = self._parts, f"{self._parts.name}-distilled"
        manifest = {
            "name": name, "env": pair.env, "specact": __version__, "recipe": plain(self._draft),
            "distilled": {"from": pair.fingerprint, **plain(self.recipe), "held_out": metrics},
        }  # fmt: skip
        assert isinstance(stage.module, Flow | TokenModel)
        draft = self.out / "drafts" / stage.name.replace("distilled", name)
        write_chunk_bundle(draft, manifest, self._draft, stage.module, self._units)
        assert pair.path is not None, "its draft was read there"
        stored = read_manifest(pair.path)
        steps = {f"{part}_steps": stored.steps[part] for part in ("draft", "target")}
        settings = PairSettings(pair.spec.execute, pair.spec.accept_within, pair.spec.overlap, pair.env, **steps)
        folder = self.out / ("bundles" if last else "rounds") / name
        shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
        target = pair.source.target or stored.sources["target"]
        assert target is not None, "it was loaded"
        return make_pair(folder, str(draft), target, settings), ()

    def _labels(self, data: DistillationData) -> tuple[Tensor, Tensor]:
        """The target's chunks in the flow's units ``[N, H, A]``, and 1 for the actions that it gives ``[H]``."""
        units, chunk = self._units, self._parts.draft.spec.chunk
        action = np.clip(self._parts.units.to_environment(data.outputs["wanted"]), units.low, units.high)
        # The target's chunks may be shorter than the draft's; the rest has no label.
        padding = ((0, 0), (0, chunk - action.shape[1]), (0, 0))
        chunks = torch.from_numpy(np.pad(units.to_flow(action), padding).astype(np.float32))
        return chunks, (torch.arange(chunk) < action.shape[1]).float()


def _draft_bundle(pair: ChunkParts) -> Bundle[ChunkSpec]:
    folder = Path() if pair.path is None else pair.path / DRAFT
    kind = read_manifest(folder).kind if folder != Path() and folder.is_dir() else "pair"
    if kind not in CHUNK_PARTS:
        raise ConfigError(
            f"the draft of {pair.name} is no bundle of a chunk policy that specact train made, so how to train it is "
            'not known; train one with a recipe of kind = "regression" or "flow" and make the pair with it'
        )
    if pair.draft.spec.observation.images or pair.draft.spec.observation.instruction:
        raise ConfigError(
            f"the draft of {pair.name} has a camera or follows an instruction, and states of rollouts are kept without "
            "frames and words; distil it along demonstrations: specact train RECIPE --teacher TARGET"
        )
    return open_bundle(folder, kind, ChunkSpec, CHUNK_PARTS[kind])


def observation_at(data: DistillationData, rows: np.ndarray) -> dict[str, Tensor]:
    """The draft's observations in these rows, by name."""
    return {name: torch.from_numpy(np.asarray(column[rows])) for name, column in data.observation.items()}


def lesson_statistics(fields: Mapping[str, Field], data: DistillationData) -> Statistics:
    """Mean and standard deviation of the observations in all windows, by name, without those of cameras."""
    return {
        name: moments(np.asarray(data.observation[name]).reshape(-1, *field.shape))
        for name, field in fields.items()
        if not field.is_image
    }


def draft_encoders(bundle: CodeParts) -> dict[str, nn.Module]:
    """The image encoders of a bundle's draft, by camera: frames ``[N, H, W, 3]`` to features ``[N, width]``."""
    cameras = bundle.spec.draft.images
    if not cameras:
        return {}
    draft = rebuild(bundle, "draft", bundle.spec.draft.history)
    embeddings = {camera: getattr(draft, f"embed_{module_name(camera)}") for camera in cameras}
    return {
        camera: nn.Sequential(embedding, nn.Flatten()) if isinstance(embedding, PatchEmbedding) else embedding.encoder
        for camera, embedding in embeddings.items()
    }


def encoded(data: DistillationData, encoders: Mapping[str, nn.Module]) -> DistillationData:
    """Replaces the frames of the encoders' cameras by their features ``[N, T, width]``."""
    features = {
        name: features_of(values, encoders[name])
        for name, values in data.observation.items()
        if name in encoders and isinstance(values, FrameWindows)
    }
    return replace(data, observation={**data.observation, **features})
