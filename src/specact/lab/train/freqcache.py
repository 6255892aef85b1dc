"""Export of FreqCache's network, which recomputes a part of a flow policy's prefix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from specact import __version__
from specact.bundle.manifest import write_manifest
from specact.errors import BundleError, ConfigError
from specact.families.chunks.bundle import FlowBundle
from specact.families.freqcache.bundle import FREQCACHE, REFRESH_PARTS, Patches, RefreshSpec
from specact.files import write_whole
from specact.lab.train.attention import by_head
from specact.lab.train.chunk_recipe import ChunkRecipe
from specact.lab.train.encoder import PatchEmbedding
from specact.lab.train.export import PARITY, store_as_half, to_onnx
from specact.lab.train.flow import Prefix
from specact.lab.train.quantise import folded
from specact.lab.train.rebuild import exported_weights
from specact.toml import build


class RefreshedPrefix(nn.Module):
    """The prefix on a subset of its tokens, see :class:`~specact.families.freqcache.bundle.Refresh`."""

    def __init__(self, prefix: Prefix) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Tensor, sources: Tensor, held: Tensor) -> Tensor:
        """From tokens ``[1, n, W]``, sources ``[N]`` and the old cache to the new one."""
        x, made = tokens, list[Tensor]()
        for number, (read, old) in enumerate(zip(self.prefix.keys_values, held.unbind(1), strict=True)):
            if number:
                x = self.prefix.attended(number - 1, x, *made[-1].unbind(1))
            new = torch.stack(by_head(read(x), 2, self.prefix.heads), 1)
            made.append(torch.cat([old, new], -2).index_select(-2, sources))
        return torch.stack(made, 1)


def add_refresh(target: FlowBundle) -> Path:
    """Exports the network from a flow policy's prefix to its bundle, with the positions of its cameras' tokens.

    Returns:
        The folder; the manifest is written last, so that an incomplete export cannot be loaded.

    Raises:
        ConfigError: if the policy has no camera with patches, or one with a history, or its bundle lacks the prefix's
            recipe.
        BundleError: if the exported network's outputs differ from the policy's prefix.
    """
    recipe, path = _recipe(target), target.path / FREQCACHE
    cameras = _cameras(target, recipe)
    refreshed = RefreshedPrefix(_prefix(target, recipe)).eval().requires_grad_(False)
    path.mkdir(exist_ok=True)
    (path / "manifest.json").unlink(missing_ok=True)
    tokens = target.networks.tokens([target.spec.observation.zeros()])
    cache = target.networks.cache([target.spec.observation.zeros()])
    given = {
        "tokens": torch.from_numpy(tokens[:, :5].copy()), "sources": torch.arange(cache.shape[4]),
        "held": torch.from_numpy(cache),
    }  # fmt: skip
    proto = to_onnx(refreshed, {**given}, ["cache"], free_batch=False, free={"tokens": {1: "tokens"}})
    if recipe.precision == "float16":
        store_as_half(proto)
    onnx.checker.check_model(proto)
    file = path / REFRESH_PARTS["refresh"]
    write_whole(file, proto.SerializeToString())
    manifest = {
        "kind": "freqcache", "name": f"{target.name}-refresh", "env": target.env, "specact": __version__,
        "parity": {"refresh": _parity(target, file, tokens.shape[1:])},
    }  # fmt: skip
    write_manifest(path, manifest, RefreshSpec(target.fingerprint, cameras), REFRESH_PARTS)
    return path


def _recipe(target: FlowBundle) -> ChunkRecipe:
    kept = {key: entry for key, entry in target.manifest.recipe.items() if entry is not None}
    kept.pop("teacher", None)
    return build(ChunkRecipe, kept, "recipe")


def _cameras(target: FlowBundle, recipe: ChunkRecipe) -> dict[str, Patches]:
    """Positions of each camera's tokens: after words come observations without a history, then those with one."""
    spec = target.spec.observation
    if not spec.images or recipe.encoder.tokens != "patches" or any(spec[name].history > 1 for name in spec.images):
        raise ConfigError(
            f"{target.name} reads no cameras in patches, one frame each, and of nothing else a part can be reused; "
            'train a policy with encoder.tokens = "patches" and no history of its cameras'
        )
    place, found = 0 if target.manifest.words is None else target.manifest.words.length, {}
    for name in sorted(spec.fields, key=lambda name: spec[name].history > 0):
        if not spec[name].is_image:
            place += max(1, spec[name].history)
            continue
        embedding = PatchEmbedding(recipe.encoder, spec[name].shape, 1)
        if any(side % patches for side, patches in zip(spec[name].shape, embedding.grid, strict=False)):
            raise ConfigError(
                f"{target.name} reads {name} of {spec[name].shape[0]} x {spec[name].shape[1]} pixels in "
                f"{embedding.grid[0]} x {embedding.grid[1]} patches, which are no whole pixels; a part can only be "
                "reused where they are"
            )
        found[name] = Patches(place, *embedding.grid)
        place += embedding.patches
    return found


def _prefix(target: FlowBundle, recipe: ChunkRecipe) -> Prefix:
    prefix = Prefix(recipe)
    weights = exported_weights(folded(target.files["prefix"]))
    lost = sorted(set(prefix.state_dict()) - set(weights))
    if lost:
        raise ConfigError(
            f"the prefix of {target.name} cannot be rebuilt: the exported network does not name {lost[0]!r}"
        )
    prefix.load_state_dict({name: weights[name] for name in prefix.state_dict()})
    return prefix


def _parity(target: FlowBundle, file: Path, tokens: tuple[int, ...]) -> float:
    """The largest difference to the policy's own prefix if all tokens are recomputed."""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    read, old = (rng.standard_normal((1, *tokens)).astype(np.float32) for _ in range(2))
    count = tokens[0]
    given = {"tokens": read, "sources": count + np.arange(count), "held": target.networks.cache([], old)}
    difference = float(np.abs(session.run(None, given)[0] - target.networks.cache([], read)).max())
    if difference > PARITY:
        raise BundleError(f"{file} differs from the policy's prefix by {difference:.1e}, more than {PARITY:.0e}")
    return difference
