"""The two kinds of stage: the tokenizer, and a policy on top of the frozen tokenizer."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from specact.bundle.words import Words
from specact.errors import ConfigError, DataError
from specact.lab.data.episodes import Episodes, Observed
from specact.lab.data.frames import Frames, copied
from specact.lab.data.generate import demonstrations
from specact.lab.envs import load_task
from specact.lab.envs.task import Task
from specact.lab.train import tokenizer as rvq
from specact.lab.train.loop import Metrics, Stage, adamw, autocast, cosine, device_of
from specact.lab.train.losses import Targets, policy_loss
from specact.lab.train.recipe import Demonstrated, PolicyRecipe, Recipe
from specact.lab.train.tokenizer import ResidualVQ
from specact.lab.train.vqbet import Shapes, VQBeT, moments
from specact.lab.train.windows import Batch, Dataset, Windows, observation_of
from specact.observation import ObservationSpec
from specact.rng import Role, stream

Progress = Callable[[str, int, int], None]


def task_of(recipe: Demonstrated) -> Task | None:
    """The recipe's environment; None where it says a control rate instead."""
    return None if recipe.env is None else load_task(recipe.env)


def demonstrated(recipe: Demonstrated, task: Task | None, data: Path, progress: Progress) -> Episodes:
    """The demonstrations of a recipe: read from files below ``data``, or made by the task's scripted expert.

    Raises:
        DataError: if they cannot be read or do not fit the task.
    """
    return demonstrations(
        task,
        tuple(data / name for name in recipe.data),
        recipe.generate_episodes,
        recipe.generate_noise,
        recipe.seed,
        lambda done: progress("demonstrations", done, recipe.generate_episodes),
        sources=recipe.observations,
        rate_hz=recipe.rate_hz,
    )


def needed(episodes: Episodes, specs: Iterable[ObservationSpec], learned: Iterable[str] = ()) -> Episodes:
    """Without what no policy sees and no encoder learns; one frame of every camera that one does see is read.

    Raises:
        DataError: if such a camera cannot be read.
    """
    names = {name for spec in specs for name in spec.fields}.union(learned)
    kept = episodes.only(*(name for name in episodes.observation if name in names))
    for name in kept.cameras:
        kept.frames(name)[0]
    return kept


@contextmanager
def frames_at_hand(episodes: Episodes, folder: Path, progress: Progress) -> Iterator[Episodes]:
    """With every camera's frames decoded into one file in ``folder``, unless they are in memory anyway.

    Batches are drawn at random, and a frame in the middle of a compressed chunk or video costs all those before it. The
    files are removed when all has gone well; a run that was stopped finds them there.

    Raises:
        ConfigError: if there is no room for them.
        DataError: if a frame cannot be read.
    """

    def at_hand(name: str, array: Observed) -> Observed:
        if not isinstance(array, Frames) or array.in_memory:
            return array
        return copied(array, folder / f"{name}.npy", lambda done: progress(f"frames of {name}", done, len(array)))

    yield replace(episodes, observation={name: at_hand(name, seen) for name, seen in episodes.observation.items()})
    shutil.rmtree(folder, ignore_errors=True)


def prepare(episodes: Episodes, recipe: Demonstrated, *, skip_disturbed: bool = False) -> Dataset:
    """Splits by episode (the same split for every stage), normalises actions by their range.

    Args:
        episodes: demonstrations.
        recipe: of what they are for.
        skip_disturbed: see :class:`~specact.lab.train.windows.Windows`.

    Raises:
        DataError: if there are too few episodes, none as long as a chunk, or values too large to compute with.
    """
    longest = int(np.diff(episodes.ends, prepend=0).max())
    if recipe.chunk > longest:
        raise DataError(
            f"the longest demonstration has {longest} actions, fewer than chunk = {recipe.chunk}: every chunk would "
            "end in repetitions of a last action; shorten chunk"
        )
    train, held_out = episodes.split(recipe.held_out, recipe.seed)
    low, high = train.action.min(0), train.action.max(0)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is refused below
        centre, scale = (low + high) / 2, np.maximum((high - low) / 2, 1e-6)

    seen = train.observation
    statistics = {name: moments(values) for name, values in seen.items() if isinstance(values, np.ndarray)}
    tensors = [torch.from_numpy(centre), torch.from_numpy(scale)]
    parts = (*tensors, *(part for pair in statistics.values() for part in pair))
    if not all(bool(part.isfinite().all()) for part in parts):
        raise DataError(
            "these demonstrations hold values so large that their range or standard deviation overflows; rescale them"
        )
    words = None if train.instructions is None else Words.of(train.instructions)
    windows = [
        Windows(part, recipe.chunk, centre, scale, words, skip_disturbed=skip_disturbed) for part in (train, held_out)
    ]
    if not all(part.counts.any() for part in windows):
        raise DataError(
            f"no chunk of {recipe.chunk} actions lies before a disturbance; shorten chunk, or leave out skip_disturbed"
        )
    return Dataset(windows[0], windows[1], statistics, tensors[0], tensors[1], words)


def tokenizer_stage(dataset: Dataset, recipe: Recipe) -> Stage:
    """The residual VQ, to be trained before any policy and then frozen."""
    settings, (chunks, held_out) = recipe.tokenizer, (part.counted for part in (dataset.train, dataset.held_out))
    torch.manual_seed(recipe.seed)
    model = ResidualVQ(settings, recipe.chunk, chunks.shape[-1])
    generator = torch.Generator().manual_seed(recipe.seed)
    model.initialise(chunks[_some(recipe.seed, 0, len(chunks), 4096)], generator)

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        loss, error, _ = model.losses(chunks[_some(recipe.seed, step, len(chunks), settings.batch)])
        return loss, {"error": error}

    def revive(step: int) -> None:
        # Not in the last fifth: a code moved then would have no time to settle.
        if step % 100 == 99 and step < 0.8 * settings.steps:
            generator.manual_seed(recipe.seed + step)
            model.revive_dead_codes(chunks[_some(recipe.seed, step, len(chunks), settings.batch)], generator)

    def validate(module: nn.Module) -> Metrics:
        metrics = rvq.measure(model, held_out)
        over_all = rvq.measure(model, chunks[_some(recipe.seed, 0, len(chunks), 65536)])
        return {
            "error": metrics.error,
            "baseline": metrics.baseline,
            **{f"used_{g}": used for g, used in enumerate(over_all.used)},
            **{f"dead_{g}": dead for g, dead in enumerate(over_all.dead)},
        }

    return Stage(
        name="tokenizer",
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), weight_decay=1e-4, fused=True),
        update=update,
        validate=validate,
        steps=settings.steps,
        learning_rate=cosine(settings.learning_rate, 100, settings.steps),
        seed=recipe.seed,
        after_update=revive,
    )


def decoder_table(tokenizer: ResidualVQ) -> Tensor:
    """The decoder over all code tuples, ``[K ** G, n, A]``: what the device needs of it."""
    codes = range(tokenizer.recipe.codes)
    tuples = torch.tensor(list(itertools.product(codes, repeat=tokenizer.recipe.codebooks)))
    with torch.no_grad():
        return tokenizer.decode(tuples)


def shapes_of(dataset: Dataset, recipe: Recipe, observation: ObservationSpec) -> Shapes:
    """The sizes of a policy that sees this."""
    return Shapes(
        observation=observation,
        codebooks=recipe.tokenizer.codebooks,
        codes=recipe.tokenizer.codes,
        chunk=recipe.chunk,
        actions=dataset.train.chunks.shape[-1],
        goal_mode=recipe.goal,
        words=dataset.words if observation.instruction else None,
    )


def specs_of(recipe: Recipe, episodes: Episodes) -> dict[str, ObservationSpec]:
    """What each policy of a recipe sees, by the policy's name.

    Raises:
        ConfigError: if one sees what is not there, or has nothing that a goal could be concatenated to.
    """
    specs = {}
    for name, policy in recipe.policies.items():
        spec = observation_of(policy, recipe, episodes, f"policy {name!r}")
        numbers = [] if spec.vectors is None else list(spec.vectors.fields.values())
        if recipe.goal == "concatenate" and numbers and not any(field.history for field in numbers):
            raise ConfigError(
                f'policy {name!r} sees no numbers with a history that goal = "concatenate" could add to; choose '
                'goal = "token"'
            )
        if policy.encoder.tokens == "patches" and spec.images:
            in_window = [field.history for field in spec.fields.values() if field.history and not field.is_image]
            if not in_window or any(spec[camera].history != 1 for camera in spec.images):
                raise ConfigError(
                    f"policy {name!r} reads patches before its window, which only its newest observation may know: let "
                    "it see numbers beside the camera, and give every camera a history of 1"
                )
        specs[name] = spec
    return specs


def policy_stage(
    name: str,
    settings: PolicyRecipe,
    dataset: Dataset,
    recipe: Recipe,
    tokenizer: ResidualVQ,
    observation: ObservationSpec,
) -> Stage:
    """One VQ-BeT policy on the frozen tokenizer."""
    torch.manual_seed(int(stream(recipe.seed, Role.DATA, episode=2).integers(2**62)))
    model = VQBeT(shapes_of(dataset, recipe, observation), settings, dataset.statistics)
    decoded = decoder_table(tokenizer)
    codes = {id(windows): tokenizer.encode(windows.chunks) for windows in (dataset.train, dataset.held_out)}

    def loss_on(windows: Windows, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        device = device_of(model)
        wanted = (codes[id(windows)][batch.step], windows.chunks[batch.step], batch.weight, decoded)
        targets = Targets(*(values.to(device) for values in wanted))
        with autocast(settings, device):
            prediction = model({name: values.to(device) for name, values in batch.observation.items()})
        return policy_loss(model, prediction, targets)

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        return loss_on(dataset.train, dataset.train.draw(observation, recipe.seed, step, settings.batch))

    def validate(module: nn.Module) -> Metrics:
        torch.manual_seed(recipe.seed)
        _, parts = loss_on(dataset.held_out, dataset.held_out.draw(observation, recipe.seed, 0, 2048))
        return {part: float(value) for part, value in parts.items()}

    return Stage(
        name=name,
        module=model,
        optimizer=adamw(model, settings.weight_decay),
        update=update,
        validate=validate,
        steps=settings.steps,
        learning_rate=cosine(settings.learning_rate, settings.warmup, settings.steps),
        seed=recipe.seed,
        average=settings.average,
        snapshot_at=round(settings.snapshot * settings.steps),
    )


def _some(seed: int, step: int, total: int, size: int) -> Tensor:
    """Indices of a batch of chunks: a function of (seed, step) alone."""
    drawn = stream(seed, Role.DATA, episode=3, step=step).integers(total, size=min(size, total))
    return torch.from_numpy(drawn)
