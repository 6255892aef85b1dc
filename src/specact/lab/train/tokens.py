"""The networks of a token policy: the encoder of chunk policies, and a decoder-only transformer on its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from specact.bundle.manifest import Words
from specact.families.chunks.policy import ChunkSpec
from specact.families.tokens.policy import BINS
from specact.lab.train.attention import HIDDEN, Layer
from specact.lab.train.export import Graph, some_observations
from specact.lab.train.flow import Encoder
from specact.lab.train.recipe import ChunkRecipe
from specact.lab.train.windows import Statistics


class Decoder(nn.Module):
    """Embedded tokens to the logits of the next tokens, see :class:`~specact.families.tokens.policy.Reading`.

    Args:
        recipe: its sizes.
        length: S, tokens of an observation and of a chunk together.
    """

    def __init__(self, recipe: ChunkRecipe, length: int) -> None:
        super().__init__()
        self.heads = recipe.heads
        self.positions = nn.Parameter(torch.randn(length, recipe.width) * 0.02)
        self.dropout = nn.Dropout(recipe.dropout)
        layer = recipe.width, recipe.heads, recipe.dropout
        self.layers = nn.ModuleList(Layer(*layer) for _ in range(recipe.layers))
        self.norm, self.write = nn.LayerNorm(recipe.width), nn.Linear(recipe.width, BINS)

    def features(
        self, embeddings: Tensor, positions: Tensor, visible: Tensor, cache: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs of the output layer ``[B, N, W]``, and cache entries ``[B, L, 2, heads, N, W / heads]``.

        Args:
            embeddings: ``[B, N, W]``.
            positions: 0 to S - 1, ``[B, N]``.
            visible: whether the token of a row attends to that of a column: ``[B, N, N]``, and with a cache
                ``[B, N, S + N]``, its positions first.
            cache: ``[B, L, 2, heads, S, W / heads]``, or None.
        """
        x = self.dropout(embeddings + nn.functional.embedding(positions, self.positions))
        hidden = (HIDDEN * (~visible).to(x.dtype))[:, None]
        entries = []
        for number, layer in enumerate(self.layers):
            x, made = layer(x, hidden, None if cache is None else cache[:, number])
            entries.append(torch.stack(made, 1))
        return self.norm(x), torch.stack(entries, 1)

    def forward(
        self, embeddings: Tensor, positions: Tensor, seen: Tensor, among: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, features and cache entries; the outputs of the exported graph.

        Args:
            embeddings, positions, cache: as for :meth:`features`.
            seen: mask of the used positions of the cache, ``[B, S]``.
            among: attention mask of the new tokens, ``[B, N, N]``.
        """
        # One row per new token without reading their number, so that the exported graph has no shape operators.
        everywhere = seen[:, None] & (among[..., :1] | ~among[..., :1])
        features, entries = self.features(embeddings, positions, torch.cat([everywhere, among], -1), cache)
        return self.write(features), features, entries


class TokenModel(nn.Module):
    """The whole policy, as it is trained."""

    visible: Tensor

    def __init__(
        self, spec: ChunkSpec, recipe: ChunkRecipe, statistics: Statistics, words: Words | None = None
    ) -> None:
        super().__init__()
        self.spec, self.words, self.length = spec, words, spec.chunk * spec.actions
        self.encoder = Encoder(spec.observation, recipe, statistics, words, placed=False)
        self.embedding = nn.Embedding(BINS, recipe.width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.decoder = Decoder(recipe, self.encoder.tokens + self.length)
        # The last token is no input, because nothing follows it.
        total, prefix = self.encoder.tokens + self.length - 1, self.encoder.tokens
        place = torch.arange(total)
        visible = (place[None] <= place[:, None]) | (place < prefix)[None]
        self.register_buffer("visible", visible, persistent=False)

    def logits(self, observation: Mapping[str, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, H * A, 256]`` of all tokens of chunks ``[B, H * A]``, each given the previous ones.

        The second output is the cache of the observation's tokens, ``[B, L, 2, heads, N, W / heads]``.
        """
        prefix = self.encoder(observation)
        embeddings = torch.cat([prefix, self.embedding(tokens[:, :-1])], 1)
        positions = torch.arange(embeddings.shape[1], device=tokens.device)[None]
        features, entries = self.decoder.features(embeddings, positions, self.visible[None])
        return self.decoder.write(features[:, -self.length :]), entries[..., : prefix.shape[1], :]


def token_graphs(model: TokenModel) -> dict[str, Graph]:
    """Encoder and decoder as they are exported, by part."""

    def observation(batch: int) -> dict[str, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(batch)
        return {"observation": some_observations(model.encoder, model.spec.observation, generator, batch, model.words)}

    # Axes of the decoder's inputs with a dynamic number of tokens.
    free = {"embeddings": {1: "tokens"}, "positions": {1: "tokens"}, "among": {1: "tokens", 2: "tokens"}}
    outputs = ["logits", "features", "entries"]
    return {
        "encoder": Graph(model.encoder, observation, ["tokens"]),
        "decoder": Graph(model.decoder, partial(_next_tokens, model), outputs, free=free),
    }


def _next_tokens(model: TokenModel, batch: int) -> dict[str, Tensor]:
    """Inputs of a decoder after the observation: some new tokens, one of which is masked for another."""
    decoder, generator = model.decoder, torch.Generator().manual_seed(batch)
    count, width = model.encoder.tokens, decoder.positions.shape[1]
    length, new_tokens = count + model.length, 2 * batch + 1  # more than one, and different from all other sizes
    visible = torch.ones(batch, new_tokens, new_tokens).tril()
    visible[:, -1, 0] = 0.0
    entries = (batch, len(decoder.layers), 2, decoder.heads, length, width // decoder.heads)
    return {
        "embeddings": torch.randn(batch, new_tokens, width, generator=generator),
        "positions": torch.arange(count, count + new_tokens).clamp(max=length - 1).expand(batch, -1),
        "seen": (torch.arange(length) < count).expand(batch, -1),
        "among": visible.bool(),
        "cache": torch.randn(entries, generator=generator),
    }
