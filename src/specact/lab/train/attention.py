"""Building blocks of networks: embedded observations, and attention.

Attention is written out: for a few tokens, and in bfloat16 on a CPU, it is faster than the fused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from specact.bundle.manifest import Words
from specact.observation import Field

# Mean and standard deviation of the training observations without camera frames, by name, each of the shape of one
# observation; the exported graph contains the normalisation.
Statistics = Mapping[str, tuple[Tensor, Tensor]]
# Added to masked attention scores: their weight is exactly 0 then.
HIDDEN = -1e4


class Layer(nn.Module):
    """Pre-norm transformer layer: self-attention, also to cached keys and values, and an MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = perceptron(width, 4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, cache: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Tokens ``[B, N, W]``, and their keys and values, each ``[B, heads, N, W / heads]``.

        ``mask`` is added to the scores ``[B, heads, N, N]``, and broadcast to them. With a ``cache [B, 2, heads, S, W /
        heads]`` of keys and values of S earlier tokens they are ``[B, heads, N, S + N]``.
        """
        queries, *pair = by_head(self.qkv(self.norm_attention(x)), 3, self.heads)
        keys, values = pair if cache is None else (torch.cat([cache[:, n], new], -2) for n, new in enumerate(pair))
        x = x + self.dropout(self.project(attend(queries, keys, values, mask)))
        return x + self.dropout(self.mlp(self.norm_mlp(x))), pair


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention, heads joined: ``[B, heads, N, D]``, ``[B, heads, S, D]`` twice to ``[B, N, heads D]``."""
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
    return joined((scores if mask is None else scores + mask).softmax(-1) @ values)


def by_head(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """``[B, N, parts W]`` to so many ``[B, heads, N, W / heads]``."""
    if torch.compiler.is_exporting():
        return _reshaped(x, parts * heads, x.shape[-1] // (parts * heads)).transpose(1, 2).chunk(parts, 1)
    apart: tuple[Tensor, ...] = x.unflatten(-1, (parts, heads, -1)).permute(0, 2, 3, 1, 4).unbind(1)
    return apart


def joined(x: Tensor) -> Tensor:
    """``[B, heads, N, W / heads]`` to ``[B, N, W]``."""
    x = x.transpose(1, 2)
    return _reshaped(x, x.shape[2] * x.shape[3]) if torch.compiler.is_exporting() else x.flatten(2)


def perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """An MLP with one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


def _reshaped(x: Tensor, *sizes: int) -> Tensor:
    """``[B, N, ...]`` to ``[B, N, *sizes]`` in an export.

    Where B and N are free, PyTorch's own reshape computes them when the graph runs. In ONNX a 0 keeps an axis.
    """
    shape = x.shape[0], x.shape[1], *sizes
    return torch.onnx.ops.symbolic("Reshape", (x, torch.tensor([0, 0, *sizes])), dtype=x.dtype, shape=shape)


def module_name(name: str) -> str:
    """An observation's name as part of a parameter's name, which must not contain dots."""
    return name.replace(".", "_")


class Observing(nn.Module):
    """Base of networks that observe these ``fields``.

    Statistics of all but camera frames are buffers ``NAME_mean`` and ``NAME_std``.
    """

    def __init__(self, fields: Mapping[str, Field], statistics: Statistics, state_noise: float = 0.0) -> None:
        super().__init__()
        self.fields, self.state_noise = dict(fields), state_noise
        for name in (name for name, field in fields.items() if not field.is_image):
            for moment, values in zip(("mean", "std"), statistics[name], strict=True):
                self.register_buffer(f"{module_name(name)}_{moment}", values.clone())

    def numbers(self, name: str, values: Tensor) -> Tensor:
        """An observation, standardised, clipped to 6 standard deviations against outliers, and flat at every step.

        Where it has a history there is noise in training.
        """
        field, (mean, std) = self.fields[name], statistics_of(self, name)
        values = ((values - mean) / std).clamp(-6.0, 6.0)
        if field.history and self.training and self.state_noise:
            values = values + self.state_noise * torch.randn_like(values)
        return values.flatten(-len(field.shape)) if len(field.shape) > 1 else values


def statistics_of(module: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of an observation, see :class:`Observing`."""
    return getattr(module, f"{module_name(name)}_mean"), getattr(module, f"{module_name(name)}_std")


def embed_words(words: Words, width: int) -> nn.Embedding:
    """Embedding of an instruction's words, ``[..., L]`` to ``[..., L, W]``; unknown words and padding start at zero."""
    embedding = nn.Embedding(words.size, width)
    nn.init.normal_(embedding.weight, std=0.1)
    with torch.no_grad():
        embedding.weight[: words.size - len(words.vocabulary)] = 0.0
    return embedding


def unknown(fields: Mapping[str, Field]) -> Statistics:
    """Statistics for a network whose own are loaded afterwards."""
    return {name: (torch.zeros(field.shape), torch.ones(field.shape)) for name, field in fields.items()}
