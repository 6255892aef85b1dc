"""Frames with a square, and an instruction: the task of the token policy that these tests train."""

from __future__ import annotations

import numpy as np

from specact.lab.data.episodes import Episodes
from specact.lab.train.recipe import ChunkRecipe, EncoderRecipe
from specact.observation import Window

SIDE = 24
TOLD = ("go left", "go right")
RECIPE = ChunkRecipe(
    kind="tokens", bundle="dots", rate_hz=10.0, data=("dots",), sees=("image", "state"), instruction=True, window=1,
    chunk=3, layers=2, heads=2, width=32, dropout=0.0, steps=500, batch=64, learning_rate=4e-3, warmup=20,
    average=0.98, bfloat16=False, encoder=EncoderRecipe(tokens="patches", channels=(16, 32)),
)  # fmt: skip


def shown(places: np.ndarray) -> np.ndarray:
    """Frames with a white square whose left edge is at these columns."""
    frames = np.zeros((len(places), SIDE, SIDE, 3), np.uint8)
    for frame, place in zip(frames, places, strict=True):
        frame[8:16, place : place + 4] = 255
    return frames


def dots(episodes: int = 200, length: int = 6) -> Episodes:
    """The first number of an action is where the square is, the second the side that was told."""
    rng = np.random.default_rng(0)
    places, told = rng.integers(0, SIDE - 3, episodes), rng.integers(0, 2, episodes)
    action = np.stack([places / (SIDE - 4) * 2.0 - 1.0, told * 2.0 - 1.0], -1).astype(np.float32)
    return Episodes(
        {"image": np.repeat(shown(places), length, 0), "state": rng.normal(size=(episodes * length, 2)).astype("f4")},
        np.repeat(action, length, 0),
        np.arange(1, episodes + 1) * length,
        instructions=tuple(TOLD[side] for side in told),
    )


def window(place: int, told: str | None, state: float = 0.0) -> Window:
    return Window({"image": shown(np.array([place])), "state": np.full((1, 2), state, np.float32)}, told)


def windows(count: int, seed: int = 1) -> list[Window]:
    """Observations as the policy never saw them: noise in the frame, far states."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (count, 1, SIDE, SIDE, 3), dtype=np.uint8)
    states = rng.normal(0.0, 2.0, (count, 1, 2)).astype(np.float32)
    return [Window({"image": frames[row], "state": states[row]}, TOLD[row % 2]) for row in range(count)]


def rngs(count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(row) for row in range(count)]
