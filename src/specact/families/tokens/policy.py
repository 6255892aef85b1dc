"""A policy that writes actions token by token: its bins, its networks on ONNX Runtime, greedy decoding.

Every dimension of an action is one of 256 uniform bins (RT-1, Brohan et al. 2022; OpenVLA, Kim et al. 2024); unlike
there, the outermost bins are centred on -1 and 1, so that an action at its limit is represented exactly. An encoder
reads the observation. One decoder graph processes the prefix, the next token of every window, or all nodes of a
candidate tree in one pass: the attention mask and the KV cache are its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import Words
from specact.bundle.network import CPU, Compute, Network, NetworkInputs, Shapes
from specact.errors import BundleError
from specact.families.chunks.flow import FlowUnits, read_flow_units
from specact.families.chunks.policy import BatchPolicy, Chunk, ChunkSpec
from specact.families.tokens.speculative import (
    NOTHING,
    UNTESTED,
    Acceptance,
    Array,
    Candidates,
    Decoded,
    GroupCandidates,
    Mask,
    Speculation,
    Tokens,
    TreeDrafter,
    decode,
)
from specact.observation import Window
from specact.rng import StepAddress
from specact.types import value

NETWORKS = {"encoder": "encoder.onnx", "decoder": "decoder.onnx"}
TOKEN_PARTS = {**NETWORKS, "embedding": "embedding.safetensors", "normalisation": "normalisation.safetensors"}
BINS = 256
# The target's own drafters, which run beside it. The order is part of the wire format: only append.
OWN_DRAFTERS = ("none", "bigram", "head")
CENTRES: Array = np.linspace(-1.0, 1.0, BINS, dtype=np.float32)
CENTRES.flags.writeable = False


def to_tokens(actions: Array) -> Tokens:
    """The nearest bin of every number, 0 to 255; beyond [-1, 1] the outermost."""
    tokens: Tokens = np.rint((np.clip(actions, -1.0, 1.0) + 1.0) * ((BINS - 1) / 2)).astype(np.int64)
    return tokens


def to_actions(tokens: Tokens) -> Array:
    """The centres of bins, float32 in [-1, 1]."""
    centres: Array = CENTRES[tokens]
    return centres


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

    Attributes:
        entries: buffer for S tokens, ``[B, L, 2, heads, S, W / heads]``.
        lengths: number of cached tokens of each window, int64 ``[B]``.
    """

    def __init__(self, entries: Array) -> None:
        self.entries, self.lengths = entries, np.zeros(len(entries), np.int64)

    def select(self, rows: Tokens) -> Cache:
        """A copy of the given ones of the B windows."""
        other = Cache(self.entries[rows])
        other.lengths[:] = self.lengths[rows]
        return other

    @property
    def seen(self) -> Mask:
        """Which of the S slots are filled, ``[B, S]``."""
        seen: Mask = np.arange(self.entries.shape[-2]) < self.lengths[:, None]
        return seen

    def keep(self, entries: Array, chosen: Sequence[Tokens]) -> None:
        """Appends the entries of a :class:`Reading`: for each window those with the given indices, in order."""
        for row, (start, kept) in enumerate(zip(self.lengths.tolist(), chosen, strict=True)):
            self.entries[row, ..., start : start + len(kept), :] = entries[row][..., kept, :]
            self.lengths[row] += len(kept)


class TokenNetworks:
    """Encoder and decoder of one token policy; without a decoder, whose server decodes, only the encoder can be used.

    Attributes:
        prefix, length: P, tokens of an observation; T, those of a chunk, one for every dimension of every action.
        width: W, of embeddings ``[256, W]`` and features.
        decodes: whether there is a decoder.

    Raises:
        BundleError: if a file is no ONNX model, or they do not fit the spec or each other.
    """

    def __init__(
        self, files: Mapping[str, Path], embedding: Array, spec: ChunkSpec, words: Words | None, *,
        compute: Compute = CPU,
    ) -> None:  # fmt: skip
        self._inputs, self._embedding = NetworkInputs(spec.observation, words), embedding
        self.length, self.width = spec.chunk * spec.actions, embedding.shape[1]
        tokens = ("batch", "prefix", self.width)
        self._encoder = Network(files["encoder"], self._inputs.shapes, {"tokens": tokens}, compute)
        self.prefix = self._encoder.sizes["prefix"]
        self.decodes = "decoder" in files
        if self.decodes:
            slots, rows = self.prefix + self.length, ("batch", "tokens")
            inputs: Shapes = {
                "embeddings": (*rows, self.width), "positions": rows, "seen": ("batch", slots),
                "among": (*rows, "tokens"), "cache": ("batch", "layers", 2, "heads", slots, "each"),
            }  # fmt: skip
            entries = ("batch", "layers", 2, "heads", "tokens", "each")
            outputs = {"logits": (*rows, BINS), "features": (*rows, self.width), "entries": entries}
            self._decoder = Network(files["decoder"], inputs, outputs, compute)
            sizes = self._decoder.sizes
            self._cache = sizes["layers"], 2, sizes["heads"], slots, sizes["each"]

    def tokens(self, windows: Sequence[Window]) -> Array:
        """The encoder's tokens of B windows, ``[B, P, W]``."""
        return self._encoder.run(self._inputs.stack(windows))[0]

    def check_decodes(self) -> None:
        """Raises BundleError without a decoder."""
        if not self.decodes:
            raise BundleError(
                "this copy of a token policy was exported without its decoder, which runs on the server. Connect to a "
                "server, as with specact run --server URL, or use the complete bundle"
            )

    def prefill(self, prefix: Array) -> tuple[Cache, Reading]:
        """Processes the encoder's tokens of B windows, with full attention; BundleError without a decoder.

        Gives a new cache with the prefix, and the decoder's outputs; the last logits are of the first action token.
        """
        self.check_decodes()
        batch, count, _ = prefix.shape
        cache = self.cache(batch)
        positions = np.broadcast_to(np.arange(count), (batch, count))
        reading = self._read(cache, prefix, positions, np.ones((batch, count, count), np.bool_))
        cache.keep(reading.entries, [np.arange(count)] * batch)
        return cache, reading

    def cache(self, batch: int) -> Cache:
        """An empty cache of B windows."""
        return Cache(np.zeros((batch, *self._cache), np.float32))

    def read(self, cache: Cache, tokens: Tokens, places: Tokens, among: Mask) -> Reading:
        """Processes N action tokens of each of B windows in one pass; the cache is not modified.

        Args:
            cache: of the B windows.
            tokens: 0 to 255, ``[B, N]``.
            places: position of each in the chunk, 0 to ``length - 1``, ``[B, N]``; alternative candidates share one.
            among: attention mask among the tokens, row attends to column, ``[B, N, N]``; the diagonal is True.
        """
        return self._read(cache, self._embedding[tokens], self.prefix + places, among)

    def _read(self, cache: Cache, embeddings: Array, positions: Tokens, among: Mask) -> Reading:
        inputs: dict[str, Any] = {
            "embeddings": embeddings, "positions": positions, "seen": cache.seen, "among": among,
            "cache": cache.entries,
        }  # fmt: skip
        return Reading(*self._decoder.run(inputs))


def causal(batch: int, count: int) -> Mask:
    """The causal attention mask, ``[B, N, N]``."""
    return np.broadcast_to(np.tri(count, dtype=np.bool_), (batch, count, count))


@value
class DecodingRequest:
    """The request for a chunk: all inputs of the target besides the observation, and what gates see of them.

    Attributes:
        candidates: drafted on the device, more likely ones first, ``[K, T]``; each is a chunk, or the beginning of one
            and -1 from there on; together they are a tree. The target predicts the first token itself.
        then: which of :data:`OWN_DRAFTERS` proposes without candidates, or after their rejection.
        rule, tail: for accepting tokens; what replaces everything from the first rejected token on, ``[T]``.
        combined: whether groups of the candidates are combined, see ``GroupCandidates``.
        feature, retrieved: not sent: the observation's of unit length, ``[F]``, or None; whether a memory drafted.
    """

    candidates: Tokens
    then: str
    rule: Acceptance
    combined: bool = False
    tail: Tokens | None = None
    feature: Array | None = None
    retrieved: bool = False


GREEDY = DecodingRequest(np.zeros((0, 0), np.int64), "none", UNTESTED)


@value
class Prefilled:
    """B windows prefilled by a target, for any number of requests each.

    Attributes:
        policy: the target.
        seen: the encoder's tokens of the windows, ``[B, P, W]``.
        cache, prefix: KV cache and decoder outputs of the windows.
    """

    policy: TokenPolicy
    seen: Array
    cache: Cache
    prefix: Reading

    def decode(self, requests: Sequence[DecodingRequest]) -> list[Decoded]:
        """The decoded chunks for a request of each window, in one batch."""
        speculations = [self._speculation(request) for request in requests]
        cache = self.cache.select(np.arange(len(requests)))
        # Extreme observations overflow to NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            return decode(self.policy.networks, cache, self.prefix, speculations)

    def _speculation(self, request: DecodingRequest) -> Speculation:
        rule, chunks = request.rule, request.candidates
        drafters = [] if request.then == "none" else [self.policy.drafters[request.then]]
        if len(chunks):
            first = GroupCandidates(chunks, rule.groups, rule.each == 0) if request.combined else Candidates(chunks)
            drafters = [first, *drafters]
        return Speculation(drafters or [NOTHING], rule, request.tail)


class TokenPolicy(BatchPolicy):
    """A :class:`~specact.families.chunks.policy.ChunkPolicy` of the parts of one bundle, and the target of a pair.

    A chunk is one token for every dimension of every action, in that order. Each is the most likely one given the
    previous ones, ``p(token | observation, previous tokens)``, with one decoder pass per token after the first; as the
    target of a pair, what it is asked for. ``drafters`` are its own, by their names in :data:`OWN_DRAFTERS`.
    """

    steady = True

    def __init__(
        self, networks: TokenNetworks, units: FlowUnits, spec: ChunkSpec, drafters: Mapping[str, TreeDrafter]
    ) -> None:
        self.networks, self.units, self.spec, self.drafters = networks, units, spec, drafters

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> list[Chunk]:
        return [self.chunk(decoded) for decoded in self.decode(windows)]

    def decode(self, windows: Sequence[Window]) -> list[Decoded]:
        """The chunks of B windows by greedy decoding."""
        return self.prefill(windows).decode([GREEDY] * len(windows))

    def answer(self, window: Window, address: StepAddress) -> Prefilled:
        """As a :class:`~specact.pair.TargetPolicy`; decoding is greedy and needs no random stream."""
        return self.prefill([window])

    def prefill(self, windows: Sequence[Window]) -> Prefilled:
        """B windows, prefilled in one batch."""
        with np.errstate(over="ignore", invalid="ignore"):
            seen = self.networks.tokens([self.spec.observation.select(window) for window in windows])
            return Prefilled(self, seen, *self.networks.prefill(seen))

    def chunk(self, decoded: Decoded) -> Chunk:
        """The actions ``[H, A]`` of a chunk in the environment's units; NaN if any logit was not finite."""
        actions = to_actions(decoded.tokens).reshape(self.spec.chunk, self.spec.actions)
        return self.units.to_environment(actions) if decoded.finite else np.full_like(actions, np.nan)


@dataclass(frozen=True)
class TokenBundle(Bundle[ChunkSpec]):
    """A loaded bundle that holds a token policy."""

    networks: TokenNetworks
    units: FlowUnits

    def policy(self, drafters: Mapping[str, TreeDrafter] | None = None) -> TokenPolicy:
        """The policy, with drafters of its own if there are any; the networks are shared."""
        return TokenPolicy(self.networks, self.units, self.spec, drafters or {})


def load_tokens(name_or_path: str | Path, *, compute: Compute = CPU) -> TokenBundle:
    """Loads a bundle of a token policy, a folder or a name, and refuses parts that do not fit together.

    Raises:
        BundleError, ConfigError: as :func:`~specact.bundle.bundle.open_bundle`; BundleError for parts that do not fit.
    """
    bundle = open_bundle(name_or_path, "tokens", ChunkSpec, TOKEN_PARTS)
    embedding = bundle.tensors("embedding", {"embedding": (np.float32, (BINS, "width"))})["embedding"]
    networks = TokenNetworks(bundle.files, embedding, bundle.spec, bundle.manifest.words, compute=compute)
    return TokenBundle(bundle.path, bundle.manifest, bundle.spec, bundle.files, networks, read_flow_units(bundle))
