"""VQ-BeT: a transformer over a window of observations with a code head and an offset head (Lee et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specact.bundle.manifest import INSTRUCTION, Words
from specact.lab.train.attention import Layer
from specact.lab.train.embedding import embed_words, flat, hold_statistics, plain, standardised, statistics_of
from specact.lab.train.encoder import ImageEmbedding, PatchEmbedding
from specact.lab.train.recipe import PolicyRecipe
from specact.lab.train.windows import Statistics, positions
from specact.observation import ObservationSpec


@dataclass(frozen=True)
class Shapes:
    """Sizes of a policy that are given by its data and its tokenizer.

    Attributes:
        observation: its observations.
        codebooks, codes: G and K.
        chunk, actions: n and A.
        goal_mode: input of observations without a history, see :class:`~specact.lab.train.recipe.Recipe`.
        words: vocabulary, where it follows an instruction.
    """

    observation: ObservationSpec
    codebooks: int
    codes: int
    chunk: int
    actions: int
    goal_mode: Literal["token", "concatenate"]
    words: Words | None = None


@dataclass(frozen=True)
class Prediction:
    """The network's outputs at each of the P predicting positions, see :func:`~specact.lab.train.windows.positions`.

    Attributes:
        logits: ``[B, P, G, K]``; with a sequential secondary only the primary's row, ``[B, P, 1, K]``.
        offsets: ``[B, P, G, K, n, A]``.
        features: ``[B, P, W]``, inputs of the heads.
    """

    logits: Tensor
    offsets: Tensor
    features: Tensor


class VQBeT(nn.Module):
    """The policy network. Training uses all predicting positions; inference only the last one.

    Observations with a history make one token per time step: numbers and camera frames are embedded separately and
    added. Where histories differ in length, the older tokens lack the shorter ones, and are not predicted from. They
    are preceded by separate tokens: words of an instruction, patches of frames, observations without a history.
    """

    mask: Tensor

    def __init__(self, shapes: Shapes, recipe: PolicyRecipe, statistics: Statistics) -> None:
        super().__init__()
        self.shapes, self.recipe = shapes, recipe
        width, fields = recipe.width, shapes.observation.fields
        hold_statistics(self, shapes.observation, statistics)
        still = [name for name, field in fields.items() if not field.history]
        self.joined = [name for name in still if not fields[name].is_image and shapes.goal_mode == "concatenate"]
        self.own_token = [name for name in still if name not in self.joined]
        patches = recipe.encoder.tokens == "patches"
        self.patched = [name for name in fields if fields[name].is_image and patches]
        seen = [name for name in fields if name not in (*still, *self.patched)]
        # Numbers first: the order determines the weights' initialisation.
        self.seen = sorted(seen, key=lambda name: fields[name].is_image)
        for name in (*self.seen, *self.own_token):
            joined = sum(math.prod(fields[goal].shape) for goal in self.joined) if name == self.seen[0] else 0
            embed = (
                ImageEmbedding(recipe.encoder, fields[name].shape, width)
                if fields[name].is_image
                else nn.Linear(math.prod(fields[name].shape) + joined, width)
            )
            self.add_module(f"embed_{plain(name)}", embed)
        ahead = 0
        for name in self.patched:
            embedding = PatchEmbedding(recipe.encoder, fields[name].shape, width)
            self.add_module(f"embed_{plain(name)}", embedding)
            ahead += embedding.patches
        if shapes.words is not None:
            self.embed_instruction = embed_words(shapes.words, width)
            ahead += shapes.words.length
        self.length, self.predicting = shapes.observation.history, positions(shapes.observation)
        tokens = ahead + len(self.own_token) + self.length
        self.positions = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.dropout = nn.Dropout(recipe.dropout)
        self.blocks = nn.ModuleList(Layer(width, recipe.heads, recipe.dropout) for _ in range(recipe.layers))
        causal = torch.full((tokens, tokens), -math.inf).triu(1)
        causal[:ahead, :ahead] = 0.0
        self.register_buffer("mask", causal, persistent=False)
        self.norm = nn.LayerNorm(width)
        independent = 1 if recipe.sequential else shapes.codebooks
        self.code_head = _head(width, recipe.head_width, independent * shapes.codes)
        self.offset_head = _head(
            width, recipe.head_width, shapes.codebooks * shapes.codes * shapes.chunk * shapes.actions
        )
        self.secondary_head = _SecondaryHead(width, recipe.head_width, shapes.codes) if recipe.sequential else None

    def forward(self, observation: Mapping[str, Tensor]) -> Prediction:
        """From arrays ``[B, *window_shape]`` by name to the outputs at all P predicting positions."""
        return self.heads(self.features(observation))

    def features(self, observation: Mapping[str, Tensor]) -> Tensor:
        """The inputs of the heads, ``[B, P, W]``."""
        values = {name: self._prepared(name, observation[name]) for name in self.shapes.observation.fields}
        for goal in self.joined:
            base = values[self.seen[0]]
            values[self.seen[0]] = torch.cat([base, values[goal][:, None].expand(-1, base.shape[1], -1)], -1)
        tokens = self._padded(self._embedded(self.seen[0], values))
        for name in self.seen[1:]:
            tokens = tokens + self._padded(self._embedded(name, values))
        own = [self.embed_instruction(observation[INSTRUCTION])] if self.shapes.words is not None else []
        own += [self._embedded(name, values).flatten(1, -2) for name in self.patched]
        own += [self._embedded(name, values)[:, None] for name in self.own_token]
        if own:
            tokens = torch.cat([*own, tokens], 1)
        x = self.dropout(tokens + self.positions)
        for block in self.blocks:
            x, _ = block(x, self.mask)
        features: Tensor = self.norm(x[:, -self.predicting :])
        return features

    def _prepared(self, name: str, values: Tensor) -> Tensor:
        """Standardised and flattened numbers; camera frames unchanged."""
        field = self.shapes.observation[name]
        if field.is_image:
            return values
        mean, std = statistics_of(self, name)
        values = standardised(values, mean, std) if field.history else (values - mean) / std
        if field.history and self.training and self.recipe.state_noise:
            values = values + self.recipe.state_noise * torch.randn_like(values)
        return flat(values, field)

    def _embedded(self, name: str, values: Mapping[str, Tensor]) -> Tensor:
        """``[B, T, W]``, or ``[B, W]`` without a history."""
        embedded: Tensor = getattr(self, f"embed_{plain(name)}")(values[name])
        return embedded

    def _padded(self, tokens: Tensor) -> Tensor:
        """Tokens, left-padded with zeros to ``[B, T, W]``."""
        missing = self.length - tokens.shape[1]
        return nn.functional.pad(tokens, (0, 0, missing, 0)) if missing else tokens

    def freeze(self, camera: str, encoder: nn.Module) -> None:
        """Loads a camera's pre-trained encoder, and freezes it."""
        embedding: ImageEmbedding = getattr(self, f"embed_{plain(camera)}")
        embedding.encoder.load_state_dict(encoder.state_dict())
        embedding.encoder.requires_grad_(False)

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
