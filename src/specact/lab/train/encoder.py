"""The image encoder (spatial softmax keypoints, or patches), and the stage that pre-trains it to predict a pose."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specact.errors import ConfigError, unknown_name
from specact.lab.data.episodes import Episodes
from specact.lab.envs.task import Task
from specact.lab.train.dataset import Dataset
from specact.lab.train.loop import Draw, Losses, Metrics, Stage, autocast, device_of, seed_weights
from specact.lab.train.recipe import CodesRecipe, EncoderRecipe
from specact.observation import ObservationSpec
from specact.rng import Role, stream

_BATCH = 256  # frames per encoder pass
_SMALL = 0.1  # beta of the smooth L1 loss, in standard deviations


class ImageEncoder(nn.Module):
    """Camera frames of a ``shape``, uint8 ``[N, H, W, 3]``, to features ``[N, width]``; too small ones are refused.

    Convolutions make one map per keypoint; a map's spatial softmax gives the keypoint's coordinates (Levine et al.
    2016, Finn et al. 2016), followed by two linear layers. Mean pooling would discard most of the positions.
    """

    places: Tensor

    def __init__(self, recipe: EncoderRecipe, shape: tuple[int, ...]) -> None:
        super().__init__()
        convolutions, rows, columns = _convolutions(recipe, shape, later_stride=1)
        # Channels last, as frames are stored: a third less time on a CPU.
        self.layers = nn.Sequential(*convolutions, nn.Conv2d(recipe.channels[-1], recipe.keypoints, 1)).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        )
        y, x = torch.meshgrid(torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns), indexing="ij")
        self.register_buffer("places", torch.stack([x, y], -1).flatten(0, 1), persistent=False)
        self.first = nn.Linear(2 * recipe.keypoints, recipe.width)
        self.second = nn.Linear(recipe.width, recipe.width)

    def forward(self, frames: Tensor) -> Tensor:
        maps = self.layers(_scaled(frames))
        shares = maps.permute(0, 2, 3, 1).flatten(1, 2).float().softmax(1)
        with torch.autocast(maps.device.type, enabled=False):  # bfloat16 would round coordinates to pixels
            keypoints = (shares.transpose(1, 2) @ self.places).flatten(1)
        return torch.relu(self.second(torch.relu(self.first(keypoints))))


class ImageEmbedding(nn.Module):
    """Tokens ``[..., W]`` of camera frames, uint8 ``[..., H, W, 3]``, or of their precomputed features."""

    def __init__(self, recipe: EncoderRecipe, shape: tuple[int, ...], tokens: int) -> None:
        super().__init__()
        self.encoder, self.shift = ImageEncoder(recipe, shape), recipe.shift
        self.project = nn.Linear(recipe.width, tokens)

    def forward(self, seen: Tensor) -> Tensor:
        if seen.dtype == torch.uint8:
            if self.training and self.shift:
                seen = shifted(seen, self.shift)
            # Only the batch size is dynamic in the exported graph.
            features = self.encoder(seen.reshape(-1, *seen.shape[-3:]))
            seen = features.reshape(-1, *seen.shape[1:-3], features.shape[-1])
        tokens: Tensor = self.project(seen)
        return tokens


class PatchEmbedding(nn.Module):
    """Tokens ``[..., N, W]`` of camera frames, uint8 ``[..., H, W, 3]``: one for each patch, row by row.

    Convolutions without norms, as in the stem of Xiao et al. 2021; the policy adds position embeddings.

    Attributes:
        grid: rows and columns of patches.
        patches: N.
    """

    def __init__(self, recipe: EncoderRecipe, shape: tuple[int, ...], tokens: int) -> None:
        super().__init__()
        convolutions, rows, columns = _convolutions(recipe, shape, later_stride=2)
        self.grid, self.patches, self.shift = (rows, columns), rows * columns, recipe.shift
        self.layers = nn.Sequential(*convolutions).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.project = nn.Linear(recipe.channels[-1], tokens)

    def forward(self, frames: Tensor) -> Tensor:
        if self.training and self.shift:
            frames = shifted(frames, self.shift)
        maps = self.layers(_scaled(frames.reshape(-1, *frames.shape[-3:])))
        tokens: Tensor = self.project(maps.permute(0, 2, 3, 1).flatten(1, 2))
        return tokens.reshape(-1, *frames.shape[1:-3], *tokens.shape[1:])


def embedding(recipe: EncoderRecipe, shape: tuple[int, ...], tokens: int) -> ImageEmbedding | PatchEmbedding:
    """The embedding of a camera's frames that a recipe wants."""
    return (PatchEmbedding if recipe.tokens == "patches" else ImageEmbedding)(recipe, shape, tokens)


def shifted(frames: Tensor, most: int) -> Tensor:
    """Frames ``[B, ..., H, W, 3]``, each sample shifted at random, edges replicated (Yarats et al. 2021)."""
    batch, (height, width) = len(frames), frames.shape[-3:-1]
    flat = frames.reshape(batch, -1, height, 3 * width)
    wide = torch.cat([flat[..., :3].repeat(1, 1, 1, most), flat, flat[..., -3:].repeat(1, 1, 1, most)], 3)
    above, below = (edge.expand(-1, -1, most, -1) for edge in (wide[:, :, :1], wide[:, :, -1:]))
    padded, corners = torch.cat([above, wide, below], 2), torch.randint(2 * most + 1, (2, batch))
    # Slices, drawn on the CPU, are copied by rows; a gather of pixels takes twenty times as long.
    moved = [
        image[:, row : row + height, 3 * column : 3 * (column + width)]
        for image, row, column in zip(padded, *corners.tolist(), strict=True)
    ]
    return torch.stack(moved).reshape(frames.shape)


def _scaled(frames: Tensor) -> Tensor:
    """Frames ``[N, H, W, 3]`` as centred floats, channels first, ``[N, 3, H, W]``."""
    return frames.permute(0, 3, 1, 2).float().div_(255.0).sub_(0.5)  # in place: a third of the time


def _convolutions(recipe: EncoderRecipe, shape: tuple[int, ...], later_stride: int) -> tuple[list[nn.Module], int, int]:
    """The convolutions of an encoder, and the rows and columns of their output for a frame ``(H, W, 3)``."""
    first, second, *others = recipe.channels
    height, width = (recipe.pixels, recipe.pixels) if recipe.pixels else shape[:2]
    layers: list[nn.Module] = [Smaller(shape[0], shape[1], recipe.pixels)] if recipe.pixels else []
    layers += [nn.Conv2d(3, first, 4, stride=4), nn.ReLU()]
    layers += [nn.Conv2d(first, second, 3, stride=2, padding=1), nn.ReLU()]
    rows, columns = (_halved(size // 4) for size in (height, width))
    for before, after in zip((second, *others), others, strict=False):
        layers += [nn.Conv2d(before, after, 3, stride=later_stride, padding=1), nn.ReLU()]
        if later_stride == 2:
            rows, columns = _halved(rows), _halved(columns)
    if min(rows, columns) < 2:
        least = 12 if later_stride == 1 else 4 * 2 ** (len(recipe.channels) - 1) + 4
        raise ConfigError(
            f"camera frames of {height} x {width} are too small for the image encoder, which needs at least "
            f"{least} x {least}; give them a larger size in [observations]"
            + (", or leave encoder.pixels out" if recipe.pixels else "")
        )
    return layers, rows, columns


class Smaller(nn.Module):
    """Area downsampling of images ``[N, C, height, width]`` to ``[N, C, pixels, pixels]``, no more than they have."""

    rows: Tensor
    columns: Tensor

    def __init__(self, height: int, width: int, pixels: int) -> None:
        super().__init__()
        if pixels > min(height, width):
            raise ConfigError(
                f"encoder.pixels makes camera frames smaller: at most {min(height, width)} for frames of "
                f"{height} x {width}, got {pixels}"
            )
        self.register_buffer("rows", _areas(height, pixels), persistent=False)
        self.register_buffer("columns", _areas(width, pixels), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.rows @ images @ self.columns.T


def _areas(many: int, few: int) -> Tensor:
    """Weights ``[few, many]`` of area downsampling along one axis."""
    edges = torch.linspace(0, many, few + 1, dtype=torch.float64)[:, None]
    pixels = torch.arange(many, dtype=torch.float64)
    covered = torch.minimum(edges[1:], pixels + 1) - torch.maximum(edges[:-1], pixels)
    return (covered.clamp(min=0) * few / many).float()


def _halved(size: int) -> int:
    """Output size of a convolution with a stride of 2."""
    return (size + 1) // 2


def learned(
    recipe: CodesRecipe, specs: Mapping[str, ObservationSpec], episodes: Episodes, task: Task | None
) -> set[str]:
    """Names of the observations that a recipe's encoders are pre-trained to predict.

    Raises:
        ConfigError: if one is missing, is a camera's, or belongs to a policy without a camera; or if the environment
            has no random scenes.
    """
    names = set()
    for name, policy in recipe.policies.items():
        encoder = policy.encoder
        if not encoder.learns:
            continue
        numbers = [observed for observed in episodes.observation if observed not in episodes.cameras]
        if encoder.learns not in numbers:
            raise unknown_name(f"observation in encoder.learns of policy {name!r}", encoder.learns, numbers)
        if not specs[name].images:
            raise ConfigError(f"policy {name!r} has encoder.learns, but sees no camera; add one to sees")
        if encoder.scenes and (task is None or task.scenes is None):
            raise ConfigError(
                f"policy {name!r}: encoder.scenes needs an environment that shows random scenes, such as pusht-camera; "
                "leave it out to learn from the demonstrations' frames alone"
            )
        names.add(encoder.learns)
    return names


def encoder_stage(
    name: str, recipe: EncoderRecipe, camera: str, dataset: Dataset, task: Task | None, seed: int
) -> Stage:
    """The stage that pre-trains the encoder of one camera; the task shows random scenes, if the recipe wants some.

    Its module is the encoder with a linear ``readout``, which predicts an observation in standard deviations.
    """
    seed_weights(seed, Draw.ENCODER)
    mean, std = dataset.statistics[recipe.learns]
    encoder = ImageEncoder(recipe, dataset.train.episodes.frames(camera).shape[1:])
    model = nn.Sequential(OrderedDict(encoder=encoder, readout=nn.Linear(recipe.width, mean.numel())))

    def draw_batch(seen: Mapping[str, Any], number: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """A random batch of frames and labels."""
        rows = rng.integers(len(seen[camera]), size=number)
        labels = (torch.from_numpy(seen[recipe.learns][rows]) - mean) / std
        return torch.from_numpy(seen[camera][rows]), labels.flatten(1)

    @cache
    def scenes() -> Mapping[str, NDArray[Any]]:
        """The observations of the random scenes, ``[number, ...]`` by name."""
        assert task is not None and task.scenes is not None, "checked by learned"
        return task.scenes(recipe.scenes, stream(seed, Role.DATA, episode=Draw.SCENES))

    def error_of(frames: Tensor, labels: Tensor) -> Tensor:
        device = device_of(model)
        with autocast(recipe.width, recipe.bfloat16, device):
            predicted = model(frames.to(device))
        error: Tensor = predicted.float() - labels.to(device)
        return error

    def update(step: int) -> Losses:
        rng = stream(seed, Role.DATA, episode=Draw.FRAMES, step=step)
        scene_count = recipe.batch // 2 if recipe.scenes else 0
        frames, labels = draw_batch(dataset.train.episodes.observation, recipe.batch - scene_count, rng)
        if scene_count:
            scene_frames, scene_labels = draw_batch(scenes(), scene_count, rng)
            frames, labels = torch.cat([frames, scene_frames]), torch.cat([labels, scene_labels])
        error = error_of(frames, labels)
        loss = nn.functional.smooth_l1_loss(error, torch.zeros_like(error), beta=_SMALL)
        return loss, {"error": error.abs().mean()}

    def validate(module: nn.Module) -> Metrics:
        rng = stream(seed, Role.DATA, episode=Draw.FRAMES)
        return {"error": error_of(*draw_batch(dataset.held_out.episodes.observation, 1024, rng)).abs().mean()}

    return Stage(name, model, recipe, update, validate, seed)


def encoded(dataset: Dataset, camera: str, encoder: ImageEncoder) -> Dataset:
    """Replaces a camera's frames by the encoder's features ``[N, width]``."""
    train, held_out = (
        windows.with_observation(camera, features_of(windows.episodes.frames(camera), encoder))
        for windows in (dataset.train, dataset.held_out)
    )
    return replace(dataset, train=train, held_out=held_out)


@torch.no_grad()
def features_of(frames: Any, encoder: nn.Module) -> NDArray[np.float32]:
    """Features ``[N, ..., width]`` of frames ``[N, ..., H, W, 3]``."""
    parts = []
    for first in range(0, len(frames), _BATCH):
        part = np.asarray(frames[np.arange(first, min(first + _BATCH, len(frames)))])
        features = encoder(torch.from_numpy(part.reshape(-1, *part.shape[-3:])))
        parts.append(features.reshape(*part.shape[:-3], -1).numpy())
    return np.concatenate(parts)
