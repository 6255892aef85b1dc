"""Chunks, actions and inferences on a time line, event by event, without an environment.

It knows no formula: an action ends, an inference ends, and what may start then starts. That is what the closed forms of
:mod:`specact.lab.tised.timing` are held against. Times may be fractions, so that the comparison is exact.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from specact.errors import ConfigError

Time = float | Fraction
Kind = Literal["observe", "ready", "act", "done"]


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        at_s: when [s], from the first observation on.
        kind: ``observe``: an inference starts from what is seen now; ``ready``: it ends; ``act``: the first action of
            its chunk starts; ``done``: the last one ends.
        chunk: counted from 0.
    """

    at_s: Time
    kind: Kind
    chunk: int


@dataclass(frozen=True)
class TimeLine:
    """What happened, and what the robot made of it.

    Attributes:
        events: in order of time.
        stalls_s: how long the robot waited for each chunk, ``[N]``; for the first one all of its inference.
        ages_s: how old each chunk's observation was when its first action started, ``[N]``.
        total_s: until the last action ended.
    """

    events: tuple[Event, ...]
    stalls_s: tuple[Time, ...]
    ages_s: tuple[Time, ...]
    total_s: Time


def simulate(chunks: int, actions: int, inference_s: Time, action_s: Time, overlap: int = 0) -> TimeLine:
    """Plays N chunks of n actions; the next inference starts when m actions of a chunk are left.

    Args:
        chunks: N >= 1.
        actions: n >= 1, per chunk.
        inference_s: T_inf >= 0 [s].
        action_s: T_act > 0 [s].
        overlap: m in 0..n.

    Raises:
        ConfigError: for values outside their ranges.
    """
    if chunks < 1 or actions < 1 or not 0 <= overlap <= actions or inference_s < 0 or action_s <= 0:
        raise ConfigError(
            f"cannot play {chunks} chunks of {actions} actions of {action_s} s with inferences of {inference_s} s and "
            f"an overlap of {overlap}; this needs at least 1 chunk and 1 action, times that are not negative, actions "
            "that take time, and an overlap of 0 to n"
        )
    robot = _Robot(chunks, actions, inference_s, action_s, overlap)
    return robot.play()


class _Robot:
    """The state between two events."""

    def __init__(self, chunks: int, actions: int, inference_s: Time, action_s: Time, overlap: int) -> None:
        self._chunks, self._actions, self._overlap = chunks, actions, overlap
        self._inference_s, self._action_s = inference_s, action_s
        self._playing, self._left = -1, 0
        self._free_since: Time = 0 * action_s
        self._asked, self._ready = -1, -1
        self._seen_s = dict[int, Time]()
        self._events, self._stalls, self._ages = list[Event](), list[Time](), list[Time]()
        # Time, order of happening at the same time, and what ends: an inference or an action.
        self._ahead: list[tuple[Time, int, Literal["inference", "action"]]] = []
        self._count = 0

    def play(self) -> TimeLine:
        now: Time = self._free_since
        self._observe(now)
        while self._ahead:
            now, _, what = heapq.heappop(self._ahead)
            if what == "inference":
                self._ready = self._asked
                self._events.append(Event(now, "ready", self._ready))
            else:
                self._left -= 1
                self._after_action(now)
            if self._left == 0 and self._ready > self._playing:
                self._start_chunk(now)
        return TimeLine(tuple(self._events), tuple(self._stalls), tuple(self._ages), now)

    def _after_action(self, now: Time) -> None:
        if self._left == 0:
            self._events.append(Event(now, "done", self._playing))
            self._free_since = now
        if self._left == self._overlap:
            self._observe(now)
        if self._left > 0:
            self._later(now + self._action_s, "action")

    def _start_chunk(self, now: Time) -> None:
        self._playing, self._left = self._ready, self._actions
        self._events.append(Event(now, "act", self._playing))
        self._stalls.append(now - self._free_since)
        self._ages.append(now - self._seen_s[self._playing])
        self._later(now + self._action_s, "action")
        if self._left == self._overlap:
            self._observe(now)

    def _observe(self, now: Time) -> None:
        if self._asked + 1 < self._chunks:
            self._asked += 1
            self._seen_s[self._asked] = now
            self._events.append(Event(now, "observe", self._asked))
            self._later(now + self._inference_s, "inference")

    def _later(self, at_s: Time, what: Literal["inference", "action"]) -> None:
        self._count += 1
        heapq.heappush(self._ahead, (at_s, self._count, what))
