"""The contract of a chunk policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specact.contracts.expectations import Named, call, check_batches, expect, expect_array, random_windows, same
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

    def infer(which: Sequence[int]) -> list[Named]:
        batch = [windows[i] for i in which]
        before = [{name: value.copy() for name, value in window.arrays.items()} for window in batch]
        rngs = [np.random.default_rng([seed, i]) for i in which]
        chunks = list(call("infer_batch", policy.infer_batch, batch, rngs))
        expect(
            len(chunks) == len(which), f"infer_batch must give {len(which)} chunks, one per window; got {len(chunks)}"
        )
        for chunk in chunks:
            expect_array("a chunk of infer_batch", chunk, np.float32, (spec.chunk, spec.actions))
        expect(same(before, [window.arrays for window in batch]), "infer_batch must not change the given windows")
        return [{"chunk": chunk} for chunk in chunks]

    chunks = check_batches("a chunk", infer, len(windows), within)
    for i, (window, chunk) in enumerate(zip(windows, chunks, strict=True)):
        single = call("infer", policy.infer, window, np.random.default_rng([seed, i]))
        expect_array("a chunk of infer", single, np.float32, (spec.chunk, spec.actions))
        expect(same([{"chunk": single}], [chunk], within), "infer must give what infer_batch gives")
