"""The networks of chunk policies: of a flow and by regression encoder, prefix and action expert, of tokens a decoder.

Those of a flow are separate because they run at different times: encoder and prefix once per inference, the expert once
per Euler step, and, in speculative inference, on many noisy chunks over one cached prefix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from specact.bundle.manifest import INSTRUCTION, Words
from specact.families.chunks.flow import FlowUnits
from specact.families.chunks.policy import ChunkSpec
from specact.families.tokens.policy import BINS
from specact.lab.train.attention import (
    HIDDEN,
    Layer,
    Observing,
    Statistics,
    attend,
    by_head,
    embed_words,
    joined,
    module_name,
    perceptron,
)
from specact.lab.train.encoder import PatchEmbedding, embedding
from specact.lab.train.export import Graph, Input, below, mostly, observed
from specact.lab.train.recipe import ChunkRecipe
from specact.observation import ObservationSpec

# Periods of the embedding of time, in units of the flow's time, which runs from 0 to 1.
_SHORTEST_PERIOD, _LONGEST_PERIOD = 4e-3, 4.0


class Encoder(Observing):
    """Observations to tokens ``[B, N, W]``: of words, observations without a history, those with one.

    ``tokens_of`` are their numbers in this order, ``tokens`` is N. A camera frame gives one token or one per patch,
    every other observation one per time step. If it is not ``placed``, the next network adds position embeddings.
    """

    def __init__(
        self, spec: ObservationSpec, recipe: ChunkRecipe, statistics: Statistics, words: Words | None, *,
        placed: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(spec.fields, statistics, recipe.state_noise)
        width, tokens = recipe.width, dict[str, int]()
        # Those with a history first: the order determines the weights' initialisation.
        for name in sorted(spec.fields, key=lambda name: spec[name].history == 0):
            shape = spec[name].shape
            looks = spec[name].is_image
            embed = embedding(recipe.encoder, shape, width) if looks else perceptron(math.prod(shape), width, width)
            self.add_module(f"embed_{module_name(name)}", embed)
            patches = embed.patches if isinstance(embed, PatchEmbedding) else 1
            tokens[name] = patches * max(1, spec[name].history)
        self.tokens_of = {name: tokens[name] for name in sorted(tokens, key=lambda name: spec[name].history > 0)}
        if spec.instruction:
            assert words is not None, "a recipe follows an instruction only where the demonstrations have some"
            self.embed_words = embed_words(words, width)
            self.tokens_of = {INSTRUCTION: words.length, **self.tokens_of}
        self.tokens = sum(self.tokens_of.values())
        self.positions = nn.Parameter(torch.randn(self.tokens, width) * 0.02) if placed else None

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """From arrays ``[B, *window_shape]`` by name, in the environment's units, and the words ``[B, L]``."""
        parts = [self._embedded(name, observation[name]) for name in self.tokens_of]
        tokens = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return tokens if self.positions is None else tokens + self.positions

    def _embedded(self, name: str, values: Tensor) -> Tensor:
        if name == INSTRUCTION:
            words: Tensor = self.embed_words(values)
            return words
        if not self.fields[name].is_image:
            values = self.numbers(name, values)
        tokens: Tensor = getattr(self, f"embed_{module_name(name)}")(values)
        # Patches in order of frames, the oldest first.
        return tokens.flatten(1, -2) if tokens.dim() > 2 else tokens[:, None]


class Prefix(nn.Module):
    """Tokens to the cache: keys and values for the expert, layer by layer.

    A transformer over the tokens, which ends at the last layer's keys and values, because nothing reads its output.
    """

    def __init__(self, recipe: ChunkRecipe) -> None:
        super().__init__()
        width, self.heads = recipe.width, recipe.heads
        self.keys_values = nn.ModuleList(_after_norm(width, 2 * width) for _ in range(recipe.layers))
        self.queries = nn.ModuleList(_after_norm(width, width) for _ in range(recipe.layers - 1))
        self.projects = nn.ModuleList(nn.Linear(width, width) for _ in range(recipe.layers - 1))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(recipe.layers - 1))
        self.mlps = nn.ModuleList(perceptron(width, 4 * width, width) for _ in range(recipe.layers - 1))
        self.dropout = nn.Dropout(recipe.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """From ``[B, N, W]`` to the cache ``[B, L, 2, heads, N, W / heads]``."""
        x, cache = tokens, [by_head(self.keys_values[0](tokens), 2, self.heads)]
        for number, read in enumerate(self.keys_values[1:]):
            x = self.attended(number, x, *cache[-1])
            cache.append(by_head(read(x), 2, self.heads))
        return torch.stack([torch.stack(keys_values, 1) for keys_values in cache], 1)

    def attended(self, number: int, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """A layer's output, ``[B, n, W]``, from its input and the keys and values of all N tokens."""
        (queries,) = by_head(self.queries[number](x), 1, self.heads)
        x = x + self.dropout(self.projects[number](attend(queries, keys, values)))
        mixed: Tensor = x + self.dropout(self.mlps[number](self.norms[number](x)))
        return mixed


class Expert(nn.Module):
    """Noisy chunk, time and cache to a velocity: its steps attend jointly to the cache and to each other."""

    frequencies: Tensor

    def __init__(self, spec: ChunkSpec, recipe: ChunkRecipe) -> None:
        super().__init__()
        width = recipe.width
        periods = torch.logspace(math.log10(_SHORTEST_PERIOD), math.log10(_LONGEST_PERIOD), width // 2)
        self.register_buffer("frequencies", 2.0 * math.pi / periods, persistent=False)
        self.embed_time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.embed_action = nn.Linear(spec.actions, width)
        self.positions = nn.Parameter(torch.randn(spec.chunk, width) * 0.02)
        self.layers = nn.ModuleList(_ExpertLayer(recipe) for _ in range(recipe.layers))
        self.norm, self.write = nn.LayerNorm(width), nn.Linear(width, spec.actions)
        nn.init.zeros_(self.write.weight)

    def forward(self, chunk: Tensor, time: Tensor, cache: Tensor, draws: int = 1) -> Tensor:
        """The velocity ``[B, H, A]`` at a noisy ``chunk [B, H, A]``, in units in which data have mean 0 and variance 1.

        ``time [B]``, or ``[B, H]`` of each action, is 0 for noise and 1 for data. The cache is that of :class:`Prefix`,
        with a batch of B / draws, or of 1 for all: chunk i reads entry i modulo B / draws.
        """
        times = time[:, None] if time.dim() == 1 else time
        phases = times[..., None] * self.frequencies
        when = self.embed_time(torch.cat([phases.sin(), phases.cos()], -1))
        x = self.embed_action(chunk) + self.positions
        for layer, seen in zip(self.layers, cache.unbind(1), strict=True):
            x = layer(x, when, seen, draws)
        velocity: Tensor = self.write(self.norm(x))
        return velocity


class _ExpertLayer(nn.Module):
    """Joint attention over cache and chunk, and an MLP; their inputs are scaled and shifted by the time embedding."""

    def __init__(self, recipe: ChunkRecipe) -> None:
        super().__init__()
        width, self.heads = recipe.width, recipe.heads
        self.norm_attention = nn.LayerNorm(width, elementwise_affine=False)
        self.norm_mlp = nn.LayerNorm(width, elementwise_affine=False)
        self.modulate = nn.Linear(width, 4 * width)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = perceptron(width, 4 * width, width)
        self.dropout = nn.Dropout(recipe.dropout)

    def forward(self, x: Tensor, when: Tensor, seen: Tensor, draws: int) -> Tensor:
        scale, shift, scale_mlp, shift_mlp = self.modulate(when).chunk(4, -1)
        entering = self.norm_attention(x) * (1.0 + scale) + shift
        queries, keys, values = by_head(self.qkv(entering), 3, self.heads)
        seen_keys, seen_values = seen.unbind(1)
        # The cache is concatenated after the product, so that a batch of 1 is broadcast over any batch of chunks.
        seen_scores = _product(queries, seen_keys.transpose(-2, -1), draws)
        scores = torch.cat([seen_scores, queries @ keys.transpose(-2, -1)], -1)
        weights = (scores / math.sqrt(queries.shape[-1])).softmax(-1)
        tokens = seen_keys.shape[-2]
        mixed = _product(weights[..., :tokens], seen_values, draws) + weights[..., tokens:] @ values
        x = x + self.dropout(self.project(joined(mixed)))
        added: Tensor = self.dropout(self.mlp(self.norm_mlp(x) * (1.0 + scale_mlp) + shift_mlp))
        return x + added


class Flow(nn.Module):
    """The whole policy, as it is trained."""

    def __init__(
        self, spec: ChunkSpec, recipe: ChunkRecipe, statistics: Statistics, words: Words | None = None
    ) -> None:
        super().__init__()
        self.spec, self.recipe, self.words = spec, recipe, words
        self.encoder = Encoder(spec.observation, recipe, statistics, words)
        self.prefix = Prefix(recipe)
        self.expert = Expert(spec, recipe)

    def cache(self, observation: Mapping[str, Tensor]) -> Tensor:
        """The cache, computed once per inference from arrays ``[B, *window_shape]`` by name."""
        cache: Tensor = self.prefix(self.encoder(observation))
        return cache

    def regressed(self, cache: Tensor) -> Tensor:
        """The chunks ``[B, H, A]`` of a policy by regression: the expert's output for zero noise at time 0."""
        # One per window without reading the batch size, so that the exported graph has no shape operators.
        zero = 0.0 * cache[:, 0, 0, 0, :1, :1]
        nothing = zero + cache.new_zeros(self.spec.chunk, self.spec.actions)
        chunk: Tensor = self.expert(nothing, zero[:, 0, 0], cache)
        return chunk


def _after_norm(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))


def _product(rows: Tensor, matrix: Tensor, draws: int) -> Tensor:
    """``rows`` ``[draws B, heads, H, K]`` times ``matrix`` ``[B, heads, K, N]``, which is not copied for every draw."""
    if draws == 1:
        return rows @ matrix
    length = rows.shape[2]
    merged = rows.unflatten(0, (draws, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)
    product: Tensor = (merged @ matrix).unflatten(2, (draws, length)).permute(2, 0, 1, 3, 4).flatten(0, 1)
    return product


class Guide(nn.Module):
    """Velocity of the expert, and its pull towards wanted actions: ``(Y - x^_1)^T diag(W) dx^_1/dx_t``.

    One pass forward and one back through the expert; see :func:`~specact.families.chunks.flow.integrate_guided`.
    """

    def __init__(self, expert: Expert) -> None:
        super().__init__()
        self.expert = expert

    def forward(
        self, chunk: Tensor, time: Tensor, cache: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Velocity and pull ``[B, H, A]``, of the expert's arguments, ``wanted [B, H, A]`` and ``weights [B, H]``."""
        velocity, pull_back, *_ = torch.func.vjp(lambda x: self.expert(x, time, cache), chunk)
        rest = (1.0 - time)[:, None, None]
        missing = weights[..., None] * (wanted - (chunk + rest * velocity))
        return velocity, missing + rest * pull_back(missing)[0]


class Regression(nn.Module):
    """Observations to chunks ``[B, H, A]`` in the environment's units, in one pass."""

    centre: Tensor
    scale: Tensor

    def __init__(self, model: Flow, units: FlowUnits) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("centre", torch.from_numpy(units.centre))
        self.register_buffer("scale", torch.from_numpy(units.scale))

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        return self.centre + self.scale * self.model.regressed(self.model.cache(observation))


def flow_graphs(model: Flow) -> dict[str, Graph]:
    """The networks of a flow policy as they are exported, by part."""
    tokens, recipe, chunk = model.encoder.tokens, model.recipe, (model.spec.chunk, model.spec.actions)
    cache = (recipe.layers, 2, recipe.heads, tokens, recipe.width // recipe.heads)

    def noisy(batch: str | int, windows: str | int) -> dict[str, Input]:
        return {
            "chunk": Input((batch, *chunk)), "time": Input((batch,), torch.rand), "cache": Input((windows, *cache))
        }  # fmt: skip

    # The first actions may be given; they have another time than the others.
    per_action = {"time": Input(("batch", chunk[0]), torch.rand)} if recipe.delays else {}
    # The backward pass can only be exported from a trace, with a fixed batch size; guided steps have batch 1.
    guided = {**noisy(1, 1), "wanted": Input((1, *chunk)), "weights": Input((1, chunk[0]), torch.rand)}
    guide = Graph(Guide(model.expert), guided, ["velocity", "pull"])
    decompositions = dict(core_aten_decompositions().items())
    traced = make_fx(guide.module, decomposition_table=decompositions)(*guide.example(1).values())
    return {
        "encoder": _encoder_graph(model, model.encoder, "tokens"),
        "prefix": Graph(model.prefix, {"tokens": Input(("batch", tokens, recipe.width))}, ["cache"]),
        "expert": Graph(model.expert, noisy("batch", "windows") | per_action, ["velocity"]),
        "guide": replace(guide, module=traced),
    }


def regression_graphs(model: Flow, units: FlowUnits) -> dict[str, Graph]:
    """The single network of a policy by regression as it is exported."""
    return {"policy": _encoder_graph(model, Regression(model, units).eval(), "actions")}


def _encoder_graph(model: Flow | TokenModel, module: nn.Module, output: str) -> Graph:
    words = model.words if model.spec.observation.instruction else None
    return Graph(module, {"observation": observed(model.encoder, words)}, [output])


# --- autoregressive tokens ---


class Decoder(nn.Module):
    """Embedded tokens to the logits of the next tokens, see :class:`~specact.families.tokens.policy.Reading`.

    Its ``length`` S is that of the tokens of an observation and of a chunk together.
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

        From embeddings ``[B, N, W]`` at positions 0 to S - 1, ``[B, N]``. ``visible`` is whether the token of a row
        attends to that of a column: ``[B, N, N]``, and with a cache ``[B, L, 2, heads, S, W / heads]``
        ``[B, N, S + N]``, its positions first.
        """
        x = self.dropout(embeddings + nn.functional.embedding(positions, self.positions))
        hidden = (HIDDEN * (~visible).to(x.dtype))[:, None]
        entries = []
        for number, layer in enumerate(self.layers):
            x, pair = layer(x, hidden, None if cache is None else cache[:, number])
            entries.append(torch.stack(pair, 1))
        return self.norm(x), torch.stack(entries, 1)

    def forward(
        self, embeddings: Tensor, positions: Tensor, seen: Tensor, among: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, features and cache entries, the outputs of the exported graph; see :meth:`features`.

        ``seen [B, S]`` masks the used positions of the cache, ``among [B, N, N]`` is the mask of the new tokens.
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
    decoder, (length, width) = model.decoder, model.decoder.positions.shape
    inputs = {
        "embeddings": Input(("batch", "tokens", width)),
        "positions": Input(("batch", "tokens"), below(length)),
        "seen": Input(("batch", length), mostly),
        "among": Input(("batch", "tokens", "tokens"), mostly),
        "cache": Input(("batch", len(decoder.layers), 2, decoder.heads, length, width // decoder.heads)),
    }
    return {
        "encoder": _encoder_graph(model, model.encoder, "tokens"),
        "decoder": Graph(decoder, inputs, ["logits", "features", "entries"]),
    }
