"""Training of a corrector, of A2C2's head and of their controls: one table of control steps makes all examples.

Every row is a control step t with what was observed, the target's chunk for it, and the action to learn. An example is
a row with the chunk of the row k steps before it: so old a chunk would be played there, whatever the delay is.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor, nn

from specact.errors import ConfigError, unknown_name
from specact.families.chunks.pair import stored_source
from specact.families.chunks.sources import kind_of_source
from specact.lab.data.frames import Column, Frames, FrameWindows
from specact.lab.envs import env_of, load_task
from specact.lab.rollout.distillation import data_of, join, read_recorded, record_rollouts, record_stale
from specact.lab.rollout.pool import Pool
from specact.lab.train.attention import Observing, Statistics, module_name
from specact.lab.train.dataset import Windows, moments
from specact.lab.train.encoder import ImageEmbedding
from specact.lab.train.export import BundleFolder, Graph, Input, deployed, observed
from specact.lab.train.fit import FromDemonstrations, recipe_of
from specact.lab.train.loop import Losses, Metrics, Progress, Stage, seed_weights
from specact.lab.train.recipe import CorrectorRecipe, EncoderRecipe, Recipe, plain
from specact.load import load_pair, load_policy
from specact.observation import Field, ObservationSpec
from specact.rng import Role, stream
from specact.systems.corrector import CORRECTOR_PARTS, CorrectorSpec, age_features, doubled, joined
from specact.types import ActionUnits

Array = NDArray[np.float32]

# By method: whether the network sees the observation of then and the whole chunk; and from which share of the examples
# the chunk is withheld, if not the recipe's.
USES: dict[str, tuple[bool, bool, float | None]] = {
    "corrector": (True, True, None), "newest": (False, True, None), "a2c2": (False, False, 0.0),
    "draft": (False, False, 1.0),
}  # fmt: skip
# Share of the changes that do not exceed the bound: the largest one is an outlier's.
_WITHIN, _SMALLEST = 0.99, 1e-4
_WHOLE_RANGE = 2.0  # of normalised actions: no bound
_VALIDATED, _FRAMES = 4096, 256  # examples for validation, and where they hold camera frames
# Of each camera that the device sees: how its frames are encoded, and how many features a frame has.
_CAMERA, _FEATURES = EncoderRecipe(channels=(16, 32, 32), keypoints=16, width=64, shift=2), 32


@dataclass(frozen=True)
class Steps:
    """N control steps, in order: windows by name ``[N, *window_shape]``, and since when their episode began, ``[N]``.

    ``chunk [N, H, A]`` is the target's answer to each, ``label [N, A]`` the action to learn, both normalised.
    """

    observation: Mapping[str, Column]
    since: NDArray[np.int64]
    chunk: Array
    label: Array

    def __len__(self) -> int:
        return len(self.since)


class CorrectorModel(Observing):
    """The networks f and g of :mod:`specact.systems.corrector`, on two common layers; f begins at 0.

    What the recipe's method does not use is multiplied by 0: all have the same size.
    """

    of_then: Tensor
    of_chunk: Tensor

    def __init__(
        self, fields: Mapping[str, Field], statistics: Statistics, shape: tuple[int, int], recipe: CorrectorRecipe
    ) -> None:
        super().__init__(doubled(fields), statistics)
        remembers, whole, _ = USES[recipe.method]
        self.register_buffer("of_then", torch.tensor(float(remembers)))
        self.register_buffer("of_chunk", torch.tensor([1.0, *[float(whole)] * shape[0]])[:, None])
        self.cameras = nn.ModuleDict({
            module_name(name): ImageEmbedding(_CAMERA, field.shape, _FEATURES)
            for name, field in self.fields.items() if field.is_image
        })  # fmt: skip
        sizes = {name: _FEATURES if field.is_image else math.prod(field.shape) for name, field in self.fields.items()}
        observation = sum(self.fields[name].history * size for name, size in sizes.items())
        self.read = nn.Linear(observation + (1 + shape[0]) * shape[1] + 3, recipe.hidden)
        self.mix = nn.Linear(recipe.hidden, recipe.hidden)
        self.correct, self.draft = nn.Linear(recipe.hidden, shape[1]), nn.Linear(recipe.hidden, shape[1])
        nn.init.zeros_(self.correct.weight)
        nn.init.zeros_(self.correct.bias)

    def forward(self, observation: Mapping[str, Tensor], chunk: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """``u`` and ``g [B, A]``, for :func:`~specact.systems.corrector.joined` and what follows there ``[B, ...]``."""
        halves = [
            (self.cameras[module_name(name)](seen) if field.is_image else self.numbers(name, seen)).chunk(2, 1)
            for name, field in self.fields.items() for seen in [observation[name]]
        ]  # fmt: skip
        numbers = [part.flatten(1) for then, now in halves for part in (self.of_then * then, now)]
        hidden = torch.relu(self.read(torch.cat([*numbers, (self.of_chunk * chunk).flatten(1), index], 1)))
        hidden = hidden + torch.relu(self.mix(hidden))
        return torch.tanh(self.correct(hidden)), self.draft(hidden)


class CorrectorTraining(FromDemonstrations):
    """The corrector of a recipe, from rollouts of its target; that of A2C2 from demonstrations."""

    def __init__(self, recipe: CorrectorRecipe, data: Path) -> None:
        self.recipe, self.target = recipe, load_policy(recipe.target)
        if self.target.units is None:
            raise ConfigError(f"{recipe.target} must say the range of its actions: give it low and high")
        self.units: ActionUnits = self.target.units
        # The user's own may be code; a bundle's must not be without being named.
        self.env = recipe.env or env_of(self.target.env)
        self.seen = self._sees(self.target.policy.spec.observation)
        self.request = plain(recipe) | {"taught_by": self.target.fingerprint}
        if recipe.played_by is not None:
            player, seen = load_pair(recipe.played_by), ", ".join(self.seen.fields)
            task = player.corrects and (player.parts.spec.target, player.parts.spec.observation)
            if task != (self.target.fingerprint, self.seen):
                raise ConfigError(
                    f"played_by must be a corrector of {recipe.target} that sees {seen}; {player.name} is none"
                )
            self.request["played_by"] = player.fingerprint
        self._demonstrated, without = recipe.method == "a2c2", USES[recipe.method][-1]
        self._without = recipe.without if without is None else without
        if self._demonstrated:
            super().__init__(_demonstrations(recipe), data, recipe.seed, teacher=self.target)
        else:
            recipe.refuse_data(data)

    def read(self, progress: Progress) -> None:
        if self._demonstrated:
            super().read(progress)

    @contextmanager
    def prepared(self, progress: Progress, jobs: int) -> Iterator[None]:
        if self._demonstrated:
            with super().prepared(progress, jobs):
                self.train, self.held_out = map(self._of_demonstrations, (self.dataset.train, self.dataset.held_out))
                yield
            return
        recipe, (train, held_out) = self.recipe, self.recipe.files
        most = min(recipe.most_delay, self.target.policy.spec.chunk - 1)
        fields, numbers = dict(self.seen.fields), [*train, *held_out]
        record = partial(record_stale, recipe.target, self.env, fields, recipe.seed, most, recipe.played_by)
        with Pool(jobs) as pool:
            files = record_rollouts(record, self.out / "rollouts", numbers, pool.each, partial(progress, "rollouts"))
        self.train, self.held_out = map(self._of_rollouts, (files[: len(train)], files[len(train) :]))
        yield
        shutil.rmtree(self.out / "frames", ignore_errors=True)

    def _sees(self, target: ObservationSpec) -> ObservationSpec:
        """The device's observations: those that the recipe names, or the target's without its camera frames."""
        shapes = load_task(self.env).shapes()
        known = {name: Field(shape) for name, shape in shapes.items() if name != "action" and len(shape) == 1}
        known |= target.fields
        for name in self.recipe.sees:
            if name not in known:
                raise unknown_name("observation of a corrector", name, known)
        numbers = [name for name, field in target.fields.items() if not field.is_image]
        fields = {name: known[name] for name in self.recipe.sees or numbers}
        if not fields:
            raise ConfigError(f"{self.recipe.target} sees camera frames alone; say in sees what the device sees")
        return ObservationSpec(fields)

    def plan(self) -> list[dict[str, int]]:
        return [{"corrector": self.recipe.steps}]

    def stage(self, name: str) -> Stage:
        recipe, fields = self.recipe, self.seen.fields
        bound, weights = map(torch.from_numpy, self._limits())
        seed_weights(recipe.seed)
        model = self._model()

        def errors(steps: Steps, step: int, size: int, module: nn.Module) -> dict[str, Tensor]:
            """Mean squared errors: with a chunk of the corrected and of its own action, without one of the drafted."""
            rng = stream(recipe.seed, Role.DATA, step=step)
            rows = rng.integers(len(steps), size=size)
            # A chunk is a step old when it is first corrected; an episode's first step has none.
            ages = rng.integers(1, np.clip(steps.since[rows] + 1, 2, max(2, steps.chunk.shape[1])))
            with_chunk = (rng.random(size) >= self._without) & (steps.since[rows] > 0)
            given, label = torch.from_numpy(with_chunk), torch.from_numpy(steps.label[rows])
            then, now = (
                {name: np.asarray(values[at]) for name, values in steps.observation.items()}
                for at in (rows - with_chunk * ages, rows)
            )
            seen = {name: torch.from_numpy(values) for name, values in joined(then, now, fields).items()}
            based, index = example_of(steps, rows, ages)
            u, drafted = module(seen, given[:, None, None] * based, given[:, None] * index)

            def error(action: Tensor, weight: Tensor) -> Tensor:
                return (weight * (action - label).square().mean(1)).sum() / weight.sum().clamp(min=1)

            counted, base = given * weights[ages], based[:, 0]
            corrected = error(base + bound[ages] * u, counted)
            return {"corrected": corrected, "aligned": error(base, counted), "drafted": error(drafted, ~given)}

        def update(step: int) -> Losses:
            parts = errors(self.train, step, recipe.batch, model)
            return parts["corrected"] + parts["drafted"], parts

        def validate(module: nn.Module) -> Metrics:
            return errors(self.held_out, 0, _FRAMES if model.cameras else _VALIDATED, module)

        return Stage(name, model, recipe, update, validate, recipe.seed, small=True)

    def export(self, progress: Progress) -> list[Path]:
        recipe, model, chunks = self.recipe, self._model(), self.target.policy.spec
        model.load_state_dict(self.weights("corrector"))
        folder = BundleFolder(self.out / "bundles" / recipe.bundle, CORRECTOR_PARTS)
        inputs: dict[str, Input | Mapping[str, Input]] = {
            "observation": observed(model, None), "chunk": Input(("batch", 1 + chunks.chunk, chunks.actions)),
            "index": Input(("batch", 3)),
        }  # fmt: skip
        folder.export("corrector", Graph(deployed(model), inputs, ["correction", "draft"]))
        low, high = self.units.centre - self.units.scale, self.units.centre + self.units.scale
        spec = CorrectorSpec(
            self.target.fingerprint, chunks, self.seen, tuple(low.tolist()), tuple(high.tolist()),
            tuple(map(tuple, self._limits()[0].tolist())), corrects=self._without < 1.0, drafts=self._without > 0.0,
        )  # fmt: skip
        manifest = {"kind": "corrector", **self.manifest(recipe.bundle, self.env)}
        return [folder.finish(manifest | {"sources": {"target": stored_source(recipe.target)}}, spec)]

    def _limits(self) -> tuple[Array, Array]:
        """The bound ``[H, A]``, and how much an example counts, ``[H]``, by the age k of its chunk.

        By what was learned: the change from ``c[k]`` to the action of now, its quantile and its mean square. A chunk
        that is nearly new so stays as it is. A2C2 has no bound, and all count alike.
        """
        steps, (_, length, actions) = self.train, self.train.chunk.shape
        if self._demonstrated:
            return np.full((length, actions), _WHOLE_RANGE, np.float32), np.ones(length, np.float32)
        bound, spread = np.full((length, actions), _SMALLEST, np.float32), np.full(length, _SMALLEST, np.float32)
        for age in range(1, length):
            rows = np.flatnonzero(steps.since >= age)
            if rows.size:
                change = np.abs(steps.label[rows] - steps.chunk[rows - age, age])
                bound[age] = np.maximum(np.quantile(change, _WITHIN, axis=0), _SMALLEST)
                spread[age] = max(np.square(change).mean(), _SMALLEST)
        return bound, spread[1:].mean() / spread if length > 1 else spread

    def _model(self) -> CorrectorModel:
        spec, fields = self.target.policy.spec, self.seen.fields
        numbers = {name: field.shape for name, field in fields.items() if not field.is_image}
        seen = {name: np.asarray(self.train.observation[name]).reshape(-1, *shape) for name, shape in numbers.items()}
        statistics = {name: moments(values) for name, values in seen.items()}
        return CorrectorModel(fields, statistics, (spec.chunk, spec.actions), self.recipe)

    def _of_rollouts(self, files: Sequence[Path]) -> Steps:
        # Camera frames stay on disk.
        data = join([data_of(read_recorded(file, dict), self.out / "frames", int(file.stem)) for file in files])
        chunk = self.units.from_environment(data.outputs["chunk"])
        return Steps(data.observation, data.outputs["step"], chunk, chunk[:, 0])

    def _of_demonstrations(self, windows: Windows) -> Steps:
        episodes, rows, data = windows.episodes, np.arange(len(windows)), self.dataset
        since = rows - np.repeat(episodes.starts, np.diff(episodes.ends, prepend=0))
        answers = (data.centre + data.scale * windows.chunks).numpy()
        seen, normalise = dict[str, Column](), self.units.from_environment
        for name, field in self.seen.fields.items():
            column, index = episodes.observation[name], windows.rows(rows, field.history)
            seen[name] = FrameWindows(column, index) if isinstance(column, Frames) else column[index]
        return Steps(seen, since, normalise(answers), normalise(episodes.action))


def example_of(steps: Steps, rows: NDArray[np.int64], ages: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The network's inputs, as on the device: chunks of these ages at these rows, and the index of each age."""
    chunks, length = steps.chunk[rows - ages], steps.chunk.shape[1]
    table = np.stack([age_features(age, length) for age in range(length)])
    based = np.concatenate([chunks[np.arange(len(rows)), ages][:, None], chunks], 1)
    return torch.from_numpy(based), torch.from_numpy(table[ages])


def _demonstrations(recipe: CorrectorRecipe) -> Recipe:
    """The demonstrations of the target's recipe, in pieces as long as its chunks; so many episodes of an expert's."""
    if kind_of_source(recipe.target) != "folder":
        raise ConfigError(
            f'method = "a2c2" learns from the demonstrations that a bundle was trained on, and {recipe.target} is no '
            'bundle; choose method = "corrector"'
        )
    base = recipe_of(recipe.target, recipe.env)
    return structs.replace(base, generate_episodes=min(base.generate_episodes, recipe.episodes))
