"""Training of a learned gate's head: it predicts the target's output from the draft's observation and output."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from specact.bundle.bundle import HEAD, copy_bundle, give_head
from specact.bundle.manifest import INSTRUCTION, Words
from specact.errors import ConfigError, DataError
from specact.families.chunks.pair import ChunkParts
from specact.families.codes.pair import CodeParts
from specact.families.codes.policy import PolicySpec
from specact.families.codes.sampling import rejection_probability, sample
from specact.families.tokens.pair import TokenParts
from specact.gates.learned import TRAINING, head_observation, trained_for
from specact.gates.settings import gate_settings
from specact.lab.data.episodes import Episodes
from specact.lab.rollout.distillation import Collect, DistillationData, data_of, join
from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import HYBRID
from specact.lab.rollout.statistics import choice_efficiency
from specact.lab.rollout.timed import Prepared
from specact.lab.train.attention import Observing, embed_words, module_name
from specact.lab.train.dataset import Windows, check_observed
from specact.lab.train.distil import Rollout, Rounds, RoundsRecipe, draft_encoders, lesson_statistics, observation_at
from specact.lab.train.export import Graph, Input, export_checked, observed, parameters_of
from specact.lab.train.fit import fit
from specact.lab.train.loop import Draw, Losses, Metrics, Progress, Stage
from specact.load import load_pair
from specact.observation import ObservationSpec
from specact.pair import Follower, Pair
from specact.records import Count, Share
from specact.rng import Role, StepAddress, stream, streams
from specact.systems.flow import FlowParts
from specact.types import Floats

_TINY = 1e-4
_WORD_WIDTH = 16  # of the word embedding
_BATCH = 64  # of demonstrated lessons


class HeadRecipe(RoundsRecipe, frozen=True, kw_only=True):
    """The settings of a head's training, whose two layers have the width ``hidden``.

    Of action codes the ``objective`` is to learn the ``distribution`` p, by cross-entropy, or only the ``rejection``
    probability ``r_k(z_k)`` of codes drawn from the draft, the direct regression as a baseline.
    """

    hidden: Count = 256
    steps: Count = 8000
    rates: tuple[Share, ...] = (0.2, 0.4, 0.6)
    objective: Literal["distribution", "rejection"] = "distribution"


# Distances are noisy labels: with as many steps as for a distribution the head overfits.
DISTANCE = HeadRecipe(steps=2000)


class HeadNetwork(Observing, ABC):
    """An MLP on the draft's observation and output; camera frames are encoded by the draft's own ``encoders``, frozen.

    ``drafted`` is the shape of the draft's output, ``outputs`` the number of the head's.
    """

    # Names of the draft's output, in lessons and in the exported graph, and of the head's.
    given: ClassVar[str]
    output: ClassVar[str]

    def __init__(
        self, observation: ObservationSpec | None, drafted: tuple[int, ...], outputs: int, recipe: HeadRecipe,
        data: DistillationData, encoders: Mapping[str, nn.Module], words: Words | None = None,
    ) -> None:  # fmt: skip
        fields = {} if observation is None else observation.fields
        super().__init__(fields, lesson_statistics(fields, data))
        self.words, self.drafted, hidden = words, drafted, recipe.hidden
        widths = [math.prod(field.window_shape) for field in self.fields.values() if not field.is_image]
        for name, encoder in encoders.items():
            self.add_module(f"look_{module_name(name)}", encoder.requires_grad_(False))
            frame = torch.zeros((1, *self.fields[name].shape), dtype=torch.uint8)
            widths.append(max(1, self.fields[name].history) * encoder(frame).shape[-1])
        if words is not None:
            self.embed_instruction = embed_words(words, _WORD_WIDTH)
            widths.append(words.length * _WORD_WIDTH)
        self.read = nn.Linear(sum(widths) + math.prod(drafted), hidden)
        self.mix, self.write = nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)

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
            return self.numbers(name, values).flatten(1)
        if values.dtype == torch.uint8:
            encoder: nn.Module = getattr(self, f"look_{module_name(name)}")
            features = encoder(values.reshape(-1, *field.shape))
            values = features.reshape(-1, max(1, field.history) * features.shape[-1])
        return values.flatten(1)

    def inputs(self, data: DistillationData) -> tuple[dict[str, Tensor], Tensor]:
        """The inputs in lessons."""
        return observation_at(data, np.arange(len(data))), torch.from_numpy(data.outputs[self.given])

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

    given, output = "draft_probs", "target_probs"

    def __init__(
        self, spec: PolicySpec, recipe: HeadRecipe, data: DistillationData, encoders: Mapping[str, nn.Module],
        words: Words | None = None,
    ) -> None:  # fmt: skip
        shape = (spec.codebooks, spec.codes)
        super().__init__(spec.draft, shape, math.prod(shape), recipe, data, encoders, words)
        self.objective, self.trust = recipe.objective, nn.Parameter(torch.tensor(0.5))

    def forward(self, observation: Mapping[str, Tensor], draft_probs: Tensor) -> Tensor:
        """``p^`` ``[B, G, K]`` from arrays ``[B, *window_shape]`` by name and ``draft_probs [B, G, K]``."""
        logits = self.logits(observation, draft_probs)
        return logits.softmax(-1) if self.objective == "distribution" else draft_probs * logits.sigmoid()

    def logits(self, observation: Mapping[str, Tensor], draft_probs: Tensor) -> Tensor:
        """Logits of the distribution, or of the codes' acceptance."""
        offered = (draft_probs + _TINY).log()
        correction: Tensor = self.mlp(observation, 0.25 * offered.flatten(1)).unflatten(-1, self.drafted)
        return correction + self.trust * offered if self.objective == "distribution" else correction

    def loss(self, data: DistillationData, step: int) -> Tensor:
        """Cross-entropy to p, or to the acceptance probability of codes that are resampled in every step."""
        logits = self.logits(*self.inputs(data))
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
            estimate = self(*self.inputs(data)).double().numpy()
        q, p = _distributions(data)
        codes = sample(q, stream(0, Role.DATA, episode=Draw.SCORED_CODES).random(q.shape[:2]))
        estimated, true = (
            1.0 - np.prod(1.0 - rejection_probability(probs, q, codes), axis=-1) for probs in (estimate, p)
        )
        return estimated, true


def _distributions(data: DistillationData) -> tuple[Floats, Floats]:
    """Q and p."""
    return data.outputs["draft_probs"].astype(np.float64), data.outputs["target_probs"].astype(np.float64)


class DistanceHeadNetwork(HeadNetwork):
    """Estimates the distance of the target's actions from the drafted ones, by least squares, without frames."""

    given, output = "drafted", "distance"
    mean: Tensor

    def __init__(self, pair: Pair[Any], recipe: HeadRecipe, data: DistillationData) -> None:
        super().__init__(head_observation(pair), data.outputs["drafted"].shape[1:], 1, recipe, data, {})
        self.register_buffer("mean", torch.tensor(max(1e-6, float(data.outputs["drafted_distance"].mean()))))

    def forward(self, observation: Mapping[str, Tensor], drafted: Tensor) -> Tensor:
        """The distance ``[B]`` from arrays ``[B, *window_shape]`` by name and ``drafted [B, n, A]``, normalised."""
        return self.mean * nn.functional.softplus(self.mlp(observation, drafted.flatten(1))[:, 0])

    def loss(self, data: DistillationData, step: int) -> Tensor:
        """Squared error, in units of the mean distance."""
        target = torch.from_numpy(data.outputs["drafted_distance"]).float()
        error: Tensor = (self(*self.inputs(data)) - target) / self.mean
        return error.square().mean()

    def scores(self, data: DistillationData) -> tuple[Floats, Floats]:
        """Estimated and true distance."""
        with torch.no_grad():
            return self(*self.inputs(data)).double().numpy(), data.outputs["drafted_distance"]


def export_head(network: HeadNetwork, pair: Pair[Any], path: Path) -> float:
    """Exports a head, with what it was trained for as metadata, see :func:`export_checked`."""
    inputs = observed(network, network.words)
    drafted = Input(("batch", *network.drafted))
    if isinstance(network, TargetHeadNetwork):  # it reads probabilities
        drafted = replace(drafted, values=lambda *shape, **how: torch.randn(*shape, **how).softmax(-1))
    graph = Graph(network, {"observation": inputs, network.given: drafted}, [network.output])
    return export_checked(graph, path, metadata=trained_for(pair))


def train_head(
    pair: Pair[Any], recipe: HeadRecipe, collect: Collect, out: Path, progress: Progress
) -> dict[str, float]:
    """Trains a pair's head on states that gated rollouts visit, and writes it to the pair's folder.

    The pair gets the head of the last round; those of earlier rounds go to a copy of the pair in ``out``, whose gates
    they are in the next rollouts. Returns metrics on held-out episodes of the last round. A pair of a family of the
    user's own is refused.
    """
    if pair.path is None or not isinstance(pair.parts, CodeParts | ChunkParts | TokenParts | FlowParts):
        raise ConfigError(
            f"no gate learns from {pair.name}, which is of a family of your own; make a pair of chunk policies of it "
            "(specact pair), or give it a gate of your own, MODULE:GATE"
        )
    # On one thread: the matrices are small, and more threads are slower.
    trained = fit(HeadTraining(pair, recipe, collect), out, progress)
    metrics: dict[str, float] = trained.metrics[f"head-{recipe.rounds - 1}"]["held_out"]
    return metrics


class HeadTraining(Rounds):
    """A head; see :func:`train_head`."""

    def __init__(self, pair: Pair[Any], recipe: HeadRecipe, collect: Collect) -> None:
        encoders = draft_encoders(pair.parts) if isinstance(pair.parts, CodeParts) else {}
        super().__init__(pair, "head", recipe, collect, encoders=encoders)
        self.recipe = recipe

    def stage_on(self, name: str, train: DistillationData, held_out: DistillationData) -> Stage:
        parts, recipe = self._pair.parts, self.recipe
        network: HeadNetwork = (
            TargetHeadNetwork(parts.spec, recipe, train, self._encoders, parts.draft.inputs.words)
            if isinstance(parts, CodeParts)
            else DistanceHeadNetwork(self._pair, recipe, train)
        )

        def update(step: int) -> Losses:
            return network.loss(train.select(self._rows(step, train, recipe.batch)), step), {}

        def validate(module: nn.Module) -> Metrics:
            return {"loss": network.loss(held_out, 0), **_ranking_metrics(network, held_out)}

        return Stage(name, network, recipe, update, validate, recipe.seed, small=True)

    def publish(self, stage: Stage, held_out: DistillationData, metrics: Mapping[str, float], *, last: bool) -> Rollout:
        network, pair, file = stage.module, self._pair, self.out / f"{stage.name}.onnx"
        assert isinstance(network, HeadNetwork) and pair.path is not None
        export_head(network.eval(), pair, file)
        if last:
            give_head(pair.path, file, parameters_of(network))
            return pair, []
        copy = self.out / "pair"  # which worker processes load
        copy_bundle(pair.path, copy, ignore=["calibration", HEAD, TRAINING])
        give_head(copy, file, parameters_of(network))
        taught = load_pair(replace(pair.source, name_or_path=str(copy)))
        estimated, _ = network.scores(held_out)
        settings = gate_settings("learned", taught, ("max_skips=unlimited",))
        # The learned gate at approximately these rates.
        thresholds = [float(np.quantile(estimated, 1.0 - rate)) for rate in self.recipe.rates]
        return taught, [replace(settings, threshold=threshold) for threshold in thresholds]


def _ranking_metrics(network: HeadNetwork, data: DistillationData) -> dict[str, float]:
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


def demonstrated_lessons(
    pair: Pair[Any], episodes: Episodes, wanted: int, folder: Path, advance: Callable[[int], None], *, seed: int = 0
) -> DistillationData:
    """The outputs of both policies of a pair for ``wanted`` demonstrated observations, without a simulator.

    Camera frames are kept in the folder.

    Raises:
        ConfigError: if the pair sees what the demonstrations do not hold, is of a family of the user's own, or drafts
            from what its robot executed, or for less than one step.
        DataError: if there are fewer than two demonstrations, or the target has no finite answer.
    """
    if wanted < 1:
        raise ConfigError(f"lessons must be at least 1, got {wanted}")
    if len(episodes) < 2:
        raise DataError("at least two demonstrations are needed: one to learn from and one to check on")
    family, prepared = rollout_of(pair, HYBRID), Prepared[Any]()
    check_observed(pair.name, pair.observation, episodes)
    drafter = family.drafter(prepared)
    if isinstance(drafter, Follower) and not getattr(drafter, "stateless", False):
        raise ConfigError(
            f"{pair.name} drafts from what its robot executed, which demonstrations do not hold; choose a decoding "
            "that drafts from the observation (one with a draft policy: --draft, of a flow policy also --decoding "
            "flash_policy), or train in a simulator, with specact calibrate"
        )
    windows = Windows(episodes, 1, np.zeros(1, np.float32), np.ones(1, np.float32))
    rows = np.sort(stream(seed, Role.DATA, episode=Draw.TEACHER).permutation(len(windows))[:wanted])
    parts = []
    for first in range(0, len(rows), _BATCH):
        chosen = rows[first : first + _BATCH]
        observed = windows.seen_at(pair.observation, chosen)
        addresses = [StepAddress(seed, 0, Draw.TEACHER, int(row)) for row in chosen]
        drafts, targets = family.infer(observed, addresses)
        proposals = []
        for window, draft, rng in zip(observed, drafts, streams(Role.DRAFT, addresses), strict=True):
            prepared.prepared = draft
            proposals.append(drafter.propose(window, rng))
        table = family.lessons(proposals, drafts, targets)
        if not all(np.isfinite(column).all() for column in table.values()):
            raise DataError(f"{pair.name} has no finite answer to some of the demonstrated observations")
        table["episode"] = np.searchsorted(episodes.ends, chosen, side="right")
        parts.append(data_of(table, folder, first))
        advance(first + len(chosen))
    return join(parts)
