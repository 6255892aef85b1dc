"""Scheduling of a recipe's stages by their dependencies; independent ones may run concurrently."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from specact.errors import SpecactError
from specact.interrupts import Interrupts
from specact.lab.data.episodes import Episodes
from specact.lab.train import checkpoint, stages
from specact.lab.train.encoder import ImageEncoder, Scenes, encoded, encoder_stage
from specact.lab.train.loop import Accelerator, Stage, accelerator, run
from specact.lab.train.recipe import EncoderRecipe, Recipe
from specact.lab.train.stages import Progress
from specact.lab.train.tokenizer import ResidualVQ
from specact.lab.train.vqbet import VQBeT
from specact.lab.train.windows import Dataset
from specact.observation import ObservationSpec

_SPAWN = get_context("spawn")  # forking a process with threads, such as PyTorch's, can hang
_REPORT_EVERY_S = 0.1


@dataclass(frozen=True)
class PlannedStage:
    """A stage of the plan.

    Attributes:
        steps: their number.
        needs: names of the stages it depends on.
    """

    steps: int
    needs: frozenset[str]


@dataclass(frozen=True)
class Work:
    """The inputs of all stages of a run; the results of stages are in the run's folder.

    Attributes:
        recipe: of the run.
        episodes: the demonstrations.
        out: folder of the run.
        every: steps between checkpoints, the most that a kill can lose.
        on: device of the policies' training; the small tokenizer is always trained on the CPU.
    """

    recipe: Recipe
    episodes: Episodes
    out: Path
    every: int = 250
    on: Accelerator = "cpu"

    @cached_property
    def specs(self) -> dict[str, ObservationSpec]:
        """The observations of each policy, by its name."""
        return stages.specs_of(self.recipe, self.episodes)

    @cached_property
    def dataset(self) -> Dataset:
        """The demonstrations ready for training."""
        return stages.prepare(self.episodes, self.recipe, skip_disturbed=self.recipe.skip_disturbed)

    @cached_property
    def encoders(self) -> dict[tuple[str, EncoderRecipe], str]:
        """Stages of pre-trained encoders, which policies may share, by camera and recipe."""
        named: dict[tuple[str, EncoderRecipe], str] = {}
        for policy, settings in self.recipe.policies.items():
            for camera in self._cameras(policy):
                named.setdefault((camera, settings.encoder), f"{policy}.{camera}")
        return named

    def plan(self) -> dict[str, PlannedStage]:
        """All stages by name, in topological order."""
        planned = {"tokenizer": PlannedStage(self.recipe.tokenizer.steps, frozenset())}
        for name, policy in self.recipe.policies.items():
            encoders = [self.encoders[camera, policy.encoder] for camera in self._cameras(name)]
            planned |= {encoder: PlannedStage(policy.encoder.steps, frozenset()) for encoder in encoders}
            planned[name] = PlannedStage(policy.steps, frozenset(("tokenizer", *encoders)))
        return planned

    def stage(self, name: str) -> Stage:
        """A stage of the plan; its dependencies have been trained."""
        recipe, dataset = self.recipe, self.dataset
        if name == "tokenizer":
            return stages.tokenizer_stage(dataset, recipe)
        for (camera, encoder), encoder_name in self.encoders.items():
            if name == encoder_name:
                scenes = Scenes(stages.task_of(recipe), recipe.seed)
                return encoder_stage(name, encoder, camera, dataset, scenes, recipe.seed)
        settings, trained = recipe.policies[name], dict[str, ImageEncoder]()
        for camera in self._cameras(name):
            trained[camera] = self._encoder(camera, settings.encoder)
            dataset = encoded(dataset, camera, trained[camera])
        stage = stages.policy_stage(name, settings, dataset, recipe, self.tokenizer(), self.specs[name])
        assert isinstance(stage.module, VQBeT)
        for camera, network in trained.items():
            stage.module.freeze(camera, network)
        return stage

    def device(self, name: str) -> torch.device:
        """The device of a stage's training."""
        return accelerator("cpu" if name == "tokenizer" else self.on)

    def tokenizer(self) -> ResidualVQ:
        """The trained tokenizer."""
        tokenizer = ResidualVQ(self.recipe.tokenizer, self.recipe.chunk, self.dataset.train.chunks.shape[-1])
        tokenizer.load_state_dict(self.trained("tokenizer"))
        return tokenizer.eval().requires_grad_(False)

    def trained(self, name: str) -> dict[str, torch.Tensor]:
        """The final weights of a stage, or those of a snapshot."""
        return checkpoint.read(self.out / f"{name}.safetensors")[0]

    def _cameras(self, policy: str) -> tuple[str, ...]:
        """The policy's cameras with pre-trained encoders."""
        return tuple(self.specs[policy].images) if self.recipe.policies[policy].encoder.learns else ()

    def _encoder(self, camera: str, recipe: EncoderRecipe) -> ImageEncoder:
        encoder = ImageEncoder(recipe, self.dataset.train.episodes.frames(camera).shape[1:])
        prefix, weights = "encoder.", self.trained(self.encoders[camera, recipe])
        encoder.load_state_dict(
            {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
        )
        return encoder.eval()


def train_stages(work: Work, progress: Progress, *, jobs: int, threads: int) -> None:
    """Trains the remaining stages of a run's plan.

    A stage that runs alone is trained in this process, concurrent ones in child processes, which end with this one;
    their checkpoints are kept.

    Args:
        work: the run.
        progress: called with (stage, steps done, total).
        jobs: concurrent stages.
        threads: of PyTorch, in every process.

    Raises:
        SpecactError: the error of a stage, with a note that names it; or if its process ended before it did.
    """
    plan, running = work.plan(), list[_StageProcess]()
    remaining = [name for name in plan if not (work.out / f"{name}.safetensors").exists()]

    def report(name: str, done: int) -> None:
        progress(name, done, plan[name].steps)

    for name in plan:
        if name not in remaining:
            work.trained(name)  # fails early if it is damaged
            report(name, plan[name].steps)
    with Interrupts():
        try:
            while remaining:
                started = [stage.name for stage in running]
                ready = [name for name in remaining if name not in started and plan[name].needs.isdisjoint(remaining)]
                if not running and (jobs == 1 or len(ready) == 1):
                    name = ready[0]
                    run(work.stage(name), work.out, partial(report, name), every=work.every, device=work.device(name))
                    remaining.remove(ready[0])
                    continue
                for name in ready[: jobs - len(running)]:
                    running.append(_StageProcess(work, name, threads))
                for stage in _wait_ready(running):
                    done = stage.receive()
                    if done is None:
                        running.remove(stage)
                        remaining.remove(stage.name)
                    else:
                        report(stage.name, done)
        finally:
            for stage in running:
                stage.process.terminate()
            for stage in running:
                stage.process.join()


class _StageProcess:
    """A stage in a child process."""

    def __init__(self, work: Work, name: str, threads: int) -> None:
        self.name = name
        self.receiver, sender = _SPAWN.Pipe(duplex=False)
        self.process = _SPAWN.Process(
            target=_train, args=(replace(work), name, threads, sender), name=name, daemon=True
        )
        resource_tracker.ensure_running()  # starting it later would unblock the signal
        # Ctrl-C goes to every process of a terminal; only this one handles it, and ends the others.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sender.close()

    def receive(self) -> int | None:
        """Waits for a message: the steps done, or None when the stage is finished."""
        try:
            message: int | SpecactError = self.receiver.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode:
                raise SpecactError(
                    f"the process that trained {self.name} ended with status {self.process.exitcode} before the stage "
                    "did; run the same command again, with --jobs 1 if memory is short: checkpoints are kept"
                ) from None
            return None
        if isinstance(message, SpecactError):
            message.add_note(f"this ended the stage {self.name}; the checkpoints of all stages are kept")
            raise message
        return message


def _wait_ready(running: Sequence[_StageProcess]) -> list[_StageProcess]:
    """Waits for a message; returns the stages that have one."""
    ready = wait([stage.receiver for stage in running])
    return [stage for stage in running if stage.receiver in ready]


def _train(work: Work, name: str, threads: int, sender: Connection) -> None:
    """Trains a stage and sends its progress; ends when the pipe is closed."""
    torch.set_num_threads(threads)
    reported_at = -math.inf

    def report(done: int) -> None:
        nonlocal reported_at
        if time.monotonic() > reported_at + _REPORT_EVERY_S:
            sender.send(done)
            reported_at = time.monotonic()

    try:
        stage = work.stage(name)
        run(stage, work.out, report, every=work.every, device=work.device(name))
        sender.send(stage.steps)
    except BrokenPipeError:
        sys.exit(1)
    except SpecactError as error:
        sender.send(error)
