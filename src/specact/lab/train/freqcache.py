"""Export of FreqCache's network, which recomputes a part of a flow policy's prefix."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from specact import __version__
from specact.bundle.manifest import WEIGHTS
from specact.errors import ConfigError
from specact.families.chunks.flow import FlowBundle
from specact.lab.train.attention import by_head, module_name, unknown
from specact.lab.train.encoder import PatchEmbedding
from specact.lab.train.export import AXES, BundleFolder, Graph, Input, WeightsFile, below, deployed, stored_weights
from specact.lab.train.flow import Encoder, Prefix
from specact.lab.train.recipe import ChunkRecipe, chunk_recipe_of
from specact.systems.freqcache import FREQCACHE, REFRESH_PARTS, Patches, RefreshSpec


class RefreshedPrefix(nn.Module):
    """The prefix on a subset of its tokens, see :class:`~specact.systems.freqcache.RefreshBundle`."""

    def __init__(self, prefix: Prefix) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Tensor, sources: Tensor, held: Tensor) -> Tensor:
        """From tokens ``[1, n, W]``, sources ``[N]`` and the old cache to the new one."""
        x, caches = tokens, list[Tensor]()
        for number, (read, old) in enumerate(zip(self.prefix.keys_values, held.unbind(1), strict=True)):
            if number:
                x = self.prefix.attended(number - 1, x, *caches[-1].unbind(1))
            new = torch.stack(by_head(read(x), 2, self.prefix.heads), 1)
            caches.append(torch.cat([old, new], -2).index_select(-2, sources))
        return torch.stack(caches, 1)


def add_refresh(target: FlowBundle) -> Path:
    """Exports the network from a flow policy's prefix to a folder of its bundle, with its cameras' positions.

    Raises:
        ConfigError: if the policy has no camera with patches, or one with a history, or its bundle lacks the prefix's
            recipe.
        BundleError: if the exported network's outputs differ from the policy's prefix.
    """
    recipe = chunk_recipe_of(target.manifest.recipe, target.name)
    cameras, prefix, weights = _cameras(target, recipe), Prefix(recipe), stored_weights(target.path / WEIGHTS)
    prefix.load_state_dict({name: weights[f"prefix.{name}"] for name in prefix.state_dict()})

    tokens = target.networks.tokens([target.spec.observation.zeros()])
    count = tokens.shape[1]
    inputs = {
        "tokens": Input((1, "tokens", recipe.width)),
        "sources": Input((count,), below(count + AXES["tokens"](1))),
        "held": Input(target.networks.cache([], tokens).shape),
    }
    folder = BundleFolder(target.path / FREQCACHE, REFRESH_PARTS)
    folder.export(
        "refresh", Graph(deployed(RefreshedPrefix(prefix)), inputs, ["cache"]), WeightsFile(target.path / WEIGHTS)
    )
    manifest = {"kind": "freqcache", "name": f"{target.name}-refresh", "env": target.env, "specact": __version__}
    return folder.finish(manifest, RefreshSpec(target.fingerprint, cameras))


def _cameras(target: FlowBundle, recipe: ChunkRecipe) -> dict[str, Patches]:
    """Positions of each camera's tokens."""
    spec = target.spec.observation
    if not spec.images or recipe.encoder.tokens != "patches" or any(spec[name].history > 1 for name in spec.images):
        raise ConfigError(
            f"{target.name} reads no cameras in patches, one frame each, and of nothing else a part can be reused; "
            'train a policy with encoder.tokens = "patches" and no history of its cameras'
        )
    encoder, place, grids = Encoder(spec, recipe, unknown(spec.fields), target.manifest.words), 0, dict[str, Patches]()
    for name, tokens in encoder.tokens_of.items():
        embedding = getattr(encoder, f"embed_{module_name(name)}", None)
        if isinstance(embedding, PatchEmbedding):
            if any(side % patches for side, patches in zip(spec[name].shape, embedding.grid, strict=False)):
                raise ConfigError(
                    f"{target.name} reads {name} of {spec[name].shape[0]} x {spec[name].shape[1]} pixels in "
                    f"{embedding.grid[0]} x {embedding.grid[1]} patches, which are no whole pixels; a part can only be "
                    "reused where they are"
                )
            grids[name] = Patches(place, *embedding.grid)
        place += tokens
    return grids
