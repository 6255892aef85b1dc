"""Training of a learned gate's head: it predicts the target's output from the draft's observation and output."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from specact.bundle.bundle import HEAD, copy_bundle, give_head
from specact.bundle.manifest import INSTRUCTION, Words
from specact.errors import ConfigError
from specact.families.chunks.pair import ChunkParts
from specact.families.codes.pair import CodeParts
from specact.families.codes.policy import PolicySpec
from specact.families.codes.sampling import rejection_probability, sample
from specact.families.tokens.pair import TokenParts
from specact.gates.learned import TRAINING, TrainedFor, head_observation
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.data.distillation import DistillationData
from specact.lab.rollout.distillation import Collect
from specact.lab.rollout.statistics import choice_efficiency
from specact.lab.train.distil import Rounds, RoundsRecipe, Student, draft_encoders, observation_statistics
from specact.lab.train.embedding import embed_words, hold_statistics, plain, standardised, statistics_of
from specact.lab.train.export import Graph, Inputs, export_checked, parameters_of, some_observations
from specact.lab.train.fit import fit
from specact.lab.train.loop import Draw, Metrics, Progress, Stage
from specact.load import load_pair
from specact.observation import ObservationSpec
from specact.pair import Pair
from specact.records import Count, NotNegative, Share
from specact.rng import Role, stream
from specact.systems.flash import FlashParts
from specact.types import Floats

_TINY = 1e-4
_WORD_WIDTH = 16  # of the word embedding


class HeadRecipe(RoundsRecipe, frozen=True, kw_only=True):
    """The settings of a head's training.

    Attributes:
        hidden: width of its two layers.
        weight_decay: of AdamW.
        objective: of action codes. ``distribution`` learns p, by cross-entropy; ``rejection`` learns only ``r_k(z_k)``
            of codes drawn from the draft, the direct regression as a baseline.
    """

    hidden: Count = 256
    steps: Count = 8000
    weight_decay: NotNegative = 1e-2
    rates: tuple[Share, ...] = (0.2, 0.4, 0.6)
    objective: Literal["distribution", "rejection"] = "distribution"


# Distances are noisy labels: with as many steps as for a distribution the head overfits.
DISTANCE = HeadRecipe(steps=2000)


class HeadNetwork(nn.Module, ABC):
    """An MLP on the draft's observation and output; camera frames are encoded by the draft's own encoders.

    Args:
        observation: of the draft, or None.
        drafted, outputs: sizes of the draft's output and of the head's.
        hidden: width of its two layers.
        data: training data.
        encoders: of the draft, by camera; frozen.
        words: the draft's vocabulary, where it follows an instruction.

    Attributes:
        output: name of the output in the exported graph.
    """

    output: ClassVar[str]

    def __init__(
        self,
        observation: ObservationSpec | None,
        drafted: int,
        outputs: int,
        hidden: int,
        data: DistillationData,
        encoders: Mapping[str, nn.Module],
        words: Words | None = None,
    ) -> None:
        super().__init__()
        self.words = words
        self.fields = {} if observation is None else dict(observation.fields)
        if observation is not None:
            hold_statistics(self, observation, observation_statistics(observation, data))
        widths = [math.prod(field.window_shape) for field in self.fields.values() if not field.is_image]
        for name, encoder in encoders.items():
            self.add_module(f"look_{plain(name)}", encoder.requires_grad_(False))
            frame = torch.zeros((1, *self.fields[name].shape), dtype=torch.uint8)
            widths.append(max(1, self.fields[name].history) * encoder(frame).shape[-1])
        if words is not None:
            self.embed_instruction = embed_words(words, _WORD_WIDTH)
            widths.append(words.length * _WORD_WIDTH)
        self.read, self.mix = nn.Linear(sum(widths) + drafted, hidden), nn.Linear(hidden, hidden)
        self.write = nn.Linear(hidden, outputs)

    def mlp(self, observation: Mapping[str, Tensor], drafted: Tensor) -> Tensor:
        """The outputs ``[B, O]`` for arrays ``[B, *window_shape]`` by name and drafted numbers ``[B, D]``."""
        rows = {name: self._features(name, observation[name]) for name in self.fields}
        inputs = [row for name, row in rows.items() if self.fields[name].history]
        inputs += [drafted, *(row for name, row in rows.items() if not self.fields[name].history)]
        if self.words is not None:
            inputs.append(self.embed_instruction(observation[INSTRUCTION]).flatten(1))
        hidden = torch.relu(self.read(torch.cat(inputs, 1)))
        hidden = hidden + torch.relu(self.mix(hidden))
        outputs: Tensor = self.write(hidden)
        return outputs

    def _features(self, name: str, values: Tensor) -> Tensor:
        field = self.fields[name]
        if not field.is_image:
            return standardised(values, *statistics_of(self, name)).flatten(1)
        if values.dtype == torch.uint8:
            encoder: nn.Module = getattr(self, f"look_{plain(name)}")
            features = encoder(values.reshape(-1, *field.shape))
            values = features.reshape(-1, max(1, field.history) * features.shape[-1])
        return values.flatten(1)

    def example_inputs(self, batch: int, generator: torch.Generator) -> dict[str, Tensor | dict[str, Tensor]]:
        """Random inputs of :meth:`forward`, by name."""
        spec = ObservationSpec(self.fields, self.words is not None)
        observation = some_observations(self, spec, generator, batch, self.words)
        return {"observation": observation, **self.example_draft(batch, generator)}

    @abstractmethod
    def example_draft(self, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Random outputs of a draft."""

    @abstractmethod
    def loss(self, data: DistillationData, step: int) -> Tensor:
        """The training loss; its randomness depends only on the step."""

    @abstractmethod
    def scores(self, data: DistillationData) -> tuple[Floats, Floats]:
        """The gate's score from it, and the true value of that estimate, ``[N]`` each."""


class TargetHeadNetwork(HeadNetwork):
    """Corrects the draft's own distribution over codes: ``p^ = softmax(f(window, q) + s log q)``.

    With the objective ``rejection`` it estimates ``r^ = sigmoid(-f)`` and returns ``p^ = q (1 - r^)``, whose rejection
    probabilities are ``r^``, so that the same gate can use it.
    """

    output = "target_probs"

    def __init__(
        self,
        spec: PolicySpec,
        recipe: HeadRecipe,
        data: DistillationData,
        encoders: Mapping[str, nn.Module],
        words: Words | None = None,
    ) -> None:
        codes = spec.codebooks * spec.codes
        super().__init__(spec.draft, codes, codes, recipe.hidden, data, encoders, words)
        self.objective, self.shape = recipe.objective, (spec.codebooks, spec.codes)
        self.trust = nn.Parameter(torch.tensor(0.5))

    def forward(self, observation: Mapping[str, Tensor], draft_probs: Tensor) -> Tensor:
        """``p^`` ``[B, G, K]`` from arrays ``[B, *window_shape]`` by name and ``draft_probs [B, G, K]``."""
        logits = self.logits(observation, draft_probs)
        return logits.softmax(-1) if self.objective == "distribution" else draft_probs * logits.sigmoid()

    def logits(self, observation: Mapping[str, Tensor], draft_probs: Tensor) -> Tensor:
        """Logits of the distribution, or of the codes' acceptance."""
        offered = (draft_probs + _TINY).log()
        correction: Tensor = self.mlp(observation, 0.25 * offered.flatten(1)).unflatten(-1, self.shape)
        return correction + self.trust * offered if self.objective == "distribution" else correction

    def example_draft(self, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"draft_probs": torch.randn(batch, *self.shape, generator=generator).softmax(-1)}

    def loss(self, data: DistillationData, step: int) -> Tensor:
        """Cross-entropy to p, or to the acceptance probability of codes that are resampled in every step."""
        logits = self.logits(*_inputs(data, "draft_probs"))
        if self.objective == "distribution":
            target = torch.from_numpy(data.outputs["target_probs"])
            return -(target * logits.log_softmax(-1)).sum((-2, -1)).mean()
        q, p = _distributions(data)
        codes = sample(q, stream(0, Role.DATA, episode=Draw.CODES, step=step).random(q.shape[:2]))
        accepted = torch.from_numpy(1.0 - rejection_probability(p, q, codes)).float()
        drawn = logits.gather(-1, torch.from_numpy(codes)[..., None])[..., 0]
        return nn.functional.binary_cross_entropy_with_logits(drawn, accepted, reduction="none").sum(-1).mean()

    def scores(self, data: DistillationData) -> tuple[Floats, Floats]:
        """``R^(z)`` and ``R(z)`` of codes drawn from the draft."""
        with torch.no_grad():
            estimate = self(*_inputs(data, "draft_probs")).double().numpy()
        q, p = _distributions(data)
        codes = sample(q, stream(0, Role.DATA, episode=Draw.SCORED_CODES).random(q.shape[:2]))
        estimated, true = (
            1.0 - np.prod(1.0 - rejection_probability(probs, q, codes), axis=-1) for probs in (estimate, p)
        )
        return estimated, true


class DistanceHeadNetwork(HeadNetwork):
    """Estimates the distance of the target's actions from the drafted ones, by least squares, without frames."""

    output = "distance"
    mean: Tensor

    def __init__(self, pair: Pair[Any], recipe: HeadRecipe, data: DistillationData) -> None:
        drafted = data.outputs["drafted"].shape[1:]
        super().__init__(head_observation(pair), math.prod(drafted), 1, recipe.hidden, data, {})
        self.drafted = drafted
        self.register_buffer("mean", torch.tensor(max(1e-6, float(data.outputs["drafted_distance"].mean()))))

    def forward(self, observation: Mapping[str, Tensor], drafted: Tensor) -> Tensor:
        """The distance ``[B]`` from arrays ``[B, *window_shape]`` by name and ``drafted [B, n, A]``, normalised."""
        return self.mean * nn.functional.softplus(self.mlp(observation, drafted.flatten(1))[:, 0])

    def example_draft(self, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"drafted": torch.randn(batch, *self.drafted, generator=generator)}

    def loss(self, data: DistillationData, step: int) -> Tensor:
        """Squared error, in units of the mean distance."""
        target = torch.from_numpy(data.outputs["drafted_distance"]).float()
        error: Tensor = (self(*_inputs(data, "drafted")) - target) / self.mean
        return error.square().mean()

    def scores(self, data: DistillationData) -> tuple[Floats, Floats]:
        """Estimated and true distance."""
        with torch.no_grad():
            return self(*_inputs(data, "drafted")).double().numpy(), data.outputs["drafted_distance"]


def train_head(pair: Pair[Any], recipe: HeadRecipe, collect: Collect, out: Path, progress: Progress) -> Metrics:
    """Trains a pair's head on states that gated rollouts visit, and writes it to the pair's folder.

    The pair gets the head of the last round; those of earlier rounds go to a copy of the pair in ``out``, whose gates
    they are in the next rollouts. A pair of a family of the user's own is refused.

    Returns:
        Metrics on held-out episodes of the last round.
    """
    if pair.path is None or not isinstance(pair.parts, CodeParts | ChunkParts | TokenParts | FlashParts):
        raise ConfigError(
            f"no gate learns from {pair.name}, which is of a family of your own; make a pair of chunk policies of it "
            "(specact pair), or give it a gate of your own, MODULE:GATE"
        )
    # On one thread: the matrices are small, and more threads are slower.
    trained = fit(Rounds(pair, HeadStudent(pair, recipe), collect), out, progress)
    metrics: Metrics = trained.metrics[f"head-{recipe.rounds - 1}"]["held_out"]
    return metrics


class HeadStudent(Student):
    """A head; see :func:`train_head`."""

    name = "head"

    def __init__(self, pair: Pair[Any], recipe: HeadRecipe) -> None:
        self._pair, self.recipe, self._settings, self.steps = pair, recipe, recipe, recipe.steps
        self.encoders = draft_encoders(pair.parts) if isinstance(pair.parts, CodeParts) else {}

    def stage(self, name: str, train: DistillationData, held_out: DistillationData) -> Stage:
        pair, parts, recipe = self._pair, self._pair.parts, self._settings
        network: HeadNetwork = (
            TargetHeadNetwork(parts.spec, recipe, train, self.encoders, parts.draft.inputs.words)
            if isinstance(parts, CodeParts)
            else DistanceHeadNetwork(pair, recipe, train)
        )

        def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
            rows = stream(recipe.seed, Role.DATA, step=step).integers(len(train), size=recipe.batch)
            return network.loss(train.select(rows), step), {}

        def validate(module: nn.Module) -> Metrics:
            with torch.no_grad():
                loss = float(network.loss(held_out, 0))
            return {"loss": loss, **_ranking_metrics(network, held_out)}

        return self._adamw(name, network, recipe.weight_decay, update, validate)

    def publish(
        self, stage: Stage, held_out: DistillationData, out: Path, metrics: Metrics, *, last: bool
    ) -> tuple[Pair[Any], Sequence[GateSettings]]:
        network, pair, file = stage.module, self._pair, out / f"{stage.name}.onnx"
        assert isinstance(network, HeadNetwork) and pair.path is not None
        export_head(network.eval(), TrainedFor.of(pair), file)
        if last:
            give_head(pair.path, file, parameters_of(network))
            return pair, []
        copy = out / "pair"  # which worker processes load
        copy_bundle(pair.path, copy, ignore=["calibration", HEAD, TRAINING])
        give_head(copy, file, parameters_of(network))
        taught = load_pair(replace(pair.source, name_or_path=str(copy)))
        estimated, _ = network.scores(held_out)
        settings = gate_settings("learned", taught, ("max_skips=unlimited",))
        # The learned gate at approximately these rates.
        thresholds = [float(np.quantile(estimated, 1.0 - rate)) for rate in self.recipe.rates]
        return taught, [replace(settings, threshold=threshold) for threshold in thresholds]


def export_head(network: HeadNetwork, made_for: TrainedFor, path: Path) -> float:
    """Exports a head, with what it was trained for as metadata, see :func:`export_checked`."""

    def example(batch: int) -> Inputs:
        return network.example_inputs(batch, torch.Generator().manual_seed(batch))

    return export_checked(Graph(network, example, [network.output]), path, metadata=vars(made_for))


def _inputs(data: DistillationData, drafted: str) -> tuple[dict[str, Tensor], Tensor]:
    """The network's inputs."""
    observation = {name: torch.from_numpy(np.asarray(values)) for name, values in data.observation.items()}
    return observation, torch.from_numpy(data.outputs[drafted])


def _distributions(data: DistillationData) -> tuple[Floats, Floats]:
    """Q and p."""
    return data.outputs["draft_probs"].astype(np.float64), data.outputs["target_probs"].astype(np.float64)


def _ranking_metrics(network: HeadNetwork, data: DistillationData) -> Metrics:
    """Rank correlation of score and true value, and choice efficiency at transmission rates .2, .4, .6."""
    estimated, true = network.scores(data)
    metrics = {"spearman": float(stats.spearmanr(estimated, true).statistic)}
    for rate in (0.2, 0.4, 0.6):
        sent = np.ones(len(true), dtype=bool)
        sent[np.argsort(estimated, kind="stable")[: round(len(true) * (1.0 - rate))]] = False
        efficiency = choice_efficiency(true, sent)
        if efficiency is not None:
            metrics[f"efficiency_{rate:g}"] = efficiency
    return metrics
