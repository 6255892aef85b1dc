"""RoboECC's choice of a cut: which of a target's stages run on the server, given their times and the link.

Stages 1 to k run on the server, k+1 to N on the device. Source: RoboECC (arXiv 2603.20711).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specact.errors import ConfigError
from specact.types import Floats

Accounting = Literal["faithful", "printed"]


@dataclass(frozen=True)
class StageCosts:
    """Costs of a chain of N stages.

    Attributes:
        server_s, device_s: time of each stage on either side [s], ``[N]``, >= 0.
        cut_bytes: bytes sent down at cuts 0 to N, ``[N + 1]``, >= 0: none at 0, the output of stage k at k, the answer
            at N.
        observation_bytes: bytes sent up at cuts 1 to N, >= 0.
        load: share of the server's capacity that each stage needs, ``[N]``, >= 0; equal shares of 1 if None.

    Raises:
        ConfigError: for other lengths, or a number that is negative or not finite.
    """

    server_s: Floats
    device_s: Floats
    cut_bytes: Floats
    observation_bytes: float
    load: Floats | None = None

    def __post_init__(self) -> None:
        count = len(self.server_s)
        load = np.full(count, 1.0 / max(1, count)) if self.load is None else self.load
        arrays = {
            "server_s": (self.server_s, count), "device_s": (self.device_s, count),
            "cut_bytes": (self.cut_bytes, count + 1), "load": (load, count),
        }  # fmt: skip
        for name, (given, length) in arrays.items():
            array = np.array(given, np.float64)
            if array.shape != (length,) or not count or not (np.isfinite(array) & (array >= 0.0)).all():
                raise ConfigError(f"{name} of {count} stages must be {length} finite numbers >= 0, got {given}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if not 0.0 <= self.observation_bytes < math.inf:
            raise ConfigError(f"observation_bytes must be a finite number >= 0, got {self.observation_bytes}")

    @property
    def stages(self) -> int:
        """N, the number of stages."""
        return len(self.server_s)

    @property
    def loads(self) -> Floats:
        """Load of the server at cuts 0 to N, ``[N + 1]``."""
        assert self.load is not None, "set in __post_init__"
        return np.concatenate([[0.0], np.cumsum(self.load)])

    def crossing(self, accounting: Accounting = "faithful") -> Floats:
        """Bytes on the link at cuts 0 to N, sum of both directions, ``[N + 1]``."""
        crossing = np.array(self.cut_bytes)
        if accounting == "printed":
            crossing[[0, -1]] = 0.0
        else:
            crossing[1:] += self.observation_bytes
        return crossing


def total_s(costs: StageCosts, bytes_s: float, latency_s: float = 0.0, accounting: Accounting = "faithful") -> Floats:
    """``T(k) = sum_{i<=k} server_i + [the link is used] (L0 + bytes_k / B) + sum_{i>k} device_i`` for k = 0 to N [s].

    ``printed`` is the published equation: cuts 0 and N do not use the link, and only the activation is sent.
    ``faithful`` adds what an answer requires: the observation, sent up for k >= 1, and the answer, sent down for k = N.

    Args:
        costs: of the stages.
        bytes_s: B, bandwidth of the link [bytes/s], > 0, infinity allowed.
        latency_s: L0, latency of a round trip [s], >= 0.
        accounting: ``faithful`` or ``printed``.

    Returns:
        float64 ``[N + 1]``.

    Raises:
        ConfigError: for a bandwidth that is not positive, or a latency that is negative.
    """
    if not bytes_s > 0.0 or not 0.0 <= latency_s < math.inf:
        raise ConfigError(f"a link has a bandwidth above 0 and a finite latency >= 0, got {bytes_s} and {latency_s}")
    server = np.concatenate([[0.0], np.cumsum(costs.server_s)])
    device = np.concatenate([np.cumsum(costs.device_s[::-1])[::-1], [0.0]])
    used = np.arange(costs.stages + 1) > 0
    if accounting == "printed":
        used[-1] = False
    total: Floats = server + used * (latency_s + costs.crossing(accounting) / bytes_s) + device
    return total


def best_cut(total: Floats, loads: Floats, allowed: Sequence[int], budget: float = math.inf) -> int:
    """``argmin`` of the total over the allowed cuts within the budget; ties: lower load, then the smaller cut.

    Args:
        total: total time at cuts 0 to N [s], ``[N + 1]``.
        loads: load of the server at cuts 0 to N, ``[N + 1]``.
        allowed: cuts, at least one of them within the budget.
        budget: maximum load of the server.

    Raises:
        ConfigError: if no cut is allowed.
    """
    fitting = within(allowed, loads, budget)
    return min(fitting, key=lambda cut: (total[cut], loads[cut], cut))


def within(allowed: Sequence[int], loads: Floats, budget: float) -> list[int]:
    """The cuts whose load is within the budget, ascending.

    Raises:
        ConfigError: if there is none, or a cut does not exist.
    """
    if not allowed or not 0 <= min(allowed) <= max(allowed) < len(loads):
        raise ConfigError(f"cuts lie between 0 and {len(loads) - 1}, got {list(allowed)}")
    fitting = sorted(cut for cut in set(allowed) if loads[cut] <= budget)
    if not fitting:
        raise ConfigError(
            f"no cut of {sorted(set(allowed))} is within the server's load of {budget:g}; the least is "
            f"{min(loads[cut] for cut in allowed):g}"
        )
    return fitting


def adjusted_cut(current: int, change: float, low: float, high: float, pool: Sequence[int], cut_bytes: Floats) -> int:
    """RoboECC's rule: the cut with the largest activation if the bandwidth will rise, the smallest if it will fall.

    Args:
        current: the current cut.
        change: predicted minus measured bandwidth [bytes/s].
        low, high: thresholds of the change [bytes/s]; in between the cut is kept.
        pool: cuts to choose from.
        cut_bytes: bytes sent down at cuts 0 to N, ``[N + 1]``.

    Returns:
        The cut; of equal activations the nearest to the current one, then the smaller.

    Raises:
        ConfigError: for an empty pool.
    """
    if not pool:
        raise ConfigError("RoboECC's rule needs a pool of at least one cut")
    if low <= change <= high:
        return current
    sign = -1.0 if change > high else 1.0
    return min(pool, key=lambda cut: (sign * cut_bytes[cut], abs(cut - current), cut))


def roofline_s(flops: Floats, moved_bytes: Floats, peak_flops_s: float, memory_bytes_s: float, share: float) -> Floats:
    """``max(FLOPs / (share * peak), bytes / memory bandwidth)`` of each stage [s]: an estimate without measurements.

    Args:
        flops, moved_bytes: of each stage, ``[N]``.
        peak_flops_s: peak of the processor [FLOP/s], > 0.
        memory_bytes_s: memory bandwidth [bytes/s], > 0.
        share: achieved share of the peak, in (0, 1].

    Returns:
        float64 ``[N]``.

    Raises:
        ConfigError: for a peak, bandwidth or share that is not positive.
    """
    if not (peak_flops_s > 0.0 and memory_bytes_s > 0.0 and 0.0 < share <= 1.0):
        raise ConfigError("a roofline needs a positive peak and memory bandwidth, and a share of the peak in (0, 1]")
    return np.maximum(np.asarray(flops) / (share * peak_flops_s), np.asarray(moved_bytes) / memory_bytes_s)
