"""Training of Spec-VLA's drafter head, on the target's features in its own rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from specact.families.tokens.policy import BINS
from specact.lab.train.attention import HIDDEN, Layer
from specact.lab.train.loop import Metrics
from specact.lab.train.rebuild import stored_weights


class DrafterHead(nn.Module):
    """See :class:`~specact.systems.specvla.TokenHead`.

    Args:
        embedding: of the target's tokens ``[256, W]``, frozen.
        write: the target's output layer, frozen.
        length: T, tokens of a chunk.
        heads, dropout: of the layer.
    """

    def __init__(self, embedding: Tensor, write: nn.Linear, length: int, heads: int, dropout: float) -> None:
        super().__init__()
        width = embedding.shape[1]
        self.length = length
        self.embedding = nn.Embedding.from_pretrained(embedding, freeze=True)
        self.write = write.requires_grad_(False)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.join, self.layer = nn.Linear(2 * width, width), Layer(width, heads, dropout)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, tokens: Tensor, features: Tensor, places: Tensor, seen: Tensor, among: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and features of the next tokens, and cache entries; the outputs of the exported graph."""
        predicted, entries = self.predicted(tokens, features, places, torch.cat([seen, among], -1), cache)
        return self.write(predicted), predicted, entries

    def predicted(
        self, tokens: Tensor, features: Tensor, places: Tensor, visible: Tensor, cache: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Features ``[B, N, W]``, and keys and values; see :meth:`Layer.forward <specact.lab.train.tokens.Layer>`."""
        x = self.join(torch.cat([self.embedding(tokens), features], -1))
        x = x + nn.functional.embedding(places, self.positions)
        x, entries = self.layer(x, (HIDDEN * (~visible).to(x.dtype))[:, None], cache)
        return self.norm(x), torch.stack(entries, 1)

    def unrolled(self, tokens: Tensor, features: Tensor, ahead: int) -> list[Tensor]:
        """Predictions where the last 0, 1, ... ``ahead - 1`` input features are the head's own, each ``[B, T - 1, W]``.

        Entry s, position j is a prediction of ``features[:, j + 1]`` from the target's features up to position
        ``j - s``, and is valid from ``j = s`` on. It takes ``ahead`` passes: a pass attends to the keys and values of
        the previous ones (as in EAGLE-3, Li et al. 2025).

        Args:
            tokens: ``[B, T]``.
            features: inputs of the first pass, ``[B, T, W]``.
            ahead: passes.
        """
        count = self.length - 1
        place = torch.arange(count, device=tokens.device)
        lag = place[:, None] - place[None]
        inputs, cache, predictions = features[:, :-1], None, list[Tensor]()
        for number in range(ahead):
            # The target's features so far, then one own feature of every previous pass, and this token's.
            blocks = [lag >= number] + [lag == number - earlier for earlier in range(1, number + 1)]
            predicted, entries = self.predicted(tokens[:, :-1], inputs, place[None], torch.cat(blocks, -1)[None], cache)
            cache = entries if cache is None else torch.cat([cache, entries], -2)
            predictions.append(predicted)
            inputs = torch.cat([torch.zeros_like(predicted[:, :1]), predicted[:, :-1]], 1)
        return predictions


@dataclass(frozen=True)
class Weights:
    """Weights of the two parts of the loss.

    Attributes:
        feature: of the features' smooth L1 loss.
        token: of the cross-entropy to the target's distribution.
    """

    feature: float
    token: float


def head_loss(
    head: DrafterHead, tokens: Tensor, features: Tensor, weights: Weights, ahead: int, noise: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch and its parts; the mean over the passes of :meth:`DrafterHead.unrolled`.

    Args:
        head: the head.
        tokens, features: the target's, ``[B, T]`` and ``[B, T, W]``.
        weights, ahead: see there.
        noise: half the width of the uniform noise on the input features.
    """
    noisy = features + noise * (2.0 * torch.rand_like(features) - 1.0)
    with torch.no_grad():
        target_probs = head.write(features[:, 1:]).float().softmax(-1)
    distance, entropy = features.new_zeros(()), features.new_zeros(())
    for number, predicted in enumerate(head.unrolled(tokens, noisy, ahead)):
        predicted_features, target_features = predicted[:, number:].float(), features[:, 1 + number :]
        distance = distance + nn.functional.smooth_l1_loss(predicted_features, target_features) / ahead
        log_probs = head.write(predicted[:, number:]).float().log_softmax(-1)
        entropy = entropy - (target_probs[:, number:] * log_probs).sum(-1).mean() / ahead
    parts = {"feature_l1": distance.detach(), "cross_entropy": entropy.detach()}
    return weights.feature * distance + weights.token * entropy, parts


def chain_metrics(
    head: DrafterHead, tokens: Tensor, features: Tensor, depth: int, strict: tuple[int, ...], actions: int
) -> Metrics:
    """Accepted drafted tokens per round, and passes of the target per chunk, with greedy chains.

    ``accepted`` and ``passes`` are exact; with ``_9``, tokens within 9 bins are accepted, except on strict dimensions,
    and tokens after an accepted one are evaluated as if it were the target's. With ``_moving`` the strict dimensions,
    such as a gripper that rarely changes, are left out.

    Args:
        head: makes the drafts.
        tokens, features: the target's, ``[B, T]`` and ``[B, T, W]``.
        depth: tokens of a chain.
        strict: dimensions of an action without a tolerance.
        actions: A, dimensions of an action.
    """
    depth = min(depth, head.length - 1)
    rigid = torch.isin(torch.arange(1, head.length) % actions, torch.tensor(strict))
    drafted = [head.write(predicted).argmax(-1) for predicted in head.unrolled(tokens, features, depth)]
    bias = (torch.stack(drafted) - tokens[:, 1:]).abs().cpu()
    metrics: Metrics = {}
    for name, fits in (("", bias == 0), ("_9", (bias == 0) | (bias <= 9) & ~rigid)):
        metrics |= _rounds(fits, torch.ones_like(rigid), name)
        if strict:
            metrics |= _rounds(fits | rigid, ~rigid, f"{name}_moving")
    return metrics


def _rounds(fits: Tensor, counted: Tensor, name: str) -> Metrics:
    """Simulates the rounds of chunks; ``fits [depth, B, T - 1]`` is the mask of accepted drafted tokens.

    Entry s, position j is token j + 1, drafted after s drafted tokens. ``counted [T - 1]``: mask of counted tokens.
    """
    depth, batch, count = fits.shape
    decided = torch.ones(batch, dtype=torch.long)  # the first token is the target's
    accepted, rounds = 0, 0
    while (unfinished := decided <= count).any():
        active = unfinished.clone()
        rounds += int(active.sum())
        for number in range(depth):
            active &= decided <= count
            place = (decided - 1).clamp(max=count - 1)
            active &= fits[number, torch.arange(batch), place]
            accepted += int(counted[place][active].sum())
            decided += active.long()
        decided += (unfinished & (decided <= count)).long()  # the target's own token
    return {f"accepted{name}": accepted / rounds, f"passes{name}": 1.0 + rounds / batch}


def output_layer(decoder: Path) -> nn.Linear:
    """The output layer of a token policy's decoder, from features to logits.

    Raises:
        ConfigError: if the bundle holds no weights for it.
    """
    weights = stored_weights(decoder)
    layer = nn.Linear(weights["write.weight"].shape[1], BINS)
    layer.load_state_dict({"weight": weights["write.weight"], "bias": weights["write.bias"]})
    return layer
