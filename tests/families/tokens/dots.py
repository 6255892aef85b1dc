"""The task of the token policy of these tests, observations as it never saw them, and what pairs with it play."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from specact.families.tokens.policy import TokenNetworks, causal
from specact.families.tokens.speculative import Decoded
from specact.gates.gate import Always, Gate
from specact.lab.data.episodes import Episodes
from specact.lab.rollout.processes import serving
from specact.lab.train.recipe import ChunkRecipe, EncoderRecipe
from specact.observation import Window
from specact.pair import Pair, Verifier
from specact.policy import SpeculativePolicy
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.target import remote_verifier
from specact.types import StepRecord
from specact.wire.arrays import Layout

SIDE, TOLD = 24, ("go left", "go right")
RECIPE = ChunkRecipe(
    kind="tokens", bundle="dots", rate_hz=10.0, data=("dots",), sees=("image", "state"), instruction=True, window=1,
    chunk=3, layers=2, heads=2, width=32, dropout=0.0, steps=1, batch=64, learning_rate=4e-3, warmup=1,
    average=0.98, bfloat16=False, encoder=EncoderRecipe(tokens="patches", channels=(16, 32)),
)  # fmt: skip


def dots() -> Episodes:
    """Episodes of noise, whose actions span a range."""
    rng, rows = np.random.default_rng(0), 24
    frames, states = rng.integers(0, 256, (rows, SIDE, SIDE, 3), dtype=np.uint8), rng.normal(size=(rows, 2))
    return Episodes(
        {"image": frames, "state": states.astype(np.float32)},
        np.linspace([-1.0, 1.0], [1.0, -1.0], rows, dtype=np.float32),
        np.arange(6, rows + 1, 6),
        instructions=tuple(TOLD[episode % 2] for episode in range(rows // 6)),
    )


def window(row: int, state: float = 0.0) -> Window:
    """A frame of noise, and this state plus noise of 2."""
    rng = np.random.default_rng(row)
    frame = rng.integers(0, 256, (1, SIDE, SIDE, 3), dtype=np.uint8)
    return Window({"image": frame, "state": (state + rng.normal(0.0, 2.0, (1, 2))).astype(np.float32)}, TOLD[row % 2])


SEEN = [window(row) for row in range(420)]


def rngs(count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(row) for row in range(count)]


def reread(networks: TokenNetworks, seen: list[Window]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of greedy decoding, and how far apart the two best logits are at least, window by window.

    Everything is read again for every token, and nothing is kept but the observation.
    """
    prefix, tokens = networks.tokens(seen), np.zeros((len(seen), 0), np.int64)
    apart = np.full(len(seen), np.inf)
    for count in range(networks.length):
        cache, reading = networks.prefill(prefix)
        if count:
            places = np.broadcast_to(np.arange(count), tokens.shape)
            reading = networks.read(cache, tokens, places, causal(len(seen), count))
        logits = np.sort(reading.logits[:, -1], axis=-1)
        apart = np.minimum(apart, logits[:, -1] - logits[:, -2])
        tokens = np.concatenate([tokens, reading.logits[:, -1:].argmax(-1)], axis=1)
    return tokens, apart


def played(
    pair: Pair[Any], seen: Sequence[Window], gate: Gate | None = None, **parts: Any
) -> tuple[np.ndarray, list[StepRecord]]:
    """The actions and the inferences of a robot that sees these, one for each chunk."""
    policy, actions, records = SpeculativePolicy(pair, gate or Always(), **parts), [], []
    for window in seen:
        actions.append(policy.act_on(window))
        while not policy.wants_inference:
            actions.append(policy.act_on(window))
        assert policy.record is not None
        records.append(policy.record)
    return np.stack(actions), records


def decoded(record: StepRecord) -> Decoded:
    """What the target decoded."""
    assert record.outcome is not None
    evidence: Decoded = record.outcome.evidence
    return evidence


def nonsense(layout: Layout, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Arrays of numbers that are allowed, and make no sense."""
    arrays = {}
    for name, spec in layout.specs.items():
        least, most = {np.bool_: (0, 1), np.uint8: (0, 255)}.get(
            spec.dtype, (-255, 2**15 - 1 if name == "total" else 255)
        )
        low, high = max(spec.low, least), min(spec.high, most)
        arrays[name] = rng.integers(int(low), int(high) + 1, spec.shape).astype(spec.dtype)
    return arrays


@contextmanager
def connected(pair: Pair[Any], path: Path) -> Iterator[Callable[[Pair[Any]], Verifier]]:
    """Makes verifiers of compositions of the pair, which ask a server process with the bundle at a path."""
    with (
        serving(path) as process,
        Client(Endpoint("ws", "127.0.0.1", process.port), pair.exchange.contract, "test") as client,
    ):
        client.connect(30.0)
        yield lambda composed: remote_verifier(client, composed, 30_000.0)
