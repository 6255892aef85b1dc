"""Residual vector quantiser of action chunks, trained on its own before any policy (VQ-BeT; ADAHI, equation 1)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from specact.lab.train.dataset import Dataset
from specact.lab.train.loop import Draw, Metrics, Stage, cosine
from specact.lab.train.recipe import CodesRecipe, TokenizerRecipe
from specact.rng import Role, stream


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
        return error + self.recipe.commitment * commitment, error.detach(), codes

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
    def revive_dead_codes(self, chunks: Tensor, generator: torch.Generator) -> int:
        """Re-initialises rarely used codes to random latents of this batch; returns their number."""
        _, residuals = self._quantise(self.encoder(chunks.flatten(1)))
        revived = 0
        for g in range(self.recipe.codebooks):
            share = self.counts[g] / self.counts[g].sum()
            dead = torch.nonzero(share < self.recipe.dead_share).flatten()
            if len(dead):
                pick = torch.randint(len(chunks), (len(dead),), generator=generator)
                self._set_codes(g, dead, residuals[g][pick])
                revived += len(dead)
        return revived

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
def measure(tokenizer: ResidualVQ, chunks: Tensor) -> Metrics:
    """Reconstruction and code usage over chunks ``[N, n, A]``.

    ``error`` is the mean absolute error, ``baseline`` that of a constant, the median of every dimension, both in
    normalised action units; ``used_g`` and ``dead_g`` count the codes of a codebook that are used, and that are not.
    """
    codes = tokenizer.encode(chunks)
    error = (tokenizer.decode(codes) - chunks).abs().mean()
    baseline = (chunks.median(0).values - chunks).abs().mean()
    used = [int(codes[:, g].unique().numel()) for g in range(codes.shape[1])]
    return {
        "error": float(error), "baseline": float(baseline),
        **{f"used_{g}": number for g, number in enumerate(used)},
        **{f"dead_{g}": tokenizer.recipe.codes - number for g, number in enumerate(used)},
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

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
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

    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-4, fused=True)
    return Stage(
        "tokenizer", model, optimizer, update, validate, settings.steps,
        cosine(settings.learning_rate, 100, settings.steps), recipe.seed, after_update=revive, small=True,
    )  # fmt: skip


def decoder_table(tokenizer: ResidualVQ) -> Tensor:
    """The decoder over all code tuples, ``[K ** G, n, A]``: what the device needs of it."""
    codes = range(tokenizer.recipe.codes)
    tuples = torch.tensor(list(itertools.product(codes, repeat=tokenizer.recipe.codebooks)))
    with torch.no_grad():
        return tokenizer.decode(tuples)
