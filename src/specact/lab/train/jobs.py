"""The stages of a recipe: each in its turn, and those that do not need each other side by side."""

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

_SPAWN = get_context("spawn")  # a forked copy of a process with threads, such as those of PyTorch, can hang
_TELL_EVERY_S = 0.1


@dataclass(frozen=True)
class Planned:
    """A stage that is to be trained.

    Attributes:
        steps: that it takes.
        needs: names of the stages before it.
    """

    steps: int
    needs: frozenset[str]


@dataclass(frozen=True)
class Work:
    """What all stages of a run are made of; what one needs of another lies in the run's folder.

    Attributes:
        recipe: of the run.
        episodes: the demonstrations.
        out: folder of the run.
        every: steps between checkpoints, which is also what a kill can cost.
        on: what its policies are trained on; the tokenizer, which is small, is always trained on the CPU.
    """

    recipe: Recipe
    episodes: Episodes
    out: Path
    every: int = 250
    on: Accelerator = "cpu"

    @cached_property
    def specs(self) -> dict[str, ObservationSpec]:
        """What each policy sees, by its name."""
        return stages.specs_of(self.recipe, self.episodes)

    @cached_property
    def dataset(self) -> Dataset:
        """The demonstrations ready for training."""
        return stages.prepare(self.episodes, self.recipe, skip_disturbed=self.recipe.skip_disturbed)

    @cached_property
    def encoders(self) -> dict[tuple[str, EncoderRecipe], str]:
        """Stages of encoders that are trained before the policies that share them, by camera and recipe."""
        named: dict[tuple[str, EncoderRecipe], str] = {}
        for policy, settings in self.recipe.policies.items():
            for camera in self._cameras(policy):
                named.setdefault((camera, settings.encoder), f"{policy}.{camera}")
        return named

    def plan(self) -> dict[str, Planned]:
        """All stages by name, each behind those that it needs."""
        planned = {"tokenizer": Planned(self.recipe.tokenizer.steps, frozenset())}
        for name, policy in self.recipe.policies.items():
            encoders = [self.encoders[camera, policy.encoder] for camera in self._cameras(name)]
            planned |= {encoder: Planned(policy.encoder.steps, frozenset()) for encoder in encoders}
            planned[name] = Planned(policy.steps, frozenset(("tokenizer", *encoders)))
        return planned

    def stage(self, name: str) -> Stage:
        """A stage of the plan; those that it needs have been trained."""
        recipe, shown = self.recipe, self.dataset
        if name == "tokenizer":
            return stages.tokenizer_stage(shown, recipe)
        for (camera, encoder), its_name in self.encoders.items():
            if name == its_name:
                scenes = Scenes(stages.task_of(recipe), recipe.seed)
                return encoder_stage(name, encoder, camera, shown, scenes, recipe.seed)
        settings, trained = recipe.policies[name], dict[str, ImageEncoder]()
        for camera in self._cameras(name):
            trained[camera] = self._encoder(camera, settings.encoder)
            shown = encoded(shown, camera, trained[camera])
        stage = stages.policy_stage(name, settings, shown, recipe, self.tokenizer(), self.specs[name])
        assert isinstance(stage.module, VQBeT)
        for camera, network in trained.items():
            stage.module.freeze(camera, network)
        return stage

    def device(self, name: str) -> torch.device:
        """What a stage is trained on."""
        return accelerator("cpu" if name == "tokenizer" else self.on)

    def tokenizer(self) -> ResidualVQ:
        """The trained tokenizer."""
        made = ResidualVQ(self.recipe.tokenizer, self.recipe.chunk, self.dataset.train.chunks.shape[-1])
        made.load_state_dict(self.trained("tokenizer"))
        return made.eval().requires_grad_(False)

    def trained(self, name: str) -> dict[str, torch.Tensor]:
        """The weights that a stage ended with, or those of a snapshot."""
        return checkpoint.read(self.out / f"{name}.safetensors")[0]

    def _cameras(self, policy: str) -> tuple[str, ...]:
        """Those that it looks through with encoders that are trained before it."""
        return tuple(self.specs[policy].images) if self.recipe.policies[policy].encoder.learns else ()

    def _encoder(self, camera: str, recipe: EncoderRecipe) -> ImageEncoder:
        made = ImageEncoder(recipe, self.dataset.train.episodes.frames(camera).shape[1:])
        prefix, weights = "encoder.", self.trained(self.encoders[camera, recipe])
        made.load_state_dict({name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)})
        return made.eval()


def train_stages(work: Work, progress: Progress, *, jobs: int, threads: int) -> None:
    """Trains what is left of a run's plan.

    A stage that none can be trained beside is trained in this process, all others in processes of their own. Whatever
    ends this one ends them as well; their checkpoints stay.

    Args:
        work: the run.
        progress: called with (stage, steps done, total).
        jobs: stages at a time.
        threads: of PyTorch, in every process.

    Raises:
        SpecactError: what a stage raised, with a note that names it; or if its process ended before it did.
    """
    plan, running = work.plan(), list[_Running]()
    left = [name for name in plan if not (work.out / f"{name}.safetensors").exists()]

    def tell(name: str, done: int) -> None:
        progress(name, done, plan[name].steps)

    for name in plan:
        if name not in left:
            work.trained(name)  # refused now, if it is damaged
            tell(name, plan[name].steps)
    with Interrupts():
        try:
            while left:
                begun = [stage.name for stage in running]
                ready = [name for name in left if name not in begun and plan[name].needs.isdisjoint(left)]
                if not running and (jobs == 1 or len(ready) == 1):
                    name = ready[0]
                    run(work.stage(name), work.out, partial(tell, name), every=work.every, device=work.device(name))
                    left.remove(ready[0])
                    continue
                for name in ready[: jobs - len(running)]:
                    running.append(_Running(work, name, threads))
                for stage in _heard(running):
                    done = stage.told()
                    if done is None:
                        running.remove(stage)
                        left.remove(stage.name)
                    else:
                        tell(stage.name, done)
        finally:
            for stage in running:
                stage.process.terminate()
            for stage in running:
                stage.process.join()


class _Running:
    """A stage in a process of its own."""

    def __init__(self, work: Work, name: str, threads: int) -> None:
        self.name = name
        self.receiver, sender = _SPAWN.Pipe(duplex=False)
        self.process = _SPAWN.Process(
            target=_train, args=(replace(work), name, threads, sender), name=name, daemon=True
        )
        resource_tracker.ensure_running()  # starting it unblocks the signal
        # Ctrl-C goes to every process of a terminal; this one ends the others.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sender.close()

    def told(self) -> int | None:
        """Steps done, or None when the stage is finished; waits for either."""
        try:
            told: int | SpecactError = self.receiver.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode:
                raise SpecactError(
                    f"the process that trained {self.name} ended with status {self.process.exitcode} before the stage "
                    "did; run the same command again, with --jobs 1 if memory is short: checkpoints are kept"
                ) from None
            return None
        if isinstance(told, SpecactError):
            told.add_note(f"this ended the stage {self.name}; the checkpoints of all stages are kept")
            raise told
        return told


def _heard(running: Sequence[_Running]) -> list[_Running]:
    """Those that have something to tell; waits for the first."""
    ready = wait([stage.receiver for stage in running])
    return [stage for stage in running if stage.receiver in ready]


def _train(work: Work, name: str, threads: int, sender: Connection) -> None:
    """Trains a stage and tells how far it is; ends where nobody listens any more."""
    torch.set_num_threads(threads)
    told_at = -math.inf

    def tell(done: int) -> None:
        nonlocal told_at
        if time.monotonic() > told_at + _TELL_EVERY_S:
            sender.send(done)
            told_at = time.monotonic()

    try:
        stage = work.stage(name)
        run(stage, work.out, tell, every=work.every, device=work.device(name))
        sender.send(stage.steps)
    except BrokenPipeError:
        sys.exit(1)
    except SpecactError as error:
        sender.send(error)
