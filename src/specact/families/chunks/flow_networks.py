"""The networks of a flow policy on ONNX Runtime: what runs once per inference, and what runs once per Euler step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specact.errors import BundleError
from specact.families.chunks.policy import ChunkSpec
from specact.families.codes.network import open_session
from specact.observation import Window

Array = NDArray[np.float32]


class FlowNetworks:
    """Encoder, prefix, expert and guide of one flow policy.

    A speculative method inside the flow has what it needs here: one cache, and the expert on many chunks and times.

    Args:
        files: the ``.onnx`` file of each part: ``encoder``, ``prefix``, ``expert``, ``guide``.
        spec: of the bundle they belong to; their inputs are checked against it.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if a file is no ONNX model, or they do not fit the spec or each other.
        ConfigError: if this installation of ONNX Runtime has no such provider.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        spec: ChunkSpec,
        *,
        provider: str = "CPUExecutionProvider",
        threads: int = 1,
    ) -> None:
        self._observation = spec.observation
        self._encoder, self._prefix, self._expert, self._guide = (
            open_session(files[part], provider, threads) for part in ("encoder", "prefix", "expert", "guide")
        )
        self._check(files, spec)

    def tokens(self, windows: Sequence[Window]) -> Array:
        """What the encoder makes of B windows, ``[B, N, W]``: a token per observation, and one for the goal."""
        tokens: Array = self._encoder.run(None, self._observation.stack(windows))[0]
        return tokens

    def cache(self, windows: Sequence[Window]) -> Array:
        """The prefix cache of B windows: keys and values of every layer, ``[B, L, 2, heads, N, W / heads]``."""
        cache: Array = self._prefix.run(None, {"tokens": self.tokens(windows)})[0]
        return cache

    def velocity(self, chunks: Array, times: Array, cache: Array) -> Array:
        """The expert's velocities ``[B, H, A]``.

        Args:
            chunks: ``[B, H, A]``, in the flow's units.
            times: ``[B]`` in [0, 1].
            cache: of one window for all of them, or of B windows.
        """
        velocity: Array = self._expert.run(None, {"chunk": chunks, "time": times, "cache": cache})[0]
        return velocity

    def guide(self, chunk: Array, time: Array, cache: Array, wanted: Array, weights: Array) -> tuple[Array, Array]:
        """Velocity and pull towards what is wanted, both ``[1, H, A]``, see :mod:`specact.families.chunks.flow_euler`.

        Args:
            chunk, time, cache: as for :meth:`velocity`, with B = 1.
            wanted: Y ``[1, H, A]``, in the flow's units.
            weights: W ``[1, H]`` in [0, 1].
        """
        seen = {"chunk": chunk, "time": time, "cache": cache, "wanted": wanted, "weights": weights}
        velocity, pull = self._guide.run(None, seen)
        return velocity, pull

    def _check(self, files: Mapping[str, Path], spec: ChunkSpec) -> None:
        chunk = [spec.chunk, spec.actions]
        # What the prefix takes and gives is between the parts; the spec does not know it.
        tokens, cache = (found.shape[1:] for found in (self._encoder.get_outputs()[0], self._prefix.get_outputs()[0]))
        noisy = {"chunk": chunk, "time": [], "cache": cache}
        wanted = {
            "encoder": spec.observation.shapes,
            "prefix": {"tokens": tokens},
            "expert": noisy,
            "guide": {**noisy, "wanted": chunk, "weights": [spec.chunk]},
        }
        sessions = {"encoder": self._encoder, "prefix": self._prefix, "expert": self._expert, "guide": self._guide}
        for part, session in sessions.items():
            found = {entry.name: entry.shape[1:] for entry in session.get_inputs()}
            if found != wanted[part]:
                raise BundleError(
                    f"{files[part]} takes {found}, but the bundle's manifest and its other parts say {wanted[part]}: "
                    "they do not match; export the bundle again"
                )
