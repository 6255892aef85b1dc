"""Training state on disk: safetensors, written so that neither a kill nor a full disk can damage the last good one."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specact.errors import ConfigError


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes beside the old file, flushes to disk, then replaces it in one move.

    Raises:
        ConfigError: if the file cannot be written; the previous one is left as it was.
    """
    temporary = path.with_suffix(".partial")
    payload = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write the checkpoint {path}: {error.strerror}; the previous one is untouched. "
            "Free some space or choose another --out, then run the same command again to resume"
        ) from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a checkpoint.

    Raises:
        ConfigError: if the file is not a whole safetensors file.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            names = file.keys()  # safe_open has keys but cannot be iterated over
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({error}); delete it to train this stage anew") from error


def adam_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's moments, flat."""
    state = optimizer.state_dict()["state"]
    return {f"adam.{index}.{key}": value for index, entry in state.items() for key, value in entry.items()}


def restore_adam(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Puts back what :func:`adam_state` took."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("adam."):
            _, index, key = name.split(".")
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
