"""How one episode in a moving world went, and the counts behind it."""

from __future__ import annotations

from dataclasses import dataclass

from specact.lab.rollout.history import ObservationSampler
from specact.tised.motion import jerk, path_length

_NAN = float("nan")


@dataclass(frozen=True)
class Episode:
    """How one episode in a moving world went.

    Attributes:
        episode: its number.
        success: whether it succeeded; it ended there.
        score: the best score reached until then, see :class:`~specact.lab.envs.task.Task`.
        task_s: when it succeeded, else when it ended [s].
        limit_s: the time-out [s].
        chunks: N, inferences of whose actions at least one ran.
        inference_s: mean latency of the inferences, link included [s].
        stall_s: total time the robot had no action to play [s], the first inference's included: that one no overlap
            can hide.
        age_s: mean age of the observation when the first action of its chunk ran [s]. It is not the stall: overlap
            shortens the stall and makes observations older.
        jerk, path: of what the robot moves, at every control period, see :mod:`specact.tised.motion`; NaN where the
            task does not say what that is.
        transmission_rate: share of inferences sent to the target; NaN where there is no gate.
    """

    episode: int
    success: bool
    score: float
    task_s: float
    limit_s: float
    chunks: int
    inference_s: float
    stall_s: float
    age_s: float
    jerk: float
    path: float
    transmission_rate: float = _NAN


class EpisodeMetrics:
    """Counts what :class:`Episode` tells."""

    def __init__(self) -> None:
        self._latencies: list[float] = []
        self._ages: list[float] = []
        self._sent: list[bool] = []

    def inferred(self, latency_s: float, sent: bool | None = None) -> None:
        """An inference: what it took [s], and whether the target was asked, where there is a gate."""
        self._latencies.append(latency_s)
        if sent is not None:
            self._sent.append(sent)

    def began(self, age_s: float) -> None:
        """The first action of a chunk begins to run, on an observation so old [s]."""
        self._ages.append(age_s)

    def episode(self, number: int, sampler: ObservationSampler) -> Episode:
        """The episode as a whole, once it is over."""
        world = sampler.world
        moves = world.task.effector is not None
        return Episode(
            episode=number,
            success=world.success,
            score=world.score,
            task_s=world.now,
            limit_s=world.limit_s,
            chunks=len(self._ages),
            inference_s=_mean(self._latencies),
            stall_s=sampler.waited_s,
            age_s=_mean(self._ages),
            jerk=jerk(world.motion(), world.period_s) if moves else _NAN,
            path=path_length(world.motion()) if moves else _NAN,
            transmission_rate=_mean(self._sent),
        )


def _mean(values: list[float] | list[bool]) -> float:
    return sum(values) / len(values) if values else _NAN
