"""What every policy that answers with a chunk of actions offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specact.errors import BundleError, ConfigError
from specact.observation import ObservationSpec, Window
from specact.runtime.limits import RATES_HZ, check_integer, check_positive

Chunk = NDArray[np.float32]


@dataclass(frozen=True)
class ChunkSpec:
    """What a chunk policy needs to see, and what it gives.

    Attributes:
        observation: what it needs to see.
        chunk: H, actions it predicts at once.
        actions: A.
        rate_hz: control rate of the demonstrations [Hz].

    Raises:
        BundleError: for values that no policy can have.
    """

    observation: ObservationSpec
    chunk: int
    actions: int
    rate_hz: float

    def __post_init__(self) -> None:
        for name in ("chunk", "actions"):
            check_integer(name, getattr(self, name), least=1)
        check_positive("rate_hz", self.rate_hz)
        if self.rate_hz not in RATES_HZ:
            raise BundleError(f"a policy's rate_hz must be {RATES_HZ}, got {self.rate_hz}")

    def describe(self) -> dict[str, Any]:
        """As plain values, for a manifest."""
        return vars(self) | {"observation": self.observation.describe()}


@dataclass(frozen=True)
class Inpainting:
    """Real-time chunking: what the last chunk says of the steps that the new one begins with.

    Attributes:
        actions: float32 ``[H, A]``, environment units; row i is for the new chunk's step i, and ignored at weight 0.
        weights: float32 ``[H]`` in [0, 1]: 1 where the action will certainly have run, then falling to 0 (soft mask).

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


class InfersChunks(Protocol):
    """Answers an observation window with a chunk of actions."""

    def infer(self, window: Window, rng: np.random.Generator) -> Chunk:
        """A chunk ``[H, A]``, in the environment's units, drawn from ``rng``."""
        ...


class ChunkPolicy(Protocol):
    """A policy that answers an observation window with a chunk of actions, drawn from what it learned."""

    @property
    def spec(self) -> ChunkSpec:
        """What it needs to see, and what it gives."""
        ...

    @property
    def inpaints(self) -> bool:
        """Whether :meth:`infer` understands inpainting."""
        ...

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> Sequence[Chunk]:
        """The chunks of several windows in one pass, each drawn from its own generator."""
        ...

    def infer(
        self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None
    ) -> NDArray[np.float32]:
        """A chunk of actions, float32 ``[H, A]``, in the environment's units.

        Args:
            window: what it looks at.
            rng: what it draws from.
            inpainting: what the new chunk should begin with, or None.

        Raises:
            ConfigError: if ``inpainting`` is given and it does not understand it, or it has the wrong shape.
        """
        ...
