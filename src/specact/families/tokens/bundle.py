"""A bundle of one token policy: networks, token embedding, units, and a manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.network import CPU, Compute
from specact.families.chunks.flow import FlowUnits, read_flow_units
from specact.families.chunks.policy import ChunkSpec
from specact.families.tokens.bins import BINS
from specact.families.tokens.network import TokenNetworks
from specact.families.tokens.policy import TokenPolicy

NETWORKS = {"encoder": "encoder.onnx", "decoder": "decoder.onnx"}
TOKEN_PARTS = {**NETWORKS, "embedding": "embedding.safetensors", "normalisation": "normalisation.safetensors"}


@dataclass(frozen=True)
class TokenBundle(Bundle[ChunkSpec]):
    """A loaded bundle that holds a token policy.

    Attributes:
        networks, units: the parts.
    """

    networks: TokenNetworks
    units: FlowUnits

    def policy(self, temperature: float = 0.0) -> TokenPolicy:
        """The policy at this temperature; the networks are shared."""
        return TokenPolicy(self.networks, self.units, self.spec, temperature=temperature)


def load_tokens(name_or_path: str | Path, *, compute: Compute = CPU) -> TokenBundle:
    """Loads a bundle of a token policy and refuses parts that do not fit together.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package.
        compute: where its networks run.

    Raises:
        BundleError: if a part is missing, damaged, or does not match its fingerprint in the manifest, or if it is not a
            token policy's bundle.
        ConfigError: if there is no bundle of that name.
    """
    bundle = open_bundle(name_or_path, "tokens", ChunkSpec, TOKEN_PARTS)
    embedding = bundle.tensors("embedding", {"embedding": (np.float32, (BINS, "width"))})["embedding"]
    networks = TokenNetworks(bundle.files, embedding, bundle.spec, bundle.manifest.words, compute=compute)
    return TokenBundle(bundle.path, bundle.manifest, bundle.spec, bundle.files, networks, read_flow_units(bundle))
