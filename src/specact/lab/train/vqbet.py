"""VQ-BeT: a transformer over a window of observations with a code head and an offset head (Lee et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specact.lab.train.recipe import PolicyRecipe


@dataclass(frozen=True)
class Shapes:
    """Sizes a policy must agree on with its data and its tokenizer.

    Attributes:
        window: T, observations it looks at.
        state, goal: O and D; D is 0 for policies without a goal.
        image: (H, W) of the camera frames, or None.
        codebooks, codes: G and K.
        chunk, actions: n and A.
        goal_mode: how the goal enters, see :class:`~specact.lab.train.recipe.Recipe`.
    """

    window: int
    state: int
    goal: int
    image: tuple[int, int] | None
    codebooks: int
    codes: int
    chunk: int
    actions: int
    goal_mode: Literal["token", "concatenate"]


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of the training observations; normalisation travels inside the exported graph."""

    state_mean: Tensor
    state_std: Tensor
    goal_mean: Tensor
    goal_std: Tensor


def standardised(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """In standard deviations, limited to 6 so that one wild sensor cannot saturate the network."""
    return ((values - mean) / std).clamp(-6.0, 6.0)


@dataclass(frozen=True)
class Prediction:
    """What the network says at each of its positions ``P``.

    Attributes:
        logits: ``[B, P, G, K]``; with a sequential secondary only the primary's row, ``[B, P, 1, K]``.
        offsets: ``[B, P, G, K, n, A]``.
        features: ``[B, P, W]``, what the heads read.
    """

    logits: Tensor
    offsets: Tensor
    features: Tensor


class Block(nn.Module):
    """Pre-norm transformer block with causal attention, written out: the fused kernel is slower at a few tokens."""

    mask: Tensor

    def __init__(self, recipe: PolicyRecipe, tokens: int) -> None:
        super().__init__()
        width = recipe.width
        self.heads = recipe.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(recipe.dropout)
        causal = torch.full((tokens, tokens), -math.inf).triu(1)
        self.register_buffer("mask", causal, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + self.mask).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.dropout(self.project(mixed))
        added: Tensor = self.dropout(self.mlp(self.norm_mlp(x)))
        return x + added


class _GroupNorm(nn.GroupNorm):
    """PyTorch's, written out: its own export computes shapes when it runs, which bundles may not do."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(-1, self.num_groups, x.shape[1:].numel() // self.num_groups)
        centred = groups - groups.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        normal = (centred / torch.sqrt(variance + self.eps)).reshape(-1, *x.shape[1:])
        scaled: Tensor = normal * self.weight[:, None, None] + self.bias[:, None, None]
        return scaled


class ImageEncoder(nn.Module):
    """A small convolutional encoder: uint8 frames ``[..., H, W, 3]`` to embeddings ``[..., width]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for out in (16, 32, 64, 64):
            layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1), _GroupNorm(8, out), nn.ReLU()]
            channels = out
        self.layers = nn.Sequential(*layers)
        self.project = nn.Linear(channels, width)

    def forward(self, image: Tensor) -> Tensor:
        # Only the batch is free: everything else is a constant of the exported graph.
        frames = image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2).float() / 255.0 - 0.5
        embedded: Tensor = self.project(self.layers(frames).mean((-2, -1)))
        return embedded.reshape(-1, *image.shape[1:-3], embedded.shape[-1])


class VQBeT(nn.Module):
    """The policy network. Training reads all window positions; inference only the last one."""

    state_mean: Tensor
    state_std: Tensor
    goal_mean: Tensor
    goal_std: Tensor

    def __init__(self, shapes: Shapes, recipe: PolicyRecipe, statistics: Statistics) -> None:
        super().__init__()
        self.shapes, self.recipe = shapes, recipe
        width = recipe.width
        concatenated = shapes.goal if shapes.goal_mode == "concatenate" else 0
        self.goal_token = bool(shapes.goal) and not concatenated
        for name in ("state_mean", "state_std", "goal_mean", "goal_std"):
            self.register_buffer(name, getattr(statistics, name).clone())
        self.embed_state = nn.Linear(shapes.state + concatenated, width)
        self.embed_image = ImageEncoder(width) if shapes.image else None
        self.embed_goal = nn.Linear(shapes.goal, width) if self.goal_token else None
        tokens = shapes.window + self.goal_token
        self.positions = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.dropout = nn.Dropout(recipe.dropout)
        self.blocks = nn.ModuleList(Block(recipe, tokens) for _ in range(recipe.layers))
        self.norm = nn.LayerNorm(width)
        independent = 1 if recipe.sequential else shapes.codebooks
        self.code_head = _head(width, recipe.head_width, independent * shapes.codes)
        self.offset_head = _head(
            width, recipe.head_width, shapes.codebooks * shapes.codes * shapes.chunk * shapes.actions
        )
        self.secondary_head = _SecondaryHead(width, recipe.head_width, shapes.codes) if recipe.sequential else None

    def forward(self, state: Tensor, goal: Tensor | None = None, image: Tensor | None = None) -> Prediction:
        """From ``state [B, T, O]``, ``goal [B, D]``, ``image [B, T, H, W, 3]`` to a prediction at all T positions."""
        return self.heads(self.features(state, goal, image))

    def features(self, state: Tensor, goal: Tensor | None, image: Tensor | None) -> Tensor:
        """What the heads read, ``[B, T, W]``."""
        state = standardised(state, self.state_mean, self.state_std)
        if self.training and self.recipe.state_noise:
            state = state + self.recipe.state_noise * torch.randn_like(state)
        if goal is not None:
            goal = (goal - self.goal_mean) / self.goal_std
            if not self.goal_token:
                state = torch.cat([state, goal[:, None].expand(-1, state.shape[1], -1)], -1)
        tokens = self.embed_state(state)
        if self.embed_image is not None:
            tokens = tokens + self.embed_image(image)
        if self.embed_goal is not None:
            tokens = torch.cat([self.embed_goal(goal)[:, None], tokens], 1)
        x = self.dropout(tokens + self.positions)
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.norm(x[:, -self.shapes.window :])
        return features

    def heads(self, features: Tensor) -> Prediction:
        """Codes and offsets from features ``[B, P, W]``."""
        shapes = self.shapes
        logits = self.code_head(features).unflatten(-1, (-1, shapes.codes))
        offsets = self.offset_head(features).unflatten(
            -1, (shapes.codebooks, shapes.codes, shapes.chunk, shapes.actions)
        )
        return Prediction(logits, offsets, features)


class _SecondaryHead(nn.Module):
    """Logits of the secondary code given the primary: ``features [..., W]``, ``primary [...]`` to ``[..., K]``."""

    def __init__(self, width: int, head_width: int, codes: int) -> None:
        super().__init__()
        self.codes = codes
        self.read = nn.Linear(width, head_width or width)
        self.primary = nn.Embedding(codes, head_width or width)
        self.write = nn.Linear(head_width or width, codes)

    def forward(self, features: Tensor, primary: Tensor) -> Tensor:
        logits: Tensor = self.write(torch.relu(self.read(features) + self.primary(primary)))
        return logits

    def conditional(self, features: Tensor) -> Tensor:
        """Logits ``[..., K, K]``, row i given primary code i."""
        logits: Tensor = self.write(torch.relu(self.read(features)[..., None, :] + self.primary.weight))
        return logits


def _head(width: int, head_width: int, outputs: int) -> nn.Module:
    if not head_width:
        return nn.Linear(width, outputs)
    return nn.Sequential(nn.Linear(width, head_width), nn.GELU(), nn.Linear(head_width, outputs))
