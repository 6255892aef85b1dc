"""Bandwidth of a link: measurements from past exchanges, and a forecast for the next one."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from specact.bundle.network import Network
from specact.errors import BundleError, ConfigError
from specact.links.model import Link, round_trip
from specact.rng import Role, stream
from specact.types import Floats

_MIN_S = 1e-6
METADATA = "bandwidth"


def measured(crossed_bytes: float, network_s: float) -> float:
    """``bytes / (round trip - server time)`` [bytes/s], as published: the link's latency lowers the bandwidth.

    Args:
        crossed_bytes: size of an exchange, sum of both directions.
        network_s: its round trip without the server's time [s].
    """
    return crossed_bytes / max(network_s, _MIN_S)


def series(
    link: Link, up_bytes: int, down_bytes: int, period_s: float, count: int, *, start_s: float = 0.0, seed: int = 0
) -> Floats:
    """Simulates measurements of a device with one exchange per period, ``[count]`` [bytes/s].

    Exchanges do not queue: each has the link to itself.

    Args:
        link: the link.
        up_bytes, down_bytes: sizes of request and reply.
        period_s: time between two exchanges [s].
        count: number of exchanges.
        start_s: time of the first one on the link [s].
        seed: of the link's random draws.
    """
    rng = stream(seed, Role.LINK)
    moments = (start_s + period_s * np.arange(count)).tolist()
    taken = [round_trip(link, up_bytes, down_bytes, at, rng) for at in moments]
    return np.array([measured(up_bytes + down_bytes, seconds) for seconds in taken])


class Forecast(Protocol):
    """Predicts the bandwidth of the next exchange from those of the past."""

    def forecast(self, past: Sequence[float]) -> float:
        """The next bandwidth [bytes/s], > 0; ``past`` is not empty, the newest last."""
        ...


class LastValue:
    """Repeats the last measurement: the baseline."""

    def forecast(self, past: Sequence[float]) -> float:
        return past[-1]


class RecurrentForecast:
    """RoboECC's predictor: an LSTM over the last measurements, exported to ONNX.

    With fewer measurements than its window it repeats the last one.

    Args:
        file: the ONNX file, with window, mean, standard deviation and minimum of the training data as metadata.

    Attributes:
        window: number of measurements that the network reads.

    Raises:
        BundleError: for a file without this metadata, or a network with other inputs and outputs.
    """

    def __init__(self, file: Path) -> None:
        self._network = Network(file)
        try:
            metadata = json.loads(self._network.metadata[METADATA])
            self.window = int(metadata["window"])
            statistics = self._mean, self._deviation, self._least = [
                float(metadata[name]) for name in ("mean", "deviation", "least")
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"{file} is no forecast of a bandwidth ({error}); train it again") from None
        shapes = [shape[1:] for side in (self._network.inputs, self._network.outputs) for shape in side.values()]
        if shapes != [[self.window], []]:
            raise BundleError(
                f"{file} has inputs and outputs of shapes {shapes} per window; a forecast of a bandwidth maps a window "
                f"of {self.window} numbers to one number"
            )
        if not all(map(math.isfinite, statistics)) or min(self._deviation, self._least) <= 0.0:
            raise BundleError(
                f"{file} has mean {self._mean:g}, deviation {self._deviation:g} and least {self._least:g}; all must be "
                "finite, and deviation and least above 0; train it again"
            )
        (self._name,) = self._network.inputs

    def forecast(self, past: Sequence[float]) -> float:
        if len(past) < self.window:
            return past[-1]
        newest = np.array(list(past)[-self.window :], np.float64)
        standardised = ((newest - self._mean) / self._deviation).astype(np.float32)
        predicted = float(self._network.run({self._name: standardised[None]})[0][0])
        return max(predicted * self._deviation + self._mean, self._least)


class Bandwidths:
    """The bandwidths of the last exchanges over one link.

    Args:
        capacity: maximum number of stored exchanges, at least 2.

    Raises:
        ConfigError: for a smaller capacity.
    """

    def __init__(self, capacity: int = 64) -> None:
        if capacity < 2:
            raise ConfigError(f"the capacity must be at least two measurements, got {capacity}")
        self._past: deque[tuple[float, float]] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._past)

    def add(self, crossed_bytes: float, network_s: float) -> None:
        """Adds an exchange; arguments as for :func:`measured`."""
        self._past.append((crossed_bytes, network_s))

    @property
    def past(self) -> list[float]:
        """The measured bandwidths [bytes/s], the newest last."""
        return [measured(*exchange) for exchange in self._past]

    @property
    def deviation(self) -> float:
        """Standard deviation of the change between successive bandwidths [bytes/s]; 0 with fewer than three."""
        return float(np.std(np.diff(self.past))) if len(self._past) > 2 else 0.0

    def split_latency(self, bytes_s: float) -> tuple[float, float]:
        """Splits a predicted bandwidth B into a bandwidth B' [bytes/s] without latency, and the latency L0 [s].

        L0 is the shortest time on the link so far, and B' preserves the predicted time of the last exchange:
        ``bytes / B = L0 + bytes / B'``. Needs at least one exchange.
        """
        crossed, taken_s = self._past[-1][0], self._past[-1][0] / bytes_s
        latency_s = min(taken_s, min(network_s for _, network_s in self._past))
        return crossed / max(taken_s - latency_s, _MIN_S), latency_s
