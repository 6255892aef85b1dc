"""Training runs: checks, folder, stages, bundles. A run that was stopped resumes, and gives the same bits."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypedDict

import torch

from specact import __version__
from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import read_manifest
from specact.errors import ConfigError, SpecactError
from specact.families.chunks.sources import LoadedPolicy
from specact.files import check_folder, write_json
from specact.interrupts import Interrupts
from specact.lab.data.episodes import Episodes
from specact.lab.data.folder import locked
from specact.lab.data.generate import demonstration_files, read_demonstrations
from specact.lab.envs import env_of
from specact.lab.rollout.pool import Pool
from specact.lab.train import loop
from specact.lab.train.dataset import Dataset, check_teacher, frames_at_hand, labelled, prepare
from specact.lab.train.loop import Accelerator, Progress, Stage, Weights, run
from specact.lab.train.recipe import ChunkRecipe, Recipe, chunk_recipe_of


def recipe_of(bundle: str, env: str | None) -> ChunkRecipe:
    """The recipe that a bundle was trained by, whose demonstrations are read again; ``env`` is what the user named.

    Raises:
        ConfigError: for an environment that is code, unless the user named it; or for no chunk policy.
    """
    recipe = chunk_recipe_of(read_manifest(find_bundle(bundle)).recipe, bundle)
    if recipe.env is not None:
        env_of(recipe.env, env)
    return recipe


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training run: the folders of its bundles, and the last log line of every stage."""

    bundles: list[Path]
    metrics: dict[str, Any]


class How(TypedDict, total=False):
    """How :func:`fit` trains, which changes no result but for ``threads``."""

    threads: int
    jobs: int
    every: int
    on: Accelerator


class Training(ABC):
    """Base class of every kind of training; :func:`fit` runs it.

    ``request`` are its settings as plain values; the folder ``out`` holds the run of one request.
    """

    request: dict[str, Any]
    out: Path

    def read(self, progress: Progress) -> None:
        """Reads the training data and refuses what does not fit, before the folder is made."""

    @contextmanager
    def prepared(self, progress: Progress, jobs: int) -> Iterator[None]:
        """Keeps in the folder what takes long to make, by so many processes, while the stages are trained."""
        yield

    @abstractmethod
    def plan(self) -> list[dict[str, int]]:
        """The number of steps of every stage by name, in groups; a stage may need the stages of earlier groups."""

    @abstractmethod
    def stage(self, name: str) -> Stage:
        """A stage of the plan, once the stages of earlier groups are trained."""

    @abstractmethod
    def export(self, progress: Progress) -> list[Path]:
        """Writes the bundles after all stages, and returns their folders."""

    def weights(self, name: str) -> Weights:
        """The final weights of a stage, or those of a snapshot; a damaged file is refused."""
        return loop.read_tensors(self.out / f"{name}.safetensors")[0]

    def manifest(self, name: str, env: str | None) -> dict[str, Any]:
        """The entries of a bundle's manifest that describe its training."""
        training = loop.last_lines(self.out)
        return {"name": name, "env": env or "", "specact": __version__, "recipe": self.request, "training": training}

    def __getstate__(self) -> dict[str, Any]:
        """The state that other processes get: without the cached properties, which they compute again."""
        return {
            name: value
            for name, value in vars(self).items()
            if not isinstance(getattr(type(self), name, None), cached_property)
        }


class FromDemonstrations(Training):
    """Base class of trainings on demonstrations, whose paths are relative to the folder ``data``.

    The labels are the demonstrated actions, or with a ``teacher`` its answers to the same observations, drawn with
    ``seed``. With ``skip_disturbed`` windows whose chunk is disturbed are left out.
    """

    episodes: Episodes

    def __init__(
        self, demonstrations: Recipe, data: Path, seed: int, *, teacher: LoadedPolicy | None = None,
        skip_disturbed: bool = False,
    ) -> None:  # fmt: skip
        self._demonstrations, self._data, self._skip_disturbed = demonstrations, data, skip_disturbed
        self._seed, self._teacher = seed, teacher

    def read(self, progress: Progress) -> None:
        recipe = self._demonstrations
        episodes = read_demonstrations(
            recipe, demonstration_files(recipe, self._data),
            lambda done: progress("demonstrations", done, recipe.generate_episodes),
        )  # fmt: skip
        if self._teacher is not None:
            check_teacher(self._teacher, recipe.chunk, episodes)
        names = self.reads(episodes)
        self.episodes = episodes.only(*(name for name in episodes.observation if name in names))
        for camera in self.episodes.cameras:
            self.episodes.frames(camera)[0]  # refuses one that cannot be read
        _ = self.dataset  # refuses what is unusable

    def reads(self, episodes: Episodes) -> set[str]:
        """The names of the observations that the teacher, policies and encoders read; refuses what does not fit."""
        return set() if self._teacher is None else set(self._teacher.policy.spec.observation.fields)

    @contextmanager
    def prepared(self, progress: Progress, jobs: int) -> Iterator[None]:
        with ExitStack() as stack:
            self.episodes = stack.enter_context(frames_at_hand(self.episodes, self.out / "frames", progress))
            vars(self).pop("dataset", None)
            if self._teacher is not None:
                chunk = self._demonstrations.chunk
                stack.enter_context(labelled(self.dataset, self._teacher, chunk, self.out, self._seed, progress))
            yield

    @cached_property
    def dataset(self) -> Dataset:
        """The demonstrations ready for training."""
        return prepare(self.episodes, self._demonstrations, skip_disturbed=self._skip_disturbed)


def fit(
    training: Training, out: Path, progress: Progress, *, threads: int = 1, jobs: int = 1, every: int = 250,
    on: Accelerator = "cpu",
) -> TrainingResult:  # fmt: skip
    """Trains all stages and exports the bundles to ``out``; a stopped run resumes, also on another device.

    Results are exact for the same number of PyTorch's ``threads``. ``jobs`` stages are trained at a time, each in a
    process of its own, so that the calling program must be importable. A kill loses at most ``every`` steps.

    Raises:
        ConfigError: if there is no such accelerator, or ``out`` is locked, holds another recipe's run, or cannot be
            written.
        DataError: if the demonstrations cannot be used; ``out`` is then not created.
    """
    torch.set_num_threads(threads)
    loop.accelerator(on)  # fails early if it is missing
    _check_free(out, training.request)  # before demonstrations are generated, which can take minutes
    training.read(progress)
    training.out = out
    with locked(out):
        _check_free(out, training.request)
        write_json(out / "recipe.json", training.request)
        with training.prepared(progress, jobs):
            _train(training, progress, jobs, partial(_train_stage, training, threads, every, on))
            loop.sort_log(out, [name for group in training.plan() for name in group])
            return TrainingResult(training.export(progress), loop.last_lines(out))


def _train(training: Training, progress: Progress, jobs: int, train_stage: Callable[..., None]) -> None:
    plan = training.plan()
    steps = {name: number for group in plan for name, number in group.items()}

    def report(name: str, done: int) -> None:
        progress(name, done, steps[name])

    def report_logged() -> None:
        for line in loop.read_log(training.out):
            if line["stage"] in steps:
                report(line["stage"], line["step"])

    trained = [name for name in steps if (training.out / f"{name}.safetensors").exists()]
    for name in trained:
        training.weights(name)  # fails early if it is damaged
        report(name, steps[name])
    for group in plan:
        names = [name for name in group if name not in trained]
        if min(jobs, len(names)) <= 1:
            for name in names:
                train_stage(name, partial(report, name))
            continue
        with Interrupts(), Pool(min(jobs, len(names))) as pool:
            for _ in pool.each(train_stage, names, report_logged):
                pass


def _train_stage(
    training: Training, threads: int, every: int, on: Accelerator, name: str,
    advance: Callable[[int], None] = lambda done: None,
) -> None:  # fmt: skip
    torch.set_num_threads(threads)
    try:
        run(training.stage(name), training.out, advance, every=every, on=on)
    except SpecactError as error:
        error.add_note(f"this ended the stage {name}; the checkpoints of all stages are kept")
        raise


def _check_free(out: Path, request: dict[str, Any]) -> None:
    """Refuses a folder that a run of this request may not use, without writing; policies and bundles may be added."""
    check_folder(out)
    file, wanted = out / "recipe.json", json.loads(json.dumps(request))
    try:
        stored = json.loads(file.read_text()) if file.exists() else wanted
        # Policies that both have must be the same; all else too, but for the bundles.
        policies = [recipe.get("policies", {}) for recipe in (stored, wanted)]
        differing = {key for key in {*stored, *wanted} if stored.get(key, ...) != wanted.get(key, ...)}
        differing -= {"policies", "bundles", "precision"}  # the last is of earlier versions
        differing |= {name for name, policy in policies[0].items() if policies[1].get(name, policy) != policy}
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; check its permissions") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({error}); choose another --out, or remove that folder") from None
    if differing:
        raise ConfigError(f"{out} holds a run of another recipe; choose another --out, or remove that folder first")
