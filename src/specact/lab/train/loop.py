"""One resumable training stage: steps, a JSONL log, checkpoints; resuming equals never having stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specact.files import write_whole
from specact.lab.train import checkpoint
from specact.rng import Role, stream

Metrics = dict[str, float]


@dataclass(frozen=True)
class Stage:
    """What is trained, and how one step goes.

    Attributes:
        name: of the stage; its files carry it.
        module: what is trained; its ``state_dict`` is the result.
        optimizer: over the module's parameters.
        update: takes the step's number and returns the loss and its parts; called with gradients cleared.
        validate: metrics of a module on held-out demonstrations.
        steps: fixed number of steps.
        learning_rate: of a step.
        seed: of everything random.
        average: decay of the exponential average of the weights; 0 to keep the raw ones.
        snapshot_at: step after which the raw weights are kept as ``NAME@snapshot``; 0 for never.
        after_update: called with the step's number once the weights have moved, or None.
    """

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    update: Callable[[int], tuple[Tensor, dict[str, Tensor]]]
    validate: Callable[[nn.Module], Metrics]
    steps: int
    learning_rate: Callable[[int], float]
    seed: int
    average: float = 0.0
    snapshot_at: int = 0
    after_update: Callable[[int], None] | None = None


def cosine(peak: float, warmup: int, steps: int, floor: float = 0.02) -> Callable[[int], float]:
    """Linear warm-up to ``peak``, then a cosine down to ``floor * peak``."""

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    return rate


def run(
    stage: Stage,
    folder: Path,
    advance: Callable[[int], None],
    *,
    every: int = 250,
) -> dict[str, Tensor]:
    """Trains a stage to its end, from its checkpoint if there is one, and returns the resulting weights.

    The weights also go to ``folder/NAME.safetensors``; a stage that has that file is not trained again.

    Args:
        stage: what to train.
        folder: of the run; holds checkpoints, results and ``log.jsonl``.
        advance: told the number of steps done so far.
        every: steps between checkpoints, which is also what a kill can cost.
    """
    result, running = folder / f"{stage.name}.safetensors", folder / f"{stage.name}.checkpoint"
    if result.exists():
        weights, _ = checkpoint.read(result)
        advance(stage.steps)
        return weights
    averaged = {name: value.clone() for name, value in stage.module.state_dict().items()}
    first = 0
    if running.exists():
        first = _restore(stage, averaged, running)
    _trim_log(folder / "log.jsonl", stage.name, first)
    started = time.perf_counter()
    for step in range(first, stage.steps):
        torch.manual_seed(int(stream(stage.seed, Role.DATA, episode=1, step=step).integers(2**62)))
        for group in stage.optimizer.param_groups:
            group["lr"] = stage.learning_rate(step)
        stage.module.train()
        stage.optimizer.zero_grad(set_to_none=True)
        loss, parts = stage.update(step)
        loss.backward()
        nn.utils.clip_grad_norm_(stage.module.parameters(), 1.0)
        stage.optimizer.step()
        if stage.after_update is not None:
            stage.after_update(step)
        _follow(averaged, stage.module, min(stage.average, (1 + step) / (10 + step)))
        done = step + 1
        advance(done)
        if done == stage.snapshot_at:
            checkpoint.write(folder / f"{stage.name}@snapshot.safetensors", dict(stage.module.state_dict()), {})
        if done % every == 0 or done == stage.steps:
            metrics = {"loss": float(loss.detach()), **{name: float(value) for name, value in parts.items()}}
            with _weights(stage.module, averaged):
                validation = stage.validate(stage.module)
            _log(folder / "log.jsonl", stage.name, done, metrics, validation, time.perf_counter() - started)
            _save(stage, averaged, running, done)
    checkpoint.write(result, averaged, {})
    running.unlink(missing_ok=True)
    return averaged


def _follow(averaged: dict[str, Tensor], module: nn.Module, decay: float) -> None:
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            averaged[name].lerp_(value, 1 - decay)
        else:
            averaged[name].copy_(value)


@contextmanager
def _weights(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """For a while, the module with other weights, in evaluation mode and without gradients."""
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(weights)
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.load_state_dict(kept)


def _save(stage: Stage, averaged: dict[str, Tensor], path: Path, done: int) -> None:
    tensors = {f"module.{name}": value for name, value in stage.module.state_dict().items()}
    tensors |= {f"average.{name}": value for name, value in averaged.items()}
    tensors |= checkpoint.adam_state(stage.optimizer)
    checkpoint.write(path, tensors, {"step": str(done)})


def _restore(stage: Stage, averaged: dict[str, Tensor], path: Path) -> int:
    tensors, metadata = checkpoint.read(path)

    def part(prefix: str) -> dict[str, Tensor]:
        return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}

    stage.module.load_state_dict(part("module."))
    averaged.update(part("average."))
    checkpoint.restore_adam(stage.optimizer, tensors)
    return int(metadata["step"])


def _log(path: Path, stage: str, step: int, train: Metrics, held_out: Metrics, seconds: float) -> None:
    line = {"stage": stage, "step": step, "seconds": round(seconds, 1), "train": train, "held_out": held_out}
    _write_log(path, [*read_log(path), line])


def _trim_log(path: Path, stage: str, step: int) -> None:
    """Forgets lines a killed run wrote after its last checkpoint, so that the log tells one story."""
    kept = [line for line in read_log(path) if not (line["stage"] == stage and line["step"] > step)]
    _write_log(path, kept)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a training log; one that was torn is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def _write_log(path: Path, lines: list[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
