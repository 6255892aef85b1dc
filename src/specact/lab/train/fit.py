"""Training runs: checks, folder, stages, bundles. A run that was stopped resumes, and gives the same bits."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from specact import __version__
from specact.errors import ConfigError, SpecactError
from specact.files import check_folder, write_json
from specact.interrupts import Interrupts
from specact.lab.data.episodes import Episodes
from specact.lab.data.folder import locked
from specact.lab.rollout.pool import Pool
from specact.lab.train.dataset import Dataset, frames_at_hand, needed, prepare, read_demonstrations
from specact.lab.train.loop import (
    Accelerator,
    Progress,
    Stage,
    Weights,
    accelerator,
    last_lines,
    read_log,
    read_tensors,
    run,
    sort_log,
)
from specact.lab.train.recipe import Recipe
from specact.observation import ObservationSpec


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training run.

    Attributes:
        bundles: their folders.
        metrics: the last log line of every stage.
    """

    bundles: list[Path]
    metrics: dict[str, Any]


class Training(ABC):
    """What a kind of training has of its own; :func:`fit` does the rest.

    Attributes:
        request: its settings, as plain values; a folder holds the run of one request.
        out: folder of the run, set by :func:`fit`.
    """

    request: dict[str, Any]
    out: Path

    def read(self, progress: Progress) -> None:
        """Reads what is learned from, and refuses what does not fit, before the folder is made."""

    @contextmanager
    def prepared(self, progress: Progress) -> Iterator[None]:
        """Holds in the folder what takes long to make, while the stages are trained."""
        yield

    @abstractmethod
    def plan(self) -> list[dict[str, int]]:
        """The steps of all stages by name, in groups; stages need those of earlier groups alone."""

    @abstractmethod
    def stage(self, name: str) -> Stage:
        """A stage of the plan; those of earlier groups have been trained."""

    @abstractmethod
    def export(self, progress: Progress) -> list[Path]:
        """Writes the bundles after all stages, and returns their folders."""

    def weights(self, name: str) -> Weights:
        """The final weights of a stage, or those of a snapshot; a damaged file is refused."""
        return read_tensors(self.out / f"{name}.safetensors")[0]

    def manifest(self, name: str, env: str | None) -> dict[str, Any]:
        """What the manifest of every bundle says of its training."""
        training = last_lines(self.out)
        return {"name": name, "env": env or "", "specact": __version__, "recipe": self.request, "training": training}

    def __getstate__(self) -> dict[str, Any]:
        """For other processes: without what is computed from the rest."""
        return {
            name: value
            for name, value in vars(self).items()
            if not isinstance(getattr(type(self), name, None), cached_property)
        }


class FromDemonstrations(Training):
    """A training that learns from demonstrations.

    Args:
        demonstrations: which are read, and how they are split.
        data: folder that the paths of demonstrations are relative to.
        skip_disturbed: whether windows whose chunk is disturbed are left out.

    Attributes:
        episodes: the demonstrations, without what nothing reads.
    """

    episodes: Episodes

    def __init__(self, demonstrations: Recipe, data: Path, *, skip_disturbed: bool = False) -> None:
        self._demonstrations, self._data, self._skip_disturbed = demonstrations, data, skip_disturbed

    def read(self, progress: Progress) -> None:
        episodes = read_demonstrations(self._demonstrations, self._data, progress)
        self.episodes = needed(episodes, *self.reads(episodes))
        _ = self.dataset  # refuses what is unusable

    @abstractmethod
    def reads(self, episodes: Episodes) -> tuple[Iterable[ObservationSpec], Iterable[str]]:
        """The observations that are read, and the names of those that are predicted; refuses what does not fit."""

    @contextmanager
    def prepared(self, progress: Progress) -> Iterator[None]:
        with frames_at_hand(self.episodes, self.out / "frames", progress) as self.episodes:
            vars(self).pop("dataset", None)
            yield

    @cached_property
    def dataset(self) -> Dataset:
        """The demonstrations ready for training."""
        return prepare(self.episodes, self._demonstrations, skip_disturbed=self._skip_disturbed)


def fit(
    training: Training,
    out: Path,
    progress: Progress,
    *,
    threads: int = 1,
    jobs: int = 1,
    every: int = 250,
    on: Accelerator = "cpu",
) -> TrainingResult:
    """Trains all stages and exports the bundles; a stopped run resumes.

    Args:
        training: what to train.
        out: folder of the run: checkpoints, ``log.jsonl`` and ``bundles/NAME``.
        progress: called with (stage, steps done, total).
        threads: of PyTorch, in every process; results are exact for the same number.
        jobs: stages that are trained concurrently, each in its own process; it does not change the results. With more
            than one, the calling program must be importable: ``if __name__ == "__main__":``.
        every: steps between checkpoints, the most that a kill can lose.
        on: device of the policies' training; a stopped run may resume on another one.

    Raises:
        ConfigError: if there is no such accelerator, ``out`` holds a run of another recipe, is locked by another
            process, or a file cannot be written.
        DataError: if the demonstrations cannot be used; ``out`` is then not created.
        SpecactError: the error of a stage, with a note that names it.
    """
    torch.set_num_threads(threads)
    accelerator(on)  # fails early if it is missing
    _check_free(out, training.request)  # before demonstrations are generated, which can take minutes
    training.read(progress)
    training.out = out
    with locked(out):
        _check_free(out, training.request)
        write_json(out / "recipe.json", training.request)
        with training.prepared(progress):
            _train(training, progress, threads, jobs, every, on)
            sort_log(out, [name for group in training.plan() for name in group])
            return TrainingResult(training.export(progress), last_lines(out))


def _train(training: Training, progress: Progress, threads: int, jobs: int, every: int, on: Accelerator) -> None:
    plan = training.plan()
    steps = {name: number for group in plan for name, number in group.items()}

    def report(name: str) -> Callable[[int], None]:
        return lambda done: progress(name, done, steps[name])

    def report_logged() -> None:
        for line in read_log(training.out):
            if line["stage"] in steps:
                report(line["stage"])(line["step"])

    trained = [name for name in steps if (training.out / f"{name}.safetensors").exists()]
    for name in trained:
        training.weights(name)  # fails early if it is damaged
        report(name)(steps[name])
    for group in plan:
        names = [name for name in group if name not in trained]
        if min(jobs, len(names)) <= 1:
            for name in names:
                run(training.stage(name), training.out, report(name), every=every, on=on)
            continue
        with Interrupts(), Pool(min(jobs, len(names))) as pool:
            for _ in pool.each(partial(_train_alone, training, threads, every, on), names, report_logged):
                pass


def _train_alone(training: Training, threads: int, every: int, on: Accelerator, name: str) -> None:
    """Trains a stage in a process of its own."""
    torch.set_num_threads(threads)
    try:
        run(training.stage(name), training.out, lambda done: None, every=every, on=on)
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
        differing -= {"policies", "bundles"}
        differing |= {name for name, policy in policies[0].items() if policies[1].get(name, policy) != policy}
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; check its permissions") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({error}); choose another --out, or remove that folder") from None
    if differing:
        raise ConfigError(f"{out} holds a run of another recipe; choose another --out, or remove that folder first")
