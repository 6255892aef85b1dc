"""The image encoder: where in a frame things are, from a few strided convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specact.errors import ConfigError
from specact.lab.train.recipe import EncoderRecipe


class ImageEncoder(nn.Module):
    """Camera frames, uint8 ``[N, H, W, 3]``, to features ``[N, width]``.

    Convolutions make one map per keypoint; a map's softmax over all places gives the keypoint's coordinates (Levine et
    al. 2016, Finn et al. 2016), which two linear layers read. A mean over all places would say what is in the frame,
    and hardly where.

    Args:
        recipe: its sizes.
        shape: of a frame, ``(H, W, 3)``.

    Raises:
        ConfigError: for frames so small that nothing can be told apart in them.
    """

    places: Tensor

    def __init__(self, recipe: EncoderRecipe, shape: tuple[int, ...]) -> None:
        super().__init__()
        height, width, _ = shape
        rows, columns = (height // 4 + 1) // 2, (width // 4 + 1) // 2  # after both strides
        if min(rows, columns) < 2:
            raise ConfigError(
                f"camera frames of {height} x {width} are too small for the image encoder, which needs at least "
                f"12 x 12; give them a larger size in [observations]"
            )
        first, second, *others = recipe.channels
        layers: list[nn.Module] = [nn.Conv2d(3, first, 4, stride=4), nn.ReLU()]
        layers += [nn.Conv2d(first, second, 3, stride=2, padding=1), nn.ReLU()]
        for before, after in zip((second, *others), others, strict=False):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(recipe.channels[-1], recipe.keypoints, 1)]
        # Channels last, as frames are stored: a third less time on a CPU.
        self.layers = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        y, x = torch.meshgrid(torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns), indexing="ij")
        self.register_buffer("places", torch.stack([x, y], -1).flatten(0, 1), persistent=False)
        self.first = nn.Linear(2 * recipe.keypoints, recipe.width)
        self.second = nn.Linear(recipe.width, recipe.width)

    def forward(self, frames: Tensor) -> Tensor:
        maps = self.layers(frames.permute(0, 3, 1, 2).float() / 255.0 - 0.5)
        shares = maps.permute(0, 2, 3, 1).flatten(1, 2).float().softmax(1)
        with torch.autocast("cpu", enabled=False):  # bfloat16 would round coordinates to whole pixels
            keypoints = (shares.transpose(1, 2) @ self.places).flatten(1)
        return torch.relu(self.second(torch.relu(self.first(keypoints))))


class ImageEmbedding(nn.Module):
    """Tokens ``[..., W]`` of camera frames, uint8 ``[..., H, W, 3]``, or of features that the encoder gave for them."""

    def __init__(self, recipe: EncoderRecipe, shape: tuple[int, ...], tokens: int) -> None:
        super().__init__()
        self.encoder = ImageEncoder(recipe, shape)
        self.project = nn.Linear(recipe.width, tokens)

    def forward(self, seen: Tensor) -> Tensor:
        if seen.dtype == torch.uint8:
            # Only the batch is free: everything else is a constant of the exported graph.
            features = self.encoder(seen.reshape(-1, *seen.shape[-3:]))
            seen = features.reshape(-1, *seen.shape[1:-3], features.shape[-1])
        tokens: Tensor = self.project(seen)
        return tokens
