"""VQ-BeT's training loss: focal loss on the codes, L1 on the action after the offset (ADAHI, equation 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specact.lab.train.vqbet import Prediction, VQBeT


@dataclass(frozen=True)
class Targets:
    """The labels of a batch of windows, at every position.

    Attributes:
        codes: the tokenizer's codes of the demonstrated chunk, ``[B, T, G]``.
        chunks: the demonstrated chunk, normalised, ``[B, T, n, A]``.
        weight: 1 where the position is real, 0 where it is padding, ``[B, T]``.
        decoded: the tokenizer's decoder as a table, ``[K ** G, n, A]``.
    """

    codes: Tensor
    chunks: Tensor
    weight: Tensor
    decoded: Tensor


def policy_loss(model: VQBeT, prediction: Prediction, targets: Targets) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted loss and its parts: ``nll``, ``code_accuracy``, ``offset_l1`` (all means over real positions)."""
    recipe = model.recipe
    share = targets.weight / targets.weight.sum()
    logits = code_logits(model, prediction, targets.codes[..., 0])
    log_probs = logits.float().log_softmax(-1)
    chosen = log_probs.gather(-1, targets.codes[..., None])[..., 0]
    focal = -((1 - chosen.exp()) ** recipe.focal) * chosen
    weights = chosen.new_tensor([recipe.primary_weight] + [recipe.secondary_weight] * (chosen.shape[-1] - 1))
    code_loss = (focal * weights).sum(-1)

    codes = targets.codes if recipe.offset_on == "ground_truth" else sampled_codes(model, prediction)
    action = chunk_of(prediction.offsets, codes, targets.decoded)
    offset_loss = (action - targets.chunks).abs().mean((-2, -1))

    loss = (share * (code_loss + recipe.offset_weight * offset_loss)).sum()
    correct = (log_probs.argmax(-1) == targets.codes).all(-1).float()
    parts = {
        "nll": (share * -chosen.sum(-1)).sum(),
        "code_accuracy": (share * correct).sum(),
        "offset_l1": (share * offset_loss).sum(),
    }
    return loss, {name: value.detach() for name, value in parts.items()}


def code_logits(model: VQBeT, prediction: Prediction, primary: Tensor) -> Tensor:
    """Logits of all codebooks, ``[B, T, G, K]``, a sequential secondary given this primary code ``[B, T]``."""
    if model.secondary_head is None:
        return prediction.logits
    secondary = model.secondary_head(prediction.features, primary)
    return torch.cat([prediction.logits, secondary[..., None, :]], -2)


@torch.no_grad()
def sampled_codes(model: VQBeT, prediction: Prediction) -> Tensor:
    """Codes drawn from the prediction, ``[B, T, G]``."""

    def draw(logits: Tensor) -> Tensor:
        probs = logits.float().softmax(-1)
        return torch.multinomial(probs.flatten(0, -2), 1).view(logits.shape[:-1])

    primary = draw(prediction.logits[..., 0, :])
    return torch.cat([primary[..., None], draw(code_logits(model, prediction, primary)[..., 1:, :])], -1)


def chunk_of(offsets: Tensor, codes: Tensor, decoded: Tensor) -> Tensor:
    """Decoded chunk plus the summed offsets of the chosen codes, ``[B, T, n, A]``."""
    index = torch.zeros_like(codes[..., 0])
    for g in range(codes.shape[-1]):
        index = index * offsets.shape[-3] + codes[..., g]
    picked = offsets.take_along_dim(codes[..., None, None, None], dim=-3)[..., 0, :, :].sum(-3)
    return decoded[index] + picked
