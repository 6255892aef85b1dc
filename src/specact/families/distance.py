"""The head of a learned gate of chunks, tokens and flows: it estimates how far the target's actions are."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from specact.bundle.manifest import fingerprint_of
from specact.bundle.words import NetworkInputs
from specact.families.head import TrainedFor, calibrate_command, head_file, open_head
from specact.observation import ObservationSpec, Window
from specact.pair import Pair
from specact.types import Chunk


def head_observation(pair: Pair[Any]) -> ObservationSpec | None:
    """What a head sees: the draft's observations without camera frames, without a draft the target's; None if none."""
    seeing = pair.parts.draft or pair.parts.policy
    vectors: ObservationSpec | None = seeing.spec.observation.vectors
    return vectors


def load_distance_head(pair: Pair[Any]) -> DistanceHead:
    """The pair's head. Robots of one process share its session, which is stateless.

    Raises:
        ConfigError: if the pair has none.
        BundleError: if it does not fit the pair.
    """
    file = head_file(pair)
    drafted = (pair.execute, len(pair.units.centre))
    command = calibrate_command(pair)
    return _load(file, head_observation(pair), drafted, TrainedFor.of(pair), command, fingerprint_of(file))


@cache
def _load(
    path: Path,
    observation: ObservationSpec | None,
    drafted: tuple[int, int],
    wanted: TrainedFor,
    command: str,
    weights: str,
) -> DistanceHead:
    """``weights`` is part of the cache key, since a file can be overwritten with another head."""
    return DistanceHead(path, observation, drafted, wanted, command)


class DistanceHead:
    """Estimates the distance between the drafted and the target's actions.

    Args:
        path: the ``.onnx`` file.
        observation: see :func:`head_observation`.
        drafted: shape of the drafted actions that it reads, the executed ones of a chunk.
        wanted, command: see :func:`~specact.families.head.open_head`.

    Raises:
        BundleError: if the file is no ONNX model, does not fit the pair, or was made for another one.
    """

    def __init__(
        self,
        path: Path,
        observation: ObservationSpec | None,
        drafted: tuple[int, int],
        wanted: TrainedFor,
        command: str,
    ) -> None:
        self._observation, self._execute = observation, drafted[0]
        seen = {} if observation is None else NetworkInputs(observation).shapes
        inputs = seen | {"drafted": ("batch", *drafted)}
        self._network = open_head(path, wanted, inputs, {"distance": ("batch",)}, command)

    def estimate(self, window: Window, actions: Chunk) -> float:
        """The expected root mean square over the action's dimensions, mean over the actions that are executed.

        Args:
            window: with at least the observations that the head sees.
            actions: drafted, ``[n, A]``, normalised.
        """
        inputs = {} if self._observation is None else self._observation.stack([window])
        inputs["drafted"] = np.ascontiguousarray(actions[None, : self._execute])
        return float(self._network.run(inputs)[0][0])
