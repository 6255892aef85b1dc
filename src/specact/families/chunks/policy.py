"""Spec and interfaces of policies that return chunks of actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from specact.errors import BundleError, ConfigError
from specact.observation import ObservationSpec, Window
from specact.records import RateHz, Record, Size

Chunk = NDArray[np.float32]


class ChunkSpec(Record, frozen=True):
    """Observations and chunks of a chunk policy.

    Attributes:
        observation: its observation spec.
        chunk, actions: H, number of actions of a chunk, and A.
        rate_hz: control rate of the demonstrations [Hz].
    """

    observation: ObservationSpec
    chunk: Size
    actions: Size
    rate_hz: RateHz

    def describe(self) -> dict[str, Any]:
        """As plain values, for a manifest."""
        return structs.asdict(self) | {"observation": self.observation.describe()}


def resized(chunk: Chunk, length: int) -> Chunk:
    """A chunk ``[n, A]`` cut to ``[length, A]``, or extended by repeating its last action."""
    missing = max(0, length - len(chunk))
    return np.concatenate([chunk[:length], np.repeat(chunk[-1:], missing, axis=0)])


@dataclass(frozen=True)
class Inpainting:
    """Real-time chunking: the last chunk's actions as a constraint on the new chunk.

    Row i of the actions ``[H, A]``, in the environment's units, is for the new chunk's step i, and ignored at weight 0.
    The weights ``[H]`` are 1 for actions executed before the new chunk arrives, then fall to 0 (soft mask).

    Raises:
        ConfigError: if the shapes do not fit together or a weight is out of range.
    """

    actions: NDArray[np.float32]
    weights: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.actions.ndim != 2 or self.weights.shape != self.actions.shape[:1]:
            raise ConfigError(
                f"inpainting needs actions [H, A] and weights [H], got {self.actions.shape} and {self.weights.shape}"
            )
        if not ((self.weights >= 0.0) & (self.weights <= 1.0)).all():
            raise ConfigError(f"weights of inpainting must lie in [0, 1], got {self.weights.tolist()}")


def refuse_inpainting(inpainting: Inpainting | None) -> None:
    """ConfigError for an inpainting, of policies that do not support it."""
    if inpainting is not None:
        raise ConfigError("this policy cannot inpaint; choose another execution for it, or a flow policy")


class ChunkPolicy(Protocol):
    """A policy that samples a chunk of actions for an observation window.

    Attributes:
        spec: its observations and chunks.
        inpaints: whether :meth:`infer` supports inpainting.
    """

    @property
    def spec(self) -> ChunkSpec: ...
    @property
    def inpaints(self) -> bool: ...

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> Sequence[Chunk]:
        """The chunks of several windows in one batch, each with its own random generator; they may be NaN."""
        ...

    def infer(self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None) -> Chunk:
        """A chunk of actions, float32 ``[H, A]``, in the environment's units.

        Raises:
            ConfigError: if ``inpainting`` is given but not supported, or has the wrong shape.
        """
        ...


def check_chunks(name: str, spec: ChunkSpec, chunks: Sequence[Chunk], count: int) -> None:
    """Refuses chunks of a third-party policy that do not match its spec.

    Raises:
        BundleError: for another number of chunks than ``count``, or another shape.
    """
    wanted, shapes = (spec.chunk, spec.actions), [np.shape(chunk) for chunk in chunks]
    if shapes != [wanted] * count:
        raise BundleError(
            f"the policy {name} must answer {count} windows with {count} chunks of shape {wanted}, it gave "
            f"{len(shapes)} of {sorted(set(shapes))}"
        )
