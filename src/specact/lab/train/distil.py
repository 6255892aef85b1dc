"""Drafts that are trained again on their target's outputs, in states that the gated policy visits.

This is DAgger (Ross et al. 2011) with the target as the expert: rounds of rollouts, each with what the last one made.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from specact import __version__
from specact.bundle.manifest import read_manifest
from specact.errors import ConfigError
from specact.families.chunks.flow import FlowBundle, load_flow
from specact.families.chunks.pair import DRAFT, ChunkParts, PairSettings
from specact.families.chunks.sources import RegressionBundle, load_regression
from specact.families.codes.pair import PARTS, CodeParts, codes_of, load_codes
from specact.families.tokens.policy import TokenBundle, load_tokens
from specact.gates.settings import GateSettings
from specact.lab.data.distillation import Column, DistillationData, FrameWindows, join
from specact.lab.rollout.distillation import Collect
from specact.lab.train.chunks import TrainingBatch, chunk_stage, write_chunk_bundle
from specact.lab.train.codes import export_policy
from specact.lab.train.dataset import moments
from specact.lab.train.embedding import plain as parameter_name
from specact.lab.train.encoder import PatchEmbedding
from specact.lab.train.export import BundleFolder
from specact.lab.train.fit import Training, fit
from specact.lab.train.flow import Flow
from specact.lab.train.loop import Metrics, Progress, Stage, Update, Validate, cosine, last_lines
from specact.lab.train.rebuild import architecture, rebuild
from specact.lab.train.recipe import chunk_recipe_of, plain
from specact.lab.train.tokens import TokenModel
from specact.lab.train.vqbet import VQBeT
from specact.lab.train.windows import Statistics
from specact.load import make_pair
from specact.observation import ObservationSpec
from specact.pair import Pair
from specact.records import Count, NotNegative, Positive, Record, Seed, Share
from specact.rng import Role, stream

_BATCH = 256  # windows of frames per encoder pass
_HELD_OUT = 1024  # maximum size of a validation batch
_CHUNK_BUNDLES: dict[str, Callable[[Path], FlowBundle | RegressionBundle | TokenBundle]] = {
    "flow": load_flow,
    "regression": load_regression,
    "tokens": load_tokens,
}


class RoundsRecipe(Record, frozen=True, kw_only=True):
    """The settings of rounds.

    Attributes:
        rates: transmission rates of the random gates in rollouts.
        rounds: the first one rolls out the pair as it is, every further one with what the previous one trained.
        steps, batch, learning_rate: AdamW with warm-up and a cosine schedule.
        seed: random seed.
    """

    rates: tuple[Share, ...] = (0.0, 0.2, 0.4, 0.6)
    rounds: Count = 2
    steps: Count = 12_000
    batch: Count = 512
    learning_rate: Positive = 2e-3
    seed: Seed = 0


class DistilRecipe(RoundsRecipe, frozen=True, kw_only=True):
    """The settings of a distillation; the optimizer of a chunk draft has those of the draft's own recipe.

    Attributes:
        offset_weight: weight of the offsets' L1 distance to the target's, weighted with p, relative to the codes'
            cross-entropy.
    """

    offset_weight: NotNegative = 10.0


class Student(ABC):
    """What learns in rounds, from lessons of a pair.

    Attributes:
        name: of its stages, before their number.
        recipe: its settings.
        steps: of each stage.
        encoders: of the draft's cameras, whose features are learned from in place of frames.
    """

    name: ClassVar[str]
    recipe: RoundsRecipe
    steps: int
    encoders: Mapping[str, nn.Module]

    @abstractmethod
    def stage(self, name: str, train: DistillationData, held_out: DistillationData) -> Stage:
        """The stage of a round."""

    @abstractmethod
    def publish(
        self, stage: Stage, held_out: DistillationData, out: Path, metrics: Metrics, *, last: bool
    ) -> tuple[Pair[Any], Sequence[GateSettings]]:
        """Writes what was trained; returns the pair and the gates of the next rollouts, none for random ones."""

    def _adamw(self, name: str, network: nn.Module, weight_decay: float, update: Update, validate: Validate) -> Stage:
        recipe = self.recipe
        optimizer = torch.optim.AdamW(network.parameters(), weight_decay=weight_decay, fused=True)
        schedule = cosine(recipe.learning_rate, 100, recipe.steps)
        return Stage(name, network, optimizer, update, validate, recipe.steps, schedule, recipe.seed, average=0.998)


class Rounds(Training):
    """Rounds of rollouts and training; a stopped run repeats the rollouts and resumes in its last round.

    Args:
        pair: of the first round's rollouts.
        student: learns from all rounds so far.
        collect: rolls a pair out under gates and returns the data of a round, given its number.
    """

    def __init__(self, pair: Pair[Any], student: Student, collect: Collect) -> None:
        recipe = student.recipe
        self._student, self._collect, self._count = student, collect, recipe.rounds
        self._gates = [GateSettings("random", threshold=rate) for rate in recipe.rates]
        self._lessons: list[DistillationData] = []
        self._stages: list[tuple[Stage, DistillationData]] = []
        self._rollouts: list[tuple[Pair[Any], Sequence[GateSettings]]] = [(pair, self._gates)]
        self.request = {"from": pair.fingerprint, **plain(recipe)}

    def plan(self) -> list[dict[str, int]]:
        return [{f"{self._student.name}-{number}": self._student.steps} for number in range(self._count)]

    def stage(self, name: str) -> Stage:
        return self._stage(int(name.rpartition("-")[2]))[0]

    def export(self, progress: Progress) -> list[Path]:
        path = self._rollout(self._count)[0].path
        assert path is not None, "it was just written"
        return [path]

    def _stage(self, number: int) -> tuple[Stage, DistillationData]:
        """The stage of a round, and its held-out lessons."""
        while len(self._stages) <= number:
            number_, student = len(self._stages), self._student
            self._lessons.append(encoded(self._collect(*self._rollout(number_), number_), student.encoders))
            train, held_out = join(self._lessons).split()
            torch.manual_seed(student.recipe.seed)
            self._stages.append((student.stage(f"{student.name}-{number_}", train, held_out), held_out))
        return self._stages[number]

    def _rollout(self, rounds: int) -> tuple[Pair[Any], Sequence[GateSettings]]:
        """The pair and its gates after so many rounds."""
        while len(self._rollouts) <= rounds:
            stage, held_out = self._stage(len(self._rollouts) - 1)
            stage.module.load_state_dict(self.weights(stage.name))
            metrics, last = last_lines(self.out)[stage.name]["held_out"], len(self._rollouts) == self._count
            pair, gates = self._student.publish(stage, held_out, self.out, metrics, last=last)
            self._rollouts.append((pair, gates or self._gates))
        return self._rollouts[rounds]


def distil(
    pair: Pair[Any], recipe: DistilRecipe, collect: Collect, out: Path, progress: Progress, *, threads: int = 1
) -> Path:
    """Makes ``NAME-distilled``: the same target, and the draft trained from scratch on the target's outputs.

    The draft keeps its architecture. An image encoder that was trained before the draft stays frozen.

    Args:
        pair: of action codes, or of chunks; its draft was made by ``specact train``, or the pair is refused.
        recipe, collect: its settings, and see :class:`Rounds`.
        out, progress, threads: see :func:`~specact.lab.train.fit.fit`.

    Returns:
        The folder of the new pair.
    """
    student: Student = (
        ChunkStudent(pair.parts, recipe)
        if isinstance(pair.parts, ChunkParts)
        else CodesStudent(codes_of(pair, "distillation"), recipe)
    )
    return fit(Rounds(pair, student, collect), out, progress, threads=threads).bundles[0]


class CodesStudent(Student):
    """A draft of action codes; see :func:`distil`."""

    name = "distilled"

    def __init__(self, bundle: CodeParts, recipe: DistilRecipe) -> None:
        self._bundle, self.recipe, self._settings, self.steps = bundle, recipe, recipe, recipe.steps
        self._policy, self._shapes = architecture(bundle, "draft")
        self.encoders = draft_encoders(bundle) if self._policy.encoder.learns else {}

    def stage(self, name: str, train: DistillationData, held_out: DistillationData) -> Stage:
        statistics = observation_statistics(self._shapes.observation, train)
        network, recipe = VQBeT(self._shapes, self._policy, statistics), self._settings
        for camera, encoder in self.encoders.items():
            network.freeze(camera, encoder)
        temperature = self._bundle.spec.temperature

        def losses(data: DistillationData, rows: np.ndarray) -> dict[str, Tensor]:
            observation = {key: torch.from_numpy(np.asarray(values[rows])) for key, values in data.observation.items()}
            prediction = network.heads(network.features(observation)[:, -1:])
            p = torch.from_numpy(data.outputs["target_probs"][rows])
            logs = (prediction.logits[:, 0] / temperature).log_softmax(-1)
            offsets = torch.from_numpy(data.outputs["target_offsets"][rows].astype(np.float32))
            offset_error = (prediction.offsets[:, 0] - offsets).abs().mean((-2, -1))
            return {
                "cross_entropy": -(p * logs).sum((-2, -1)).mean(),
                "offset": (p * offset_error).sum((-2, -1)).mean(),
                "rejection": (p - logs.exp()).abs().sum(-1).mean() / 2,
            }

        def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
            rows = stream(recipe.seed, Role.DATA, step=step).integers(len(train), size=recipe.batch)
            parts = losses(train, rows)
            loss = parts["cross_entropy"] + recipe.offset_weight * parts["offset"]
            return loss, {key: part.detach() for key, part in parts.items()}

        # Frames without precomputed features take memory, so a subset is used.
        has_frames = any(isinstance(values, FrameWindows) for values in held_out.observation.values())
        rows_held_out = np.arange(min(len(held_out), _BATCH) if has_frames else len(held_out))

        def validate(module: nn.Module) -> Metrics:
            with torch.no_grad():
                return {key: float(value) for key, value in losses(held_out, rows_held_out).items()}

        return self._adamw(name, network, 1e-3, update, validate)

    def publish(
        self, stage: Stage, held_out: DistillationData, out: Path, metrics: Metrics, *, last: bool
    ) -> tuple[Pair[Any], Sequence[GateSettings]]:
        bundle, network = self._bundle, stage.module
        assert isinstance(network, VQBeT)
        folder = BundleFolder(out / "bundles" / f"{bundle.name}-distilled", PARTS)
        for part in ("tokenizer", "target"):
            folder.take(part, bundle.files[part])
        parity = export_policy(network, folder.files["draft"], half=bundle.manifest.recipe["precision"] == "float16")
        manifest = bundle.manifest.values()
        manifest |= {
            "name": folder.path.name,
            "distilled": {"from": bundle.fingerprint, **plain(self.recipe), "held_out": metrics},
            "parity": manifest["parity"] | {"draft": parity},
        }
        folder.finish(manifest, bundle.spec)
        return load_codes(folder.path).pair(), ()


class ChunkStudent(Student):
    """A draft of chunks; see :func:`distil`."""

    name = "distilled"

    def __init__(self, pair: ChunkParts, recipe: DistilRecipe) -> None:
        self._pair, self.recipe, self.encoders = pair, recipe, {}
        bundle = _draft_bundle(pair)
        self._draft, self._units = chunk_recipe_of(bundle.manifest.recipe, f"the draft of {pair.name}"), bundle.units
        self.steps = self._draft.steps

    def stage(self, name: str, train: DistillationData, held_out: DistillationData) -> Stage:
        spec, seed = self._pair.draft.spec, self.recipe.seed

        def batch(data: DistillationData, chunks: Tensor, real: Tensor, rows: np.ndarray) -> TrainingBatch:
            observation = {key: torch.from_numpy(np.asarray(column[rows])) for key, column in data.observation.items()}
            return TrainingBatch(observation, chunks[rows], real.expand(len(rows), -1))

        labels = self._labels(train)

        def draw(step: int) -> TrainingBatch:
            rows = stream(seed, Role.DATA, step=step).integers(len(train), size=self._draft.batch)
            return batch(train, *labels, rows)

        rows_held_out = np.arange(min(len(held_out), _HELD_OUT))
        return chunk_stage(
            name, self._draft, spec, observation_statistics(spec.observation, train), None, draw,
            partial(batch, held_out, *self._labels(held_out), rows_held_out),
        )  # fmt: skip

    def publish(
        self, stage: Stage, held_out: DistillationData, out: Path, metrics: Metrics, *, last: bool
    ) -> tuple[Pair[Any], Sequence[GateSettings]]:
        pair, name = self._pair, f"{self._pair.name}-distilled"
        manifest = {
            "name": name, "env": pair.env, "specact": __version__, "recipe": plain(self._draft),
            "distilled": {"from": pair.fingerprint, **plain(self.recipe), "held_out": metrics},
        }  # fmt: skip
        assert isinstance(stage.module, Flow | TokenModel)
        draft = out / "drafts" / stage.name.replace("distilled", name)
        write_chunk_bundle(draft, manifest, self._draft, stage.module, self._units)
        assert pair.path is not None, "its draft was read there"
        stored = read_manifest(pair.path)
        steps = {f"{part}_steps": stored.steps[part] for part in ("draft", "target")}
        settings = PairSettings(pair.execute, pair.accept_within, pair.overlap, pair.env, **steps)
        folder = out / ("bundles" if last else "rounds") / name
        shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
        target = pair.source.target or stored.sources["target"]
        assert target is not None, "it was loaded"
        return make_pair(folder, str(draft), target, settings), ()

    def _labels(self, data: DistillationData) -> tuple[Tensor, Tensor]:
        """The target's chunks in the flow's units ``[N, H, A]``, and 1 for the actions that it gives ``[H]``."""
        units, chunk = self._units, self._pair.draft.spec.chunk
        action = np.clip(self._pair.units.to_environment(data.outputs["wanted"]), units.low, units.high)
        # The target's chunks may be shorter than the draft's; the rest has no label.
        padding = ((0, 0), (0, chunk - action.shape[1]), (0, 0))
        chunks = torch.from_numpy(np.pad(units.to_flow(action), padding).astype(np.float32))
        return chunks, (torch.arange(chunk) < action.shape[1]).float()


def _draft_bundle(pair: ChunkParts) -> FlowBundle | RegressionBundle | TokenBundle:
    folder = Path() if pair.path is None else pair.path / DRAFT
    kind = read_manifest(folder).kind if folder != Path() and folder.is_dir() else "pair"
    if kind not in _CHUNK_BUNDLES:
        raise ConfigError(
            f"the draft of {pair.name} is no bundle of a chunk policy that specact train made, so how to train it is "
            'not known; train one with a recipe of kind = "regression" or "flow" and make the pair with it'
        )
    if pair.draft.spec.observation.images or pair.draft.spec.observation.instruction:
        raise ConfigError(
            f"the draft of {pair.name} has a camera or follows an instruction, and states of rollouts are kept without "
            "frames and words; distil it along demonstrations: specact train RECIPE --teacher TARGET"
        )
    return _CHUNK_BUNDLES[kind](folder)


def observation_statistics(spec: ObservationSpec, data: DistillationData) -> Statistics:
    """Mean and standard deviation of the observations in all windows, by name."""
    fields = {} if spec.vectors is None else spec.vectors.fields
    values_of_field = {name: np.asarray(data.observation[name]) for name in fields}
    return {name: moments(values_of_field[name].reshape(-1, *field.shape)) for name, field in fields.items()}


def draft_encoders(bundle: CodeParts) -> dict[str, nn.Module]:
    """The image encoders of a bundle's draft, by camera: frames ``[N, H, W, 3]`` to features ``[N, width]``."""
    cameras = bundle.spec.draft.images
    if not cameras:
        return {}
    draft = rebuild(bundle, "draft", bundle.spec.draft.history)
    embeddings = {camera: getattr(draft, f"embed_{parameter_name(camera)}") for camera in cameras}
    return {
        camera: nn.Sequential(embedding, nn.Flatten()) if isinstance(embedding, PatchEmbedding) else embedding.encoder
        for camera, embedding in embeddings.items()
    }


@torch.no_grad()
def encoded(data: DistillationData, encoders: Mapping[str, nn.Module]) -> DistillationData:
    """Replaces the frames of the encoders' cameras by their features ``[N, T, width]``."""

    def features(name: str, values: Column) -> Column:
        if name not in encoders or not isinstance(values, FrameWindows):
            return values
        parts = []
        for first in range(0, len(values), _BATCH):
            frames = np.asarray(values[np.arange(first, min(first + _BATCH, len(values)))])
            encoding = encoders[name](torch.from_numpy(frames.reshape(-1, *frames.shape[-3:])))
            parts.append(encoding.reshape(*frames.shape[:-3], -1).numpy())
        return np.concatenate(parts)

    return replace(data, observation={name: features(name, values) for name, values in data.observation.items()})
