"""Bandwidth of a link: measurements from past exchanges, and a forecast for the next one."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from specact.errors import BundleError, ConfigError
from specact.families.codes.network import open_session
from specact.links.model import Link, round_trip
from specact.rng import Role, stream
from specact.types import Floats

_MIN_S = 1e-6
METADATA = "bandwidth"


def measured(crossed_bytes: float, network_s: float) -> float:
    """``bytes / (round trip - remote compute)`` [bytes/s], as published: the link's latency counts as bandwidth.

    Args:
        crossed_bytes: size of an exchange, both ways.
        network_s: its round trip without the server's time [s].
    """
    return crossed_bytes / max(network_s, _MIN_S)


def series(
    link: Link, up_bytes: int, down_bytes: int, period_s: float, count: int, *, start_s: float = 0.0, seed: int = 0
) -> Floats:
    """Simulated measurements of a device with one exchange per period, ``[count]`` [bytes/s].

    An exchange takes no longer for the one before it: each is on the link alone.
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

    Until there are enough of them the next is as the last.

    Args:
        file: with its window, mean and deviation as metadata.

    Raises:
        BundleError: if it is no such network.
    """

    def __init__(self, file: Path) -> None:
        self._session = open_session(file, "CPUExecutionProvider", threads=1)
        try:
            told = json.loads(self._session.get_modelmeta().custom_metadata_map[METADATA])
            self.window = int(told["window"])
            self._mean, self._deviation, self._least = (float(told[name]) for name in ("mean", "deviation", "least"))
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"{file} is no forecast of a bandwidth ({error}); train it again") from None
        shapes = [entry.shape[1:] for entry in (*self._session.get_inputs(), *self._session.get_outputs())]
        sound = all(map(math.isfinite, (self._mean, self._deviation, self._least)))
        if shapes != [[self.window], []] or not sound or min(self._deviation, self._least) <= 0.0:
            raise BundleError(f"{file} takes and gives {shapes}; a forecast takes a window and gives one number")
        self._name = self._session.get_inputs()[0].name

    def forecast(self, past: Sequence[float]) -> float:
        if len(past) < self.window:
            return past[-1]
        newest = np.array(list(past)[-self.window :], np.float64)
        standardised = ((newest - self._mean) / self._deviation).astype(np.float32)
        found = float(self._session.run(None, {self._name: standardised[None]})[0][0])
        # The minimum of the training data.
        return max(found * self._deviation + self._mean, self._least)


class Bandwidths:
    """The last exchanges over one link.

    Args:
        most: maximum number of stored exchanges.

    Raises:
        ConfigError: for less than two.
    """

    def __init__(self, most: int = 64) -> None:
        if most < 2:
            raise ConfigError(f"at least two measurements must be kept, got {most}")
        self._past: deque[tuple[float, float]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._past)

    def add(self, crossed_bytes: float, network_s: float) -> None:
        """Adds an exchange; arguments as for :func:`measured`."""
        self._past.append((crossed_bytes, network_s))

    @property
    def past(self) -> list[float]:
        """The measured bandwidths, the newest last."""
        return [measured(*exchange) for exchange in self._past]

    @property
    def deviation(self) -> float:
        """Standard deviation of the change from one to the next; 0 with less than three."""
        return float(np.std(np.diff(self.past))) if len(self._past) > 2 else 0.0

    def apart(self, bytes_s: float) -> tuple[float, float]:
        """A predicted bandwidth without the latency in it, and the latency [s].

        The latency is the shortest time on the link so far. A repetition of the last exchange takes as long as before:
        ``bytes / B = L0 + bytes / B'``.
        """
        crossed, taken_s = self._past[-1][0], self._past[-1][0] / bytes_s
        latency_s = min(taken_s, min(network_s for _, network_s in self._past))
        return crossed / max(taken_s - latency_s, _MIN_S), latency_s
