"""VQ-BeT (Lee et al. 2024): a residual vector quantiser of action chunks, and a transformer that predicts its codes.

The quantiser is trained on its own before any policy (ADAHI, equation 1); a policy reads a window of observations, and
has a code head and an offset head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specact.bundle.manifest import INSTRUCTION, Words
from specact.lab.train.attention import Layer, Observing, Statistics, embed_words, module_name, perceptron
from specact.lab.train.dataset import Dataset, positions
from specact.lab.train.encoder import ImageEmbedding, PatchEmbedding, embedding
from specact.lab.train.loop import Draw, Losses, Metrics, Stage
from specact.lab.train.recipe import CodesRecipe, Optimisation, PolicyRecipe, TokenizerRecipe
from specact.observation import ObservationSpec
from specact.rng import Role, stream


@dataclass(frozen=True)
class Shapes:
    """Sizes of a policy that are given by its data and its tokenizer: G, K, n and A of ``observation``.

    ``goal_mode`` is the input of observations without a history, see :class:`~specact.lab.train.recipe.CodesRecipe`;
    ``words`` are the vocabulary, where it follows an instruction.
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
    """The outputs at each of the P predicting positions, see :func:`~specact.lab.train.dataset.positions`.

    ``logits [B, P, G, K]``, with a sequential secondary only the primary's row, ``[B, P, 1, K]``; ``offsets [B, P, G,
    K, n, A]``; and ``features [B, P, W]``, the inputs of the heads.
    """

    logits: Tensor
    offsets: Tensor
    features: Tensor


class VQBeT(Observing):
    """The policy network. Training uses all predicting positions; inference only the last one.

    Observations with a history make one token per time step: numbers and camera frames are embedded separately and
    added. Where histories differ in length, the older tokens lack the shorter ones, and are not predicted from. They
    are preceded by separate tokens: words of an instruction, patches of frames, observations without a history.
    """

    mask: Tensor

    def __init__(self, shapes: Shapes, recipe: PolicyRecipe, statistics: Statistics) -> None:
        super().__init__(shapes.observation.fields, statistics, recipe.state_noise)
        self.shapes, self.recipe = shapes, recipe
        width, fields = recipe.width, self.fields
        still = [name for name, field in fields.items() if not field.history]
        self.joined = [name for name in still if not fields[name].is_image and shapes.goal_mode == "concatenate"]
        self.own_token = [name for name in still if name not in self.joined]
        patches = recipe.encoder.tokens == "patches"
        self.patched = [name for name in fields if fields[name].is_image and patches]
        seen = [name for name in fields if name not in (*still, *self.patched)]
        # Numbers first: the order determines the weights' initialisation.
        self.seen = sorted(seen, key=lambda name: fields[name].is_image)
        ahead = 0
        for name in (*self.seen, *self.own_token, *self.patched):
            joined = sum(math.prod(fields[goal].shape) for goal in self.joined) if name == self.seen[0] else 0
            embed = (
                embedding(recipe.encoder, fields[name].shape, width)
                if fields[name].is_image
                else nn.Linear(math.prod(fields[name].shape) + joined, width)
            )
            self.add_module(f"embed_{module_name(name)}", embed)
            ahead += embed.patches if isinstance(embed, PatchEmbedding) else 0
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
        offsets = shapes.codebooks * shapes.codes * shapes.chunk * shapes.actions
        self.code_head = _head(width, recipe.head_width, independent * shapes.codes)
        self.offset_head = _head(width, recipe.head_width, offsets)
        self.secondary_head = _SecondaryHead(width, recipe.head_width, shapes.codes) if recipe.sequential else None

    def forward(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Logits and offsets of the newest position, and a sequential secondary's logits: the deployed policy."""
        features = self.features(observation)[:, -1:]
        prediction = self.heads(features)
        outputs = (prediction.logits[:, 0], prediction.offsets[:, 0])
        return outputs if self.secondary_head is None else (*outputs, self.secondary_head.conditional(features[:, 0]))

    def predictions(self, observation: Mapping[str, Tensor]) -> Prediction:
        """From arrays ``[B, *window_shape]`` by name to the outputs at all P predicting positions."""
        return self.heads(self.features(observation))

    def features(self, observation: Mapping[str, Tensor]) -> Tensor:
        """The inputs of the heads, ``[B, P, W]``."""
        values = {
            name: observation[name] if field.is_image else self.numbers(name, observation[name])
            for name, field in self.fields.items()
        }
        for goal in self.joined:
            base = values[self.seen[0]]
            values[self.seen[0]] = torch.cat([base, values[goal][:, None].expand(-1, base.shape[1], -1)], -1)
        tokens = self._padded(self._embedded(self.seen[0], values))
        for name in self.seen[1:]:
            tokens = tokens + self._padded(self._embedded(name, values))
        prefix = [self.embed_instruction(observation[INSTRUCTION])] if self.shapes.words is not None else []
        prefix += [self._embedded(name, values).flatten(1, -2) for name in self.patched]
        prefix += [self._embedded(name, values)[:, None] for name in self.own_token]
        if prefix:
            tokens = torch.cat([*prefix, tokens], 1)
        x = self.dropout(tokens + self.positions)
        for block in self.blocks:
            x, _ = block(x, self.mask)
        features: Tensor = self.norm(x[:, -self.predicting :])
        return features

    def _embedded(self, name: str, values: Mapping[str, Tensor]) -> Tensor:
        """``[B, T, W]``, or ``[B, W]`` without a history."""
        embedded: Tensor = getattr(self, f"embed_{module_name(name)}")(values[name])
        return embedded

    def _padded(self, tokens: Tensor) -> Tensor:
        """Tokens, left-padded with zeros to ``[B, T, W]``."""
        missing = self.length - tokens.shape[1]
        return nn.functional.pad(tokens, (0, 0, missing, 0)) if missing else tokens

    def freeze(self, camera: str, encoder: nn.Module) -> None:
        """Loads a camera's pre-trained encoder, and freezes it."""
        embedding: ImageEmbedding = getattr(self, f"embed_{module_name(camera)}")
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
    return perceptron(width, head_width, outputs) if head_width else nn.Linear(width, outputs)


class ResidualVQ(nn.Module):
    """Encoder, G residual codebooks of K codes, decoder.

    Chunks ``[B, n, A]`` are in normalised action units. Codebooks follow the exponential average of what they
    quantise, so only encoder and decoder see gradients: mean absolute reconstruction error plus the commitment loss.
    """

    codebooks: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, recipe: TokenizerRecipe, chunk: int, actions: int) -> None:
        super().__init__()
        self.recipe, self.chunk, self.actions = recipe, chunk, actions
        width = chunk * actions

        def mlp(inputs: int, outputs: int) -> nn.Sequential:
            hidden = recipe.hidden
            return nn.Sequential(
                nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
            )

        self.encoder = mlp(width, recipe.latent)
        self.decoder = mlp(recipe.latent, width)
        shape = (recipe.codebooks, recipe.codes)
        self.register_buffer("codebooks", torch.zeros(*shape, recipe.latent))
        self.register_buffer("counts", torch.ones(shape))
        self.register_buffer("sums", torch.zeros(*shape, recipe.latent))

    def decode(self, codes: Tensor) -> Tensor:
        """Chunks ``[B, n, A]`` of codes ``[B, G]``."""
        latent = sum(book[codes[:, g]] for g, book in enumerate(self.codebooks))
        chunks: Tensor = self.decoder(latent)
        return chunks.view(-1, self.chunk, self.actions)

    @torch.no_grad()
    def encode(self, chunks: Tensor) -> Tensor:
        """Codes ``[B, G]`` of chunks ``[B, n, A]``: the nearest code, then the nearest to each residual."""
        codes, _ = self._quantise(self.encoder(chunks.flatten(1)))
        return codes

    def losses(self, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Training loss, mean absolute reconstruction error, and codes ``[B, G]``; also updates the codebooks."""
        latent = self.encoder(chunks.flatten(1))
        with torch.no_grad():
            codes, residuals = self._quantise(latent)
        quantised = sum(book[codes[:, g]] for g, book in enumerate(self.codebooks))
        straight_through = latent + (quantised - latent).detach()
        reconstruction = self.decoder(straight_through).view_as(chunks)
        error = (reconstruction - chunks).abs().mean()
        # Each codebook's residual is pulled to its code; all share the encoder's gradient.
        partial = torch.zeros_like(latent)
        commitment = latent.new_zeros(())
        for g, book in enumerate(self.codebooks):
            partial = partial + book[codes[:, g]]
            commitment = commitment + (latent - partial).pow(2).mean()
        self._move_codebooks(codes, residuals)
        return error + self.recipe.commitment * commitment, error, codes

    @torch.no_grad()
    def initialise(self, chunks: Tensor, generator: torch.Generator, rounds: int = 10) -> None:
        """k-means on the encoder's first latents, codebook after codebook."""
        residual = self.encoder(chunks.flatten(1))
        for g in range(self.recipe.codebooks):
            pick = torch.randperm(len(residual), generator=generator)[: self.recipe.codes]
            centres = residual[pick].clone()
            for _ in range(rounds):
                nearest = torch.cdist(residual, centres).argmin(1)
                for k in range(self.recipe.codes):
                    if (nearest == k).any():
                        centres[k] = residual[nearest == k].mean(0)
            self._set_codes(g, torch.arange(self.recipe.codes), centres)
            residual = residual - centres[torch.cdist(residual, centres).argmin(1)]

    @torch.no_grad()
    def revive_dead_codes(self, chunks: Tensor, generator: torch.Generator) -> None:
        """Re-initialises rarely used codes to random latents of this batch."""
        _, residuals = self._quantise(self.encoder(chunks.flatten(1)))
        for g in range(self.recipe.codebooks):
            share = self.counts[g] / self.counts[g].sum()
            dead = torch.nonzero(share < self.recipe.dead_share).flatten()
            if len(dead):
                pick = torch.randint(len(chunks), (len(dead),), generator=generator)
                self._set_codes(g, dead, residuals[g][pick])

    def _quantise(self, latent: Tensor) -> tuple[Tensor, list[Tensor]]:
        residual, codes, residuals = latent, [], []
        for book in self.codebooks:
            nearest = torch.cdist(residual, book).argmin(1)
            codes.append(nearest)
            residuals.append(residual)
            residual = residual - book[nearest]
        return torch.stack(codes, 1), residuals

    @torch.no_grad()
    def _move_codebooks(self, codes: Tensor, residuals: list[Tensor]) -> None:
        decay = self.recipe.decay
        for g, residual in enumerate(residuals):
            chosen = nn.functional.one_hot(codes[:, g], self.recipe.codes).to(residual.dtype)
            self.counts[g].lerp_(chosen.sum(0), 1 - decay)
            self.sums[g].lerp_(chosen.T @ residual, 1 - decay)
            self.codebooks[g] = self.sums[g] / self.counts[g].clamp_min(1e-3)[:, None]

    def _set_codes(self, g: int, which: Tensor, values: Tensor) -> None:
        typical = self.counts[g].mean()
        self.codebooks[g, which] = values
        self.counts[g, which] = typical
        self.sums[g, which] = values * typical


@torch.no_grad()
def measure(tokenizer: ResidualVQ, chunks: Tensor) -> dict[str, float]:
    """Reconstruction and code usage over chunks ``[N, n, A]``.

    ``error`` is the mean absolute error, ``baseline`` that of a constant, the median of every dimension, both in
    normalised action units; ``used_g`` counts the codes of a codebook that are used.
    """
    codes = tokenizer.encode(chunks)
    error = (tokenizer.decode(codes) - chunks).abs().mean()
    baseline = (chunks.median(0).values - chunks).abs().mean()
    used = [int(codes[:, g].unique().numel()) for g in range(codes.shape[1])]
    return {
        "error": float(error), "baseline": float(baseline),
        **{f"used_{g}": number for g, number in enumerate(used)},
    }  # fmt: skip


def tokenizer_stage(dataset: Dataset, recipe: CodesRecipe) -> Stage:
    """The residual VQ, to be trained before any policy and then frozen."""
    settings, (chunks, held_out) = recipe.tokenizer, (part.counted for part in (dataset.train, dataset.held_out))
    torch.manual_seed(recipe.seed)
    model = ResidualVQ(settings, recipe.chunk, chunks.shape[-1])
    generator = torch.Generator().manual_seed(recipe.seed)

    def some(step: int, size: int) -> Tensor:
        """A batch of chunks: a function of the seed and the step alone."""
        rng = stream(recipe.seed, Role.DATA, episode=Draw.CHUNKS, step=step)
        return chunks[torch.from_numpy(rng.integers(len(chunks), size=min(size, len(chunks))))]

    model.initialise(some(0, 4096), generator)

    def update(step: int) -> Losses:
        loss, error, _ = model.losses(some(step, settings.batch))
        return loss, {"error": error}

    def revive(step: int) -> None:
        # Not in the last fifth: a code moved then would have no time to settle.
        if step % 100 == 99 and step < 0.8 * settings.steps:
            generator.manual_seed(recipe.seed + step)
            model.revive_dead_codes(some(step, settings.batch), generator)

    def validate(module: nn.Module) -> Metrics:
        held, whole = measure(model, held_out), measure(model, some(0, 65536))
        return whole | {name: held[name] for name in ("error", "baseline")}

    training = Optimisation(
        steps=settings.steps, learning_rate=settings.learning_rate, weight_decay=1e-4, average=0.0
    )  # fmt: skip
    return Stage("tokenizer", model, training, update, validate, recipe.seed, after_update=revive, small=True)


@torch.no_grad()
def decoder_table(tokenizer: ResidualVQ) -> Tensor:
    """The decoder over all code tuples, ``[K ** G, n, A]``: what the device needs of it."""
    codes = range(tokenizer.recipe.codes)
    tuples = torch.tensor(list(itertools.product(codes, repeat=tokenizer.recipe.codebooks)))
    return tokenizer.decode(tuples)
