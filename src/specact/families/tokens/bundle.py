"""A bundle of one token policy: networks, token embedding, units, and a manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from specact.errors import BundleError
from specact.families.chunks.bundle import read_chunk_spec, read_flow_units
from specact.families.chunks.flow import FlowUnits
from specact.families.chunks.policy import ChunkSpec
from specact.families.codes.bundle import find_bundle
from specact.families.head import check_head
from specact.families.tokens.bins import BINS
from specact.families.tokens.network import Array, TokenNetworks
from specact.families.tokens.policy import TokenPolicy
from specact.families.words import read_words
from specact.runtime.manifest import BundleFolder, left_out, read_manifest

NETWORKS = {"encoder": "encoder.onnx", "decoder": "decoder.onnx"}
TOKEN_PARTS = {**NETWORKS, "embedding": "embedding.safetensors", "normalisation": "normalisation.safetensors"}


@dataclass(frozen=True)
class TokenBundle(BundleFolder):
    """A loaded bundle that holds a token policy.

    Attributes:
        spec, networks, units: the parts.
    """

    spec: ChunkSpec
    networks: TokenNetworks
    units: FlowUnits

    def policy(self, temperature: float = 0.0) -> TokenPolicy:
        """The policy at this temperature; the networks are shared."""
        return TokenPolicy(self.networks, self.units, self.spec, temperature=temperature)


def load_tokens(name_or_path: str | Path, *, provider: str = "CPUExecutionProvider", threads: int = 1) -> TokenBundle:
    """Loads a bundle of a token policy and refuses parts that do not fit together.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if a part is missing, damaged, or does not match its fingerprint in the manifest, or if it is not a
            token policy's bundle.
        ConfigError: if there is no bundle of that name, or no such execution provider.
    """
    path = find_bundle(name_or_path)
    manifest = read_manifest(path, "tokens", TOKEN_PARTS)
    check_head(path, manifest)
    spec = read_chunk_spec(path, manifest)
    networks = TokenNetworks(
        {part: path / file for part, file in NETWORKS.items() if part not in left_out(manifest)},
        _read_embedding(path / TOKEN_PARTS["embedding"]),
        spec,
        read_words(manifest),
        provider=provider,
        threads=threads,
    )
    return TokenBundle(path, manifest, spec, networks, read_flow_units(path / TOKEN_PARTS["normalisation"], spec))


def _read_embedding(file: Path) -> Array:
    try:
        found = load_file(file).get("embedding")
    except (SafetensorError, OSError, TypeError, KeyError) as error:  # the last two for dtypes that NumPy lacks
        raise BundleError(f"{file} is damaged ({error}); copy the bundle again") from None
    if found is None or found.ndim != 2 or len(found) != BINS or found.dtype != np.float32:
        raise BundleError(f"{file} holds no embedding of {BINS} tokens in float32; export the bundle again")
    return found
