"""Checkpoints as safetensors, written atomically."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specact.errors import ConfigError
from specact.files import write_whole


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes tensors and metadata atomically.

    Raises:
        ConfigError: if the file cannot be written; the previous one is kept.
    """
    write_whole(path, save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a checkpoint.

    Raises:
        ConfigError: if the file is damaged.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            names = file.keys()  # safe_open has keys but cannot be iterated over
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({error}); delete it to train this stage again") from error


def adam_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's moments, flat."""
    state = optimizer.state_dict()["state"]
    return {f"adam.{index}.{key}": value for index, entry in state.items() for key, value in entry.items()}


def restore_adam(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restores the state of :func:`adam_state`."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("adam."):
            _, index, key = name.split(".")
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
