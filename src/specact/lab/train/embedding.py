"""How networks take observations: standardised numbers, and embedded words."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specact.bundle.manifest import Words
from specact.lab.train.windows import Statistics
from specact.observation import Field, ObservationSpec


def standardised(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Standardised values, clipped to 6 standard deviations against outliers."""
    return ((values - mean) / std).clamp(-6.0, 6.0)


def plain(name: str) -> str:
    """An observation's name as part of a parameter's name, which must not contain dots."""
    return name.replace(".", "_")


def hold_statistics(module: nn.Module, spec: ObservationSpec, statistics: Statistics) -> None:
    """Registers the statistics of all observations but camera frames as buffers ``NAME_mean`` and ``NAME_std``."""
    for name in () if spec.vectors is None else spec.vectors.fields:
        for moment, values in zip(("mean", "std"), statistics[name], strict=True):
            module.register_buffer(f"{plain(name)}_{moment}", values.clone())


def statistics_of(module: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of an observation, see :func:`hold_statistics`."""
    return getattr(module, f"{plain(name)}_mean"), getattr(module, f"{plain(name)}_std")


def embed_words(words: Words, width: int) -> nn.Embedding:
    """Embedding of an instruction's words, ``[..., L]`` to ``[..., L, W]``; unknown words and padding start at zero."""
    embedding = nn.Embedding(words.size, width)
    nn.init.normal_(embedding.weight, std=0.1)
    with torch.no_grad():
        embedding.weight[: words.size - len(words.vocabulary)] = 0.0
    return embedding


def flat(values: Tensor, field: Field) -> Tensor:
    """Flattens each observation."""
    return values.flatten(-len(field.shape)) if len(field.shape) > 1 else values
