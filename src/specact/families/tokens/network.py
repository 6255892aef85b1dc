"""The networks of a token policy on ONNX Runtime: an encoder, and a decoder for all decodings.

One decoder graph processes the prefix, the next token of every window, or all nodes of a candidate tree in one pass.
The attention mask and the KV cache are inputs; the caller manages the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.bundle.network import CPU, Compute, Network, Shapes
from specact.bundle.words import NetworkInputs, Words
from specact.errors import BundleError
from specact.families.chunks.policy import ChunkSpec
from specact.families.tokens.bins import BINS
from specact.observation import Window

Array = NDArray[np.float32]
Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Reading:
    """The outputs of a decoder, or of a drafting head, for N tokens of each of B windows.

    Attributes:
        logits: of the next token after each of them, ``[B, N, 256]``.
        features: last hidden states, from which the logits are computed, ``[B, N, W]``.
        entries: their keys and values in every layer, ``[B, L, 2, heads, N, W / heads]``; a head's have no axis L.
    """

    logits: Array
    features: Array
    entries: Array


class Cache:
    """KV cache of B windows.

    Args:
        entries: buffer for S tokens, ``[B, L, 2, heads, S, W / heads]``.

    Attributes:
        entries: as given.
        lengths: number of cached tokens of each window, int64 ``[B]``.
    """

    def __init__(self, entries: Array) -> None:
        self.entries, self.lengths = entries, np.zeros(len(entries), np.int64)

    def select(self, rows: NDArray[np.int64]) -> Cache:
        """A copy of the given ones of the B windows."""
        other = Cache(self.entries[rows])
        other.lengths[:] = self.lengths[rows]
        return other

    @property
    def seen(self) -> Mask:
        """Which of the S slots are filled, ``[B, S]``."""
        seen: Mask = np.arange(self.entries.shape[-2]) < self.lengths[:, None]
        return seen

    def keep(self, entries: Array, chosen: Sequence[NDArray[np.int64]] | None = None) -> None:
        """Appends the entries of accepted tokens.

        Args:
            entries: of a :class:`Reading`.
            chosen: indices of the accepted ones of the N tokens, in order, for each window; all if not given.
        """
        chosen = [np.arange(entries.shape[-2])] * len(entries) if chosen is None else chosen
        for row, (start, kept) in enumerate(zip(self.lengths.tolist(), chosen, strict=True)):
            self.entries[row, ..., start : start + len(kept), :] = entries[row][..., kept, :]
            self.lengths[row] += len(kept)


class TokenNetworks:
    """Encoder and decoder of one token policy.

    Args:
        files: the ``.onnx`` file of each part: ``encoder``, ``decoder``; without a decoder, on a device whose server
            decodes, only the encoder can be used.
        embedding: of the 256 tokens, float32 ``[256, W]``.
        spec: of the bundle they belong to.
        words: vocabulary of its instructions.
        compute: where they run.

    Attributes:
        prefix: P, tokens of an observation, before those of the chunk.
        length: tokens of a chunk, one for every dimension of every action.
        width: W, of embeddings and features.
        decodes: whether there is a decoder.

    Raises:
        BundleError: if a file is no ONNX model, or they do not fit the spec or each other.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        embedding: Array,
        spec: ChunkSpec,
        words: Words | None,
        *,
        compute: Compute = CPU,
    ) -> None:
        self._inputs, self._embedding = NetworkInputs(spec.observation, words), embedding
        self.length, self.width = spec.chunk * spec.actions, embedding.shape[1]
        tokens = ("batch", "prefix", self.width)
        self._encoder = Network(files["encoder"], self._inputs.shapes, {"tokens": tokens}, compute)
        self.prefix = self._encoder.sizes["prefix"]
        self.decodes = "decoder" in files
        if self.decodes:
            slots, each = self.prefix + self.length, ("batch", "tokens")
            inputs: Shapes = {
                "embeddings": (*each, self.width), "positions": each, "seen": ("batch", slots),
                "among": (*each, "tokens"), "cache": ("batch", "layers", 2, "heads", slots, "each"),
            }  # fmt: skip
            entries = ("batch", "layers", 2, "heads", "tokens", "each")
            outputs = {"logits": (*each, BINS), "features": (*each, self.width), "entries": entries}
            self._decoder = Network(files["decoder"], inputs, outputs, compute)
            sizes = self._decoder.sizes
            self._cache = sizes["layers"], 2, sizes["heads"], slots, sizes["each"]

    def tokens(self, windows: Sequence[Window]) -> Array:
        """The encoder's tokens of B windows, ``[B, P, W]``."""
        return self._encoder.run(self._inputs.stack(windows))[0]

    def check_decodes(self) -> None:
        """Refuses what needs a decoder.

        Raises:
            BundleError: without a decoder.
        """
        if not self.decodes:
            raise BundleError(
                "this copy of a token policy was exported without its decoder, which runs on the server. Connect to a "
                "server, as with specact run --server URL, or use the complete bundle"
            )

    def prefill(self, prefix: Array) -> tuple[Cache, Reading]:
        """Processes the encoder's tokens of B windows, with full attention.

        Returns:
            A new cache with the prefix, and the decoder's outputs; the last logits are of the first action token.

        Raises:
            BundleError: without a decoder.
        """
        self.check_decodes()
        batch, count, _ = prefix.shape
        cache = Cache(np.zeros((batch, *self._cache), np.float32))
        positions = np.broadcast_to(np.arange(count), (batch, count))
        found = self._read(cache, prefix, positions, np.ones((batch, count, count), np.bool_))
        cache.keep(found.entries)
        return cache, found

    def read(self, cache: Cache, tokens: Tokens, places: NDArray[np.int64], among: Mask) -> Reading:
        """Processes N action tokens of each of B windows in one pass; the cache is not modified.

        Args:
            cache: of the B windows.
            tokens: 0 to 255, ``[B, N]``.
            places: position of each in the chunk, 0 to ``length - 1``, ``[B, N]``; alternative candidates share one.
            among: attention mask among the tokens, row attends to column, ``[B, N, N]``; the diagonal is True.
        """
        return self._read(cache, self._embedding[tokens], self.prefix + places, among)

    def _read(self, cache: Cache, embeddings: Array, positions: NDArray[np.int64], among: Mask) -> Reading:
        given: dict[str, Any] = {
            "embeddings": embeddings, "positions": positions, "seen": cache.seen, "among": among,
            "cache": cache.entries,
        }  # fmt: skip
        return Reading(*self._decoder.run(given))


def causal(batch: int, count: int) -> Mask:
    """The causal attention mask, ``[B, N, N]``."""
    return np.broadcast_to(np.tri(count, dtype=np.bool_), (batch, count, count))
