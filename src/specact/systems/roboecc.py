"""RoboECC (arXiv 2603.20711): the server runs the first stages of a target and the device the rest, cut by the link.

A target is a chain of N stages. Cut k means that stages 1 to k run on the server; it is chosen between inferences::

    T(k) = sum_{i<=k} server_i + [0 < k < N] (L0 + S_k / B) + sum_{i>k} device_i                     (as printed)
    k*   = argmin T(k) such that the server's load is within its budget; ties: lower load, then earlier cut
    B    = bytes / (round trip - server time), measured in each exchange; B^ is the forecast of the next one
    B^ - B > T_high: the cut of the pool with the largest S_k; < T_low: the smallest; otherwise the cut is kept

with S_k, the bytes of the activation behind stage k, the link's bandwidth B and its latency L0. The pool are the cuts
whose stages both sides hold, so that a change loads nothing.

We changed: T(k) also counts what an answer requires, the observation sent up for k >= 1 and the answer sent down for
k = N (``faithful``); :class:`SmallestTotal` takes argmin T(k) at B^, since the published rule (:class:`RoboeccRule`)
ignores T; thresholds, which are not published, are one standard deviation of the changes so far; times of stages are
measured, not a roofline; activations cross as float16, as 8 bits or exactly. Robots forecast by the last value; the
paper's LSTM is compared with it in experiments/split. A token policy, as in the paper, can be cut behind its prefill:
its KV cache crosses once per inference, and it decodes greedily (:class:`~specact.systems.staged.TokenStages`).
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from specact.errors import ConfigError, RemoteError
from specact.observation import Window
from specact.pair import Answer, Pair, Pending
from specact.remote.client import Client
from specact.rng import StepAddress
from specact.systems.staged import Array, Precision, Reader, StagedFolder, TokenStages, kind_at, reader_of, unpack
from specact.types import Floats, Miss, OffloadTimes
from specact.wire.arrays import Arrays
from specact.wire.exchange import Request

A = TypeVar("A")
# The last exchanges, the newest last: bytes of both directions, and the round trip without the server's time [s].
Exchanges = Sequence[tuple[float, float]]
# The bandwidth of the next exchange [bytes/s], > 0, from those of the past, which are at least one.
Forecast = Callable[[Sequence[float]], float]
# The cut of the next inference from the current one; called between two inferences.
Chooser = Callable[[int, Exchanges], int]
Accounting = Literal["faithful", "printed"]
MAX_EXCHANGES = 64
_MIN_S, _TIMEOUT_S = 1e-6, 10.0


@dataclass(frozen=True)
class StageCosts:
    """Costs of a chain of N stages.

    Attributes:
        server_s, device_s: time of each stage on either side [s], ``[N]``.
        cut_bytes: bytes sent down at cuts 0 to N, ``[N + 1]``: none at 0, the answer at N.
        observation_bytes: bytes sent up at cuts 1 to N.
        load: share of the server's capacity that each stage needs, ``[N]``.
    """

    server_s: Floats
    device_s: Floats
    cut_bytes: Floats
    observation_bytes: float
    load: Floats

    @property
    def stages(self) -> int:
        """N, the number of stages."""
        return len(self.server_s)

    @property
    def loads(self) -> Floats:
        """Load of the server at cuts 0 to N, ``[N + 1]``."""
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
    """``T(k)`` for k = 0 to N [s], ``[N + 1]``, over a link of bandwidth B > 0 [bytes/s] and latency L0 [s].

    As ``printed`` cuts 0 and N do not use the link, and only the activation is sent; ``faithful`` adds what an answer
    requires.
    """
    server = np.concatenate([[0.0], np.cumsum(costs.server_s)])
    device = np.concatenate([np.cumsum(costs.device_s[::-1])[::-1], [0.0]])
    used = np.arange(costs.stages + 1) > 0
    if accounting == "printed":
        used[-1] = False
    total: Floats = server + used * (latency_s + costs.crossing(accounting) / bytes_s) + device
    return total


def best_cut(total: Floats, loads: Floats, allowed: Sequence[int], budget: float = math.inf) -> int:
    """``k*``: the cut of :func:`within` with the smallest total of ``[N + 1]`` [s]; ties: lower load, earlier cut."""
    return min(within(allowed, loads, budget), key=lambda cut: (total[cut], loads[cut], cut))


def within(allowed: Sequence[int], loads: Floats, budget: float) -> list[int]:
    """The allowed cuts whose load, of ``[N + 1]``, is within the budget, ascending.

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
    """The published adjustment of the current cut; of equal activations the nearest cut, then the smaller.

    Args:
        change, low, high: predicted minus measured bandwidth, and its thresholds [bytes/s].
        pool: cuts to choose from, at least one.
        cut_bytes: S_k at cuts 0 to N, ``[N + 1]``.
    """
    if low <= change <= high:
        return current
    sign = -1.0 if change > high else 1.0
    return min(pool, key=lambda cut: (sign * cut_bytes[cut], abs(cut - current), cut))


def measured(crossed_bytes: float, network_s: float) -> float:
    """``B`` of an exchange [bytes/s] of so many bytes in both directions; its latency lowers it, as published."""
    return crossed_bytes / max(network_s, _MIN_S)


def bandwidths(past: Exchanges) -> list[float]:
    """``B`` of each exchange [bytes/s]."""
    return [measured(*exchange) for exchange in past]


def last_value(past: Sequence[float]) -> float:
    """The forecast that repeats the last measurement."""
    return past[-1]


class RoboeccRule:
    """The published adjustment, within a budget of the server's load; the first cut minimises the printed equation.

    Raises:
        ConfigError: if no cut of the pool is within the budget.
    """

    def __init__(
        self, costs: StageCosts, pool: Sequence[int], forecast: Forecast = last_value, budget: float = math.inf
    ) -> None:
        self._costs, self._forecast = costs, forecast
        self._pool = within(pool, costs.loads, budget)
        self._planned = False

    def __call__(self, current: int, past: Exchanges) -> int:
        if not past:
            return current if current in self._pool else self._pool[0]
        known = bandwidths(past)
        if not self._planned:
            self._planned = True
            return best_cut(total_s(self._costs, known[-1], accounting="printed"), self._costs.loads, self._pool)
        if len(past) < 3:  # no deviation yet
            return current
        change, spread = self._forecast(known) - known[-1], float(np.std(np.diff(known)))
        return adjusted_cut(current, change, -spread, spread, self._pool, self._costs.cut_bytes)


class SmallestTotal:
    """The cut with the smallest total time at the predicted bandwidth.

    At cut 0 no request is sent and no bandwidth is measured. So after ``look_every`` inferences at cut 0 the best other
    cut is used once, even if it is slower; 0 for never. Other arguments as for :class:`RoboeccRule`.
    """

    def __init__(
        self, costs: StageCosts, allowed: Sequence[int], forecast: Forecast = last_value, budget: float = math.inf,
        look_every: int = 10,
    ) -> None:  # fmt: skip
        self.costs, self.forecast = costs, forecast
        self._allowed = within(allowed, costs.loads, budget)
        self._look_every, self._unmeasured = look_every, 0

    def total(self, past: Exchanges) -> Floats:
        """The predicted ``T(k)`` of the next inference [s], ``[N + 1]``."""
        return total_s(self.costs, self.forecast(bandwidths(past)))

    def __call__(self, current: int, past: Exchanges) -> int:
        remote = [cut for cut in self._allowed if cut]
        if not remote:
            return 0
        if not past:
            return remote[-1]  # a first measurement
        total, loads = self.total(past), self.costs.loads
        cut = best_cut(total, loads, self._allowed)
        self._unmeasured = 0 if cut else self._unmeasured + 1
        if self._look_every and self._unmeasured > self._look_every:
            self._unmeasured = 0
            return best_cut(total, loads, remote)
        return cut


class SplitTarget(Generic[A]):
    """See :class:`~specact.pair.Target`: the answer does not depend on where the stages ran.

    The server of the ``client`` has the same ``folder``; for ``read`` see :func:`~specact.systems.staged.reader_of`.

    Attributes:
        cut, past: the current cut, and the last exchanges.
        device_s: time of the device's stages in the last inference [s], 0 if it was missed; None before the first.
        counts: inferences by cut, ``cut 0`` to ``cut N``, and ``switches``.
    """

    def __init__(
        self, folder: StagedFolder | TokenStages, read: Reader[A], client: Client, chooser: Chooser,
        deadline_ms: float, *,
        precision: Precision = "float16",
    ) -> None:  # fmt: skip
        kind_at(folder.spec, 1, precision)  # raises for an unknown precision
        self._folder, self._spec, self._client, self._read, self.chooser = folder, folder.spec, client, read, chooser
        self._deadline_ms, self._precision = deadline_ms, precision
        self.cut, self.past = 0, deque[tuple[float, float]](maxlen=MAX_EXCHANGES)
        self.device_s: float | None = None
        self.counts: Counter[str] = Counter()

    def over(self, client: Client, deadline_ms: float) -> SplitTarget[A]:
        """The target over another client, which goes on with the exchanges of this one."""
        other = SplitTarget(self._folder, self._read, client, self.chooser, deadline_ms, precision=self._precision)
        other.past.extend(self.past)
        return other

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        cut = self.chooser(self.cut, self.past)
        self.counts["switches"] += self.device_s is not None and cut != self.cut
        self.cut = cut
        reply: Pending[tuple[Arrays, OffloadTimes]] = Pending(lambda: ({}, OffloadTimes()))
        if cut:
            kind = kind_at(self._spec, cut, self._precision)
            reply = self._client.request(kind, Request(window, address), self._deadline_ms)
        return Pending(lambda: self._finish(reply, window, address, cut), reply.done, reply.sent)

    def _finish(
        self, reply: Pending[tuple[Arrays, OffloadTimes]], window: Window, address: StepAddress, cut: int
    ) -> Answer[A] | Miss:
        """Waits for the server's stages and runs the device's, which count as the target's inference."""
        self.counts[f"cut {cut}"] += 1
        self.device_s, result = 0.0, reply.result()
        crossed = float(self._spec.observation.nbytes + self._spec.reply_bytes(cut, self._precision))
        if isinstance(result, Miss):
            if result.sent and result.cause == "deadline":
                # An upper bound of the bandwidth.
                self.past.append((crossed, self._deadline_ms / 1e3))
            return result
        arrays, times = result
        started = time.monotonic()
        if cut:
            self.past.append((crossed, times.network))
        answer = self._read(self._outputs(window, cut, arrays), window, address)
        self.device_s = time.monotonic() - started
        return Answer(answer, OffloadTimes(times.encode, times.network, times.queue, times.target + self.device_s))

    def _outputs(self, window: Window, cut: int, arrays: Arrays) -> list[Array]:
        if cut == 0:
            return self._folder.run([window])
        if cut == self._spec.stages:
            return self._spec.read_outputs(arrays)
        return self._folder.finish(unpack(arrays, self._spec.activations[cut - 1]), cut)


def placed_target(
    pair: Pair[Any], folder: StagedFolder | TokenStages, client: Client, deadline_ms: float, *,
    cut: int | None = None, precision: Precision = "float16",
) -> SplitTarget[Any]:  # fmt: skip
    """A pair's target on device and server, at a fixed cut, or at that with the smallest total, from measured times.

    Raises:
        BundleError: if the stages are not those of the pair's target.
        ConfigError: for a cut that does not exist, an unknown precision, or a family whose target is not split.
        RemoteError: if the server does not answer while the stages are measured.
    """
    if cut is not None and not 0 <= cut <= folder.spec.stages:
        raise ConfigError(f"{folder.path} can be cut from 0 to {folder.spec.stages}, not at {cut}")
    fixed = cut or 0
    target = SplitTarget[Any](
        folder, reader_of(pair, folder), client, lambda *_: fixed, deadline_ms, precision=precision
    )
    if cut is None:
        costs, past = measure_costs(folder, client, 10 * [folder.spec.observation.zeros()], precision)
        target.past.extend(past)
        target.chooser = SmallestTotal(costs, range(folder.spec.stages + 1))
    return target


def measure_costs(
    folder: StagedFolder | TokenStages, client: Client, windows: Sequence[Window], precision: Precision = "float16"
) -> tuple[StageCosts, Exchanges]:
    """Measures the stages' times on both sides by inferences at every cut in turn, and the bandwidth of the link.

    The server's are the median of its reported times; the device's the minimum of the time after the reply, to exclude
    other load. The server's load is in proportion to time. ``windows`` are one per round, at least one.

    Raises:
        RemoteError: if the server does not answer.
    """
    spec, cuts = folder.spec, range(folder.spec.stages + 1)
    target = SplitTarget(
        folder, lambda outputs, *_: outputs, client, lambda *_: fixed, 1e3 * _TIMEOUT_S, precision=precision
    )
    device, server = (np.zeros((len(windows), spec.stages + 1)) for _ in range(2))
    for row, window in enumerate(windows):
        for fixed in cuts:
            answer, device_s = target.submit(window, StepAddress(0, 0, 0, 0)).result(), target.device_s or 0.0
            if isinstance(answer, Miss):
                raise RemoteError(f"the server did not answer at cut {fixed}; look at the link")
            device[row, fixed], server[row, fixed] = device_s, answer.times.target - device_s
    # More stages cannot take less time: noise must not give a stage a negative time.
    on_device = np.maximum.accumulate(device.min(axis=0)[::-1])[::-1]
    on_server = np.diff(np.maximum.accumulate(np.median(server, axis=0)))
    crossing = np.array([spec.reply_bytes(cut, precision) for cut in cuts], np.float64)
    load = on_server / max(float(on_server.sum()), 1e-9)
    return StageCosts(on_server, -np.diff(on_device), crossing, float(spec.observation.nbytes), load), target.past
