"""The training loop of one stage, with a JSONL log and checkpoints; a resumed run gives the same weights."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from specact.errors import ConfigError
from specact.files import write_whole
from specact.lab.train.recipe import ChunkRecipe, Optimisation
from specact.rng import Role, stream

Progress = Callable[[str, int, int], None]
Metrics = Mapping[str, float | Tensor]
Weights = dict[str, Tensor]
Accelerator = Literal["cpu", "cuda"]
Losses = tuple[Tensor, dict[str, Tensor]]  # the loss, and its parts
Update = Callable[[int], Losses]
Validate = Callable[[nn.Module], Metrics]

# Narrower networks are slower in bfloat16 than in float32, because the casts dominate.
_BFLOAT16_FROM = 32
# Instruction sets whose bfloat16 products are fast; with AVX2 they take more than ten times as long as in float32.
_BFLOAT16_ON = ("AVX512", "AMX", "SVE")


class Draw(IntEnum):
    """Purposes of random streams of :attr:`Role.DATA <specact.rng.Role>`, used as the episode of their address.

    The numbers are part of every result; those that appear twice belong to different kinds of training.
    """

    BATCH = 0
    STEP = 1
    WEIGHTS = 2
    CHUNKS = 3
    SCENES = 4
    ENCODER = 5
    FRAMES = 6
    TEACHER = 9
    # Of heads.
    SCORED_CODES = 3
    CODES = 4
    # Of FLASH's block.
    WINDOWS = 5
    NOISE = 6


@dataclass(frozen=True)
class Stage:
    """A module, and its training by AdamW with these ``settings``.

    ``module`` is trained; its ``state_dict``, averaged with the settings' decay, is the result. ``update`` takes the
    step's number, and returns the loss and its parts with gradients cleared; ``after_update`` is called after the
    optimizer's step. ``validate`` are metrics of a module on held-out demonstrations. After the steps ``averages_at``
    the averaged weights are saved as ``NAME@STEP``, after ``snapshot_at`` (0 for never) the raw ones as
    ``NAME@snapshot``. A ``small`` network is always trained on the CPU, by PyTorch's usual AdamW.
    """

    name: str
    module: nn.Module
    settings: Optimisation | ChunkRecipe
    update: Update
    validate: Validate
    seed: int
    snapshot_at: int = 0
    averages_at: tuple[int, ...] = ()
    after_update: Callable[[int], None] | None = None
    small: bool = False


def cosine(peak: float, warmup: int, steps: int, floor: float = 0.02) -> Callable[[int], float]:
    """The learning rate at a step: a linear warm-up to ``peak``, then a cosine down to ``floor * peak``."""

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    return rate


def accelerator(name: Accelerator) -> torch.device:
    """The device that networks are trained on; refused if this PyTorch or this machine has none of that name."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--accelerator cuda needs a CUDA device and a PyTorch that was built for it; PyTorch {torch.__version__} "
            "finds none here. Leave it out to train on the CPU; a run may go on with either"
        )
    return torch.device(name)


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's parameters."""
    return next(module.parameters()).device


def autocast(width: int, bfloat16: bool, device: torch.device) -> AbstractContextManager[object]:
    """The autocast context of a network; see :class:`~specact.lab.train.recipe.PolicyRecipe`."""
    fast = device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith(_BFLOAT16_ON)
    if fast and bfloat16 and width >= _BFLOAT16_FROM:
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def seed_weights(seed: int, what: Draw = Draw.WEIGHTS) -> None:
    """Seeds PyTorch's generator for a network's initial weights."""
    torch.manual_seed(int(stream(seed, Role.DATA, episode=what).integers(2**62)))


def run(
    stage: Stage, folder: Path, advance: Callable[[int], None], *, every: int = 250, on: Accelerator = "cpu"
) -> Weights:
    """Trains a stage to its end, resuming from its checkpoint if there is one, and returns the resulting weights.

    They are also written to ``folder/NAME.safetensors``; a stage with that file is not trained again. Results and
    checkpoints, after ``every`` so many steps, are stored for the CPU. ``advance`` is called with the number of steps
    done so far.
    """
    result, running = folder / f"{stage.name}.safetensors", folder / f"{stage.name}.checkpoint"
    log = folder / "log.jsonl"
    if result.exists():
        advance(stage.settings.steps)
        return read_tensors(result)[0]
    device = accelerator("cpu" if stage.small else on)
    stage.module.to(device)
    averaged = {name: value.clone() for name, value in stage.module.state_dict().items()}
    settings, parameters = stage.settings, list(stage.module.parameters())
    # Vectors such as biases and norms do not decay, but in small networks.
    decay = {"weight_decay": settings.weight_decay}
    groups = [decay | {"params": [p for p in parameters if stage.small or p.dim() >= 2]}]
    if not stage.small:
        groups.append({"weight_decay": 0.0, "params": [p for p in parameters if p.dim() < 2]})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999 if stage.small else 0.99), fused=True)
    rate = cosine(settings.learning_rate, settings.warmup, settings.steps)
    first = _restore(stage.module, optimizer, averaged, running) if running.exists() else 0
    folder.mkdir(parents=True, exist_ok=True)
    if log.exists() and not log.read_bytes().endswith(b"\n"):
        _append(log, "\n")  # after a line that a kill has torn
    weights = stage.module.state_dict()  # shares the module's memory, so it stays current
    started = time.perf_counter()
    for step in range(first, settings.steps):
        _seed(device, int(stream(stage.seed, Role.DATA, episode=Draw.STEP, step=step).integers(2**62)))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        stage.module.train()
        optimizer.zero_grad(set_to_none=True)
        loss, parts = stage.update(step)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        if stage.after_update is not None:
            stage.after_update(step)
        update_average = get_ema_multi_avg_fn(min(settings.average, (1 + step) / (10 + step)))
        update_average(list(averaged.values()), [weights[name] for name in averaged], step)
        done = step + 1
        advance(done)
        if done == stage.snapshot_at:
            write_tensors(folder / f"{stage.name}@snapshot.safetensors", weights)
        if done in stage.averages_at:
            write_tensors(folder / f"{stage.name}@{done}.safetensors", averaged)
        if done % every == 0 or done == settings.steps:
            metrics = {"loss": float(loss.detach()), **{name: float(value.detach()) for name, value in parts.items()}}
            with _loaded(stage.module, averaged):
                held_out = {name: float(value) for name, value in stage.validate(stage.module).items()}
            seconds = round(time.perf_counter() - started, 1)
            line = {"stage": stage.name, "step": done, "seconds": seconds, "train": metrics, "held_out": held_out}
            _append(log, json.dumps(line) + "\n")
            _save(stage.module, optimizer, averaged, running, done)
    stage.module.cpu()
    write_tensors(result, averaged)
    running.unlink(missing_ok=True)
    return {name: value.cpu() for name, value in averaged.items()}


def _seed(device: torch.device, seed: int) -> None:
    """Seeds the generators that a step draws from.

    ``torch.manual_seed`` also seeds those of all other kinds of devices, which takes a tenth of a small network's step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def _loaded(module: nn.Module, weights: Weights) -> Iterator[None]:
    """Temporarily loads other weights, in evaluation mode and without gradients."""
    original = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(weights)
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.load_state_dict(original)


def write_tensors(path: Path, tensors: Weights, metadata: dict[str, str] | None = None) -> None:
    """Writes tensors and metadata as safetensors, atomically."""
    write_whole(path, save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata or {}))


def read_tensors(path: Path) -> tuple[Weights, dict[str, str]]:
    """Tensors and metadata of a file; a damaged one is refused."""
    try:
        with safe_open(str(path), framework="pt") as file:
            names = file.keys()  # safe_open has keys but cannot be iterated over
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({error}); delete it to train this stage again") from error


def _save(module: nn.Module, optimizer: torch.optim.Optimizer, averaged: Weights, path: Path, done: int) -> None:
    moments = optimizer.state_dict()["state"]
    tensors = {f"module.{name}": value for name, value in module.state_dict().items()}
    tensors |= {f"average.{name}": value for name, value in averaged.items()}
    tensors |= {f"adam.{index}.{key}": value for index, entry in moments.items() for key, value in entry.items()}
    write_tensors(path, tensors, {"step": str(done)})


def _restore(module: nn.Module, optimizer: torch.optim.Optimizer, averaged: Weights, path: Path) -> int:
    tensors, metadata = read_tensors(path)

    def part(prefix: str) -> Weights:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    module.load_state_dict(part("module."))
    for name, value in part("average.").items():
        averaged[name].copy_(value)
    moments: dict[int, Weights] = {}
    for name, value in part("adam.").items():
        index, key = name.split(".")
        moments.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return int(metadata["step"])


def _append(path: Path, text: str) -> None:
    """Appends in one write, because other stages may write concurrently."""
    try:
        with path.open("a") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; free some space, then run the same command again"
        ) from error


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log: the last one of each step, without incomplete ones."""
    lines, path = {}, folder / "log.jsonl"
    for text in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            line = json.loads(text)
            lines[line["stage"], line["step"]] = line
    return list(lines.values())


def sort_log(folder: Path, stages: Sequence[str]) -> None:
    """Sorts the lines of these stages by their order, after those of others, and drops what :func:`read_log` drops."""
    order = {name: number for number, name in enumerate(stages)}
    lines = sorted(read_log(folder), key=lambda line: (order.get(line["stage"], -1), line["step"]))
    write_whole(folder / "log.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())


def last_lines(folder: Path) -> dict[str, Any]:
    """The last log line of every stage: its step and metrics."""
    return {line["stage"]: {key: line[key] for key in ("step", "train", "held_out")} for line in read_log(folder)}
