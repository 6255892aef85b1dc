"""A VQ-BeT as a chunk policy does what the agent does with the same numbers."""

from pathlib import Path

import numpy as np
import pytest

from specact import SpeculativePolicy, gates, load_pair
from specact.errors import ConfigError
from specact.families.chunks.policy import ChunkPolicy, ChunkSpec, Inpainting
from specact.families.codes.policy import CodeChunks
from specact.observation import ObservationHistory, vectors
from specact.rng import Role, stream


def observation(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"state": rng.normal(size=8).astype(np.float32), "goal": rng.normal(size=2).astype(np.float32)}


def test_the_chunk_is_the_one_an_agent_executes(tiny_bundle: Path) -> None:
    bundle = load_pair(tiny_bundle)
    policy: ChunkPolicy = CodeChunks(
        bundle.parts.draft, bundle.parts.tokenizer, bundle.parts.spec, bundle.parts.spec.draft
    )
    assert policy.spec == ChunkSpec(vectors(2, goal=2, state=8), chunk=2, actions=2, rate_hz=20.0)
    assert not policy.inpaints
    agent, window = SpeculativePolicy(bundle, gates.Never(), seed=5), ObservationHistory(policy.spec.observation)
    for step in range(8):
        seen = observation(step)
        action = agent.act(seen)
        chunk = policy.infer(window.push(seen), stream(5, Role.DRAFT, step=step))
        assert chunk.shape == (2, 2) and chunk.dtype == np.float32
        np.testing.assert_array_equal(chunk[0], action)  # the tiny bundle executes one action of two


def test_it_says_that_it_cannot_inpaint(tiny_bundle: Path) -> None:
    bundle = load_pair(tiny_bundle)
    policy = CodeChunks(bundle.parts.target, bundle.parts.tokenizer, bundle.parts.spec, bundle.parts.spec.target)
    window = ObservationHistory(policy.spec.observation).push(observation(0))
    last = Inpainting(np.zeros((2, 2), np.float32), np.ones(2, np.float32))
    with pytest.raises(ConfigError, match="cannot inpaint"):
        policy.infer(window, np.random.default_rng(0), last)


@pytest.mark.parametrize(
    ("shape", "weights", "sentence"),
    [
        ((3,), np.ones(3), r"needs actions \[H, A\]"),
        ((3, 2), np.ones(2), r"needs actions \[H, A\] and weights \[H\], got \(3, 2\) and \(2,\)"),
        ((3, 2), np.array([1.0, 0.5, -0.1]), r"must lie in \[0, 1\]"),
        ((3, 2), np.array([1.0, 0.5, np.nan]), r"must lie in \[0, 1\]"),
    ],
)
def test_inpainting_that_says_nothing_clear(shape: tuple[int, ...], weights: np.ndarray, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Inpainting(np.zeros(shape, np.float32), weights.astype(np.float32))
