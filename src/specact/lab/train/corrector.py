"""Training of a corrector, of A2C2's head and of their controls: one table of control steps makes all examples.

Every row is a control step t with what was observed, the target's chunk for it, and the action to learn. An example is
a row with the chunk of the row k steps before it: so old a chunk would be played there, whatever the delay is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor, nn

from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import read_manifest
from specact.errors import ConfigError
from specact.families.chunks.pair import stored_source
from specact.families.chunks.sources import kind_of_source
from specact.lab.envs import env_of
from specact.lab.rollout.distillation import record_rollouts, record_stale
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.steps import OBSERVATION, SHARD
from specact.lab.train.attention import Observing, Statistics
from specact.lab.train.dataset import Windows, moments
from specact.lab.train.export import BundleFolder, Graph, Input, deployed, observed
from specact.lab.train.fit import FromDemonstrations
from specact.lab.train.loop import Losses, Metrics, Progress, Stage, seed_weights
from specact.lab.train.recipe import ChunkRecipe, CorrectorRecipe, Recipe, chunk_recipe_of, plain
from specact.load import load_policy
from specact.observation import Field, ObservationSpec
from specact.rng import Role, stream
from specact.systems.corrector import CORRECTOR_PARTS, CorrectorSpec, index_of
from specact.types import ActionUnits

Array = NDArray[np.float32]

# What the network sees of the observation, the chunk (its actions left, or the first of them) and the index.
USES: dict[str, tuple[bool, str, bool]] = {
    "corrector": (True, "all", True), "shuffled": (True, "all", True), "a2c2": (True, "first", True),
    "draft": (True, "none", False), "index": (False, "none", True),
}  # fmt: skip
# Share of the changes that do not exceed the bound: the largest one is an outlier's.
_WITHIN = 0.99
_WHOLE_RANGE = 2.0  # of normalised actions: no bound
_VALIDATED = 4096  # maximum number of examples for validation


@dataclass(frozen=True)
class Steps:
    """N control steps, in order: windows by name ``[N, *window_shape]``, and since when their episode began, ``[N]``.

    ``chunk [N, H, A]`` is the target's answer to each, ``label [N, A]`` the action to learn, both normalised.
    """

    observation: Mapping[str, Array]
    since: NDArray[np.int64]
    chunk: Array
    label: Array

    def __len__(self) -> int:
        return len(self.since)


class CorrectorModel(Observing):
    """The networks f and g of :mod:`specact.systems.corrector`, on two common layers.

    What the recipe's method does not use is multiplied by 0. f begins at 0, which is the uncorrected chunk.
    """

    sees: Tensor
    of_chunk: Tensor
    of_index: Tensor

    def __init__(
        self, fields: Mapping[str, Field], statistics: Statistics, shape: tuple[int, int], recipe: CorrectorRecipe
    ) -> None:
        super().__init__(fields, statistics)
        observes, of_chunk, of_index = USES[recipe.method]
        rows = {"all": shape[0], "first": 1, "none": 0}[of_chunk]
        self.register_buffer("sees", torch.tensor(float(observes)))
        self.register_buffer("of_chunk", (torch.arange(shape[0]) < rows).float()[:, None])
        self.register_buffer("of_index", torch.tensor(float(of_index)))
        observation = sum(math.prod(field.window_shape) for field in fields.values())
        self.read = nn.Linear(observation + math.prod(shape) + 3, recipe.hidden)
        self.mix = nn.Linear(recipe.hidden, recipe.hidden)
        self.correct, self.draft = nn.Linear(recipe.hidden, shape[1]), nn.Linear(recipe.hidden, shape[1])
        nn.init.zeros_(self.correct.weight)
        nn.init.zeros_(self.correct.bias)

    def forward(self, observation: Mapping[str, Tensor], chunk: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """``u`` and ``g [B, A]``, for windows ``[B, *window_shape]``, actions left ``[B, H, A]``, index ``[B, 3]``."""
        numbers = [self.sees * self.numbers(name, observation[name]).flatten(1) for name in self.fields]
        left, index = (self.of_chunk * chunk).flatten(1), self.of_index * index
        hidden = torch.relu(self.read(torch.cat([*numbers, left, index], 1)))
        hidden = hidden + torch.relu(self.mix(hidden))
        return torch.tanh(self.correct(hidden)), self.draft(hidden)


class CorrectorTraining(FromDemonstrations):
    """The corrector of a recipe; ``jobs`` processes record rollouts in the run's folder, A2C2 reads demonstrations."""

    def __init__(self, recipe: CorrectorRecipe, data: Path, jobs: int = 1) -> None:
        self.recipe, self._jobs, self.target = recipe, jobs, load_policy(recipe.target)
        units, spec = self.target.units, self.target.policy.spec
        seen = spec.observation.vectors
        if units is None or seen is None:
            raise ConfigError(f"{recipe.target} must say the range of its actions and see more than camera frames")
        unknown = sorted(set(recipe.sees) - seen.fields.keys())
        if unknown:
            raise ConfigError(f"a corrector sees what {recipe.target} sees, {', '.join(seen.fields)}; got {unknown}")
        self.units: ActionUnits = units
        self.seen = ObservationSpec({name: seen[name] for name in recipe.sees or seen.fields})
        # The user's own may be code; a bundle's must not be without being named.
        self.env = recipe.env or env_of(self.target.env)
        self.request = plain(recipe) | {"taught_by": self.target.fingerprint}
        self._demonstrated = recipe.method == "a2c2"
        if self._demonstrated:
            super().__init__(_demonstrations(recipe), data, recipe.seed, teacher=self.target)
        elif data != Path():
            raise ConfigError(f"{recipe.bundle} learns from rollouts of its target alone; leave out --data")

    def read(self, progress: Progress) -> None:
        if self._demonstrated:
            super().read(progress)

    @contextmanager
    def prepared(self, progress: Progress) -> Iterator[None]:
        if self._demonstrated:
            with super().prepared(progress):
                self.train, self.held_out = map(self._of_demonstrations, (self.dataset.train, self.dataset.held_out))
                yield
            return
        recipe, count = self.recipe, self.recipe.episodes // SHARD
        record = partial(record_stale, recipe.target, self.env, recipe.seed, recipe.most_delay)
        with Pool(self._jobs) as pool:
            files = record_rollouts(
                record, self.out / "rollouts", range(count), pool.each, partial(progress, "rollouts")
            )  # fmt: skip
        last = max(1, round(recipe.held_out * count))
        self.train, self.held_out = self._of_rollouts(files[:-last]), self._of_rollouts(files[-last:])
        yield

    def plan(self) -> list[dict[str, int]]:
        return [{"corrector": self.recipe.steps}]

    def stage(self, name: str) -> Stage:
        recipe, train, held_out, bound = self.recipe, self.train, self.held_out, torch.from_numpy(self._bound())
        seed_weights(recipe.seed)
        model = self._model()
        # Of another step, most likely of another episode.
        mixed = stream(recipe.seed, Role.DATA).permutation(len(train)) if recipe.method == "shuffled" else None

        def errors(steps: Steps, step: int, size: int, module: nn.Module, shuffled: Any = None) -> dict[str, Tensor]:
            """Squared errors of corrected, drafted and uncorrected actions, means over those that there are."""
            rng = stream(recipe.seed, Role.DATA, step=step)
            rows = rng.integers(len(steps), size=size)
            ages = rng.integers(np.minimum(steps.since[rows] + 1, steps.chunk.shape[1]))
            given = torch.from_numpy(rng.random(size) >= self._without)[:, None]
            left, index = left_of(steps, rows, ages)
            seen = {
                n: torch.from_numpy(v[rows if shuffled is None else shuffled[rows]])
                for n, v in steps.observation.items()
            }
            u, drafted = module(seen, given[..., None] * left, given * index)
            label, base = torch.from_numpy(steps.label[rows]), left[:, 0]
            found = {"corrected": base + bound * u, "aligned": base, "drafted": drafted}
            wrong = {name: (action - label).square().mean(1, keepdim=True) for name, action in found.items()}
            there = {"corrected": given, "aligned": given, "drafted": ~given}
            return {name: (there[name] * each).sum() / there[name].sum().clamp(min=1) for name, each in wrong.items()}

        def update(step: int) -> Losses:
            parts = errors(train, step, recipe.batch, model, mixed)
            return parts["corrected"] + parts["drafted"], parts

        def validate(module: nn.Module) -> Metrics:
            return errors(held_out, 0, _VALIDATED, module)

        return Stage(name, model, recipe, update, validate, recipe.seed, small=True)

    def export(self, progress: Progress) -> list[Path]:
        recipe, model, chunks = self.recipe, self._model(), self.target.policy.spec
        model.load_state_dict(self.weights("corrector"))
        folder = BundleFolder(self.out / "bundles" / recipe.bundle, CORRECTOR_PARTS)
        inputs: dict[str, Input | Mapping[str, Input]] = {
            "observation": observed(model, None), "chunk": Input(("batch", chunks.chunk, chunks.actions)),
            "index": Input(("batch", 3)),
        }  # fmt: skip
        folder.export("corrector", Graph(deployed(model), inputs, ["correction", "draft"]))
        low, high = self.units.centre - self.units.scale, self.units.centre + self.units.scale
        spec = CorrectorSpec(
            self.target.fingerprint, chunks, self.seen, tuple(low.tolist()), tuple(high.tolist()),
            tuple(self._bound().tolist()), corrects=self._without < 1.0, drafts=self._without > 0.0,
        )  # fmt: skip
        manifest = {"kind": "corrector", **self.manifest(recipe.bundle, self.env)}
        return [folder.finish(manifest | {"sources": {"target": stored_source(recipe.target)}}, spec)]

    @property
    def _without(self) -> float:
        """From which share of the examples the chunk is withheld."""
        return {"a2c2": 0.0, "index": 0.0, "draft": 1.0}.get(self.recipe.method, self.recipe.without)

    def _bound(self) -> Array:
        """The change of the learned action within a step, which a correction may not exceed; A2C2 has no bound."""
        steps = self.train
        if self._demonstrated:
            return np.full(steps.label.shape[1], _WHOLE_RANGE, np.float32)
        changes = np.abs(np.diff(steps.label, axis=0))[steps.since[1:] > 0]
        bound: Array = np.maximum(np.quantile(changes, _WITHIN, axis=0), 1e-3).astype(np.float32)
        return bound

    def _model(self) -> CorrectorModel:
        spec, fields = self.target.policy.spec, self.seen.fields
        seen = self.train.observation
        statistics = {name: moments(seen[name].reshape(-1, *field.shape)) for name, field in fields.items()}
        return CorrectorModel(fields, statistics, (spec.chunk, spec.actions), self.recipe)

    def _of_rollouts(self, files: Sequence[Path]) -> Steps:
        parts = [load_file(file) for file in files]
        # The robots of a file act in turn.
        tables = [
            {name: column[np.lexsort((part["step"], part["episode"]))] for name, column in part.items()}
            for part in parts
        ]
        table = {name: np.concatenate([part[name] for part in tables]) for name in tables[0]}
        chunk = self.units.from_environment(table["chunk"])
        observation = {name: table[OBSERVATION + name] for name in self.seen.fields}
        return Steps(observation, table["step"], chunk, chunk[:, 0])

    def _of_demonstrations(self, windows: Windows) -> Steps:
        episodes, rows, data = windows.episodes, np.arange(len(windows)), self.dataset
        since = rows - np.repeat(episodes.starts, np.diff(episodes.ends, prepend=0))
        answers = (data.centre + data.scale * windows.chunks).numpy()
        seen = {name: tensor.numpy() for name, tensor in windows.at(self.seen, rows).observation.items()}
        normalise = self.units.from_environment
        return Steps(seen, since, normalise(answers), normalise(episodes.action))


def left_of(steps: Steps, rows: NDArray[np.int64], ages: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The chunks of so many steps before these rows, from the actions of now on, and the index: as on the device."""
    length = steps.chunk.shape[1]
    kept = np.minimum(ages[:, None] + np.arange(length), length - 1)
    table = np.stack([index_of(age, length) for age in range(length)])
    return torch.from_numpy(steps.chunk[(rows - ages)[:, None], kept]), torch.from_numpy(table[ages])


def _demonstrations(recipe: CorrectorRecipe) -> Recipe:
    """The demonstrations of the target's recipe, in pieces as long as its chunks; so many episodes of an expert's."""
    if kind_of_source(recipe.target) != "folder":
        raise ConfigError(
            f'method = "a2c2" learns from the demonstrations that a bundle was trained on, and {recipe.target} is no '
            'bundle; choose method = "corrector"'
        )
    of: ChunkRecipe = chunk_recipe_of(read_manifest(find_bundle(recipe.target)).recipe, recipe.target)
    return structs.replace(of, generate_episodes=min(of.generate_episodes, recipe.episodes))
