"""The contract of a chunk policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.contracts.expectations import call, expect, outline, random_windows, same
from specact.families.chunks.policy import ChunkPolicy, ChunkSpec
from specact.observation import Window


def check_policy(policy: ChunkPolicy, *, windows: Sequence[Window] = (), seed: int = 0, within: float = 1e-3) -> None:
    """Checks a chunk policy: shapes, and that a chunk depends on its window and generator alone.

    A policy with an internal queue of actions or history fails, because a server serves many robots in turn.

    Args:
        policy: the policy.
        windows: test inputs, at least two; random if not given.
        seed: of the windows and the policy's random generators.
        within: relative tolerance between chunks from batches of different sizes, of their largest absolute action.

    Raises:
        ContractError: for the first violation of :class:`~specact.families.chunks.policy.ChunkPolicy`.
    """
    spec = policy.spec
    expect(isinstance(spec, ChunkSpec), f"spec must be a ChunkSpec, got {spec!r:.60}")
    windows = windows or random_windows(spec.observation, 4, np.random.default_rng(seed))

    def infer_chunks(which: Sequence[int]) -> list[NDArray[np.float32]]:
        asked = [windows[i] for i in which]
        before = [{name: value.copy() for name, value in window.arrays.items()} for window in asked]
        rngs = [np.random.default_rng([seed, i]) for i in which]
        chunks = list(call("infer_batch", policy.infer_batch, asked, rngs))
        expect(
            len(chunks) == len(which), f"infer_batch must give a chunk per window, got {len(chunks)} for {len(which)}"
        )
        for chunk in chunks:
            _check_chunk(chunk, spec, "infer_batch")
        kept = all(same([arrays], [dict(window.arrays)]) for arrays, window in zip(before, asked, strict=True))
        expect(kept, "infer_batch must not change the windows that it is given")
        return chunks

    everything = list(range(len(windows)))
    together = infer_chunks(everything)
    slack = within * max(1e-6, *(float(np.abs(chunk).max()) for chunk in together))

    def close(found: Sequence[NDArray[np.float32]], wanted: Sequence[NDArray[np.float32]]) -> bool:
        return all(float(np.abs(a - b).max()) <= slack for a, b in zip(found, wanted, strict=True))

    expect(
        close(infer_chunks(everything), together),
        "the same windows and generators must give the same chunks again: draw from the given rng alone, and keep "
        "nothing between two calls",
    )
    alone = [infer_chunks([i])[0] for i in everything]
    expect(close(alone, together), "a chunk must not depend on the other windows of its batch")
    expect(close(infer_chunks(everything[::-1])[::-1], together), "a chunk must not depend on its place in the batch")
    single = []
    for i in everything:
        single.append(call("infer", policy.infer, windows[i], np.random.default_rng([seed, i])))
        _check_chunk(single[-1], spec, "infer")
    expect(close(single, together), "infer must give what infer_batch gives")


def _check_chunk(chunk: Any, spec: ChunkSpec, where: str) -> None:
    shape = (spec.chunk, spec.actions)
    expect(
        isinstance(chunk, np.ndarray) and chunk.dtype == np.float32 and chunk.shape == shape,
        f"{where} must give chunks float32 {list(shape)}, got {outline(chunk)}",
    )
    expect(bool(np.isfinite(chunk).all()), f"{where} must give finite actions, got {chunk}")
