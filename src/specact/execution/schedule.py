"""How chunks of actions are played while the next one is inferred; shared by robots and simulators."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specact.errors import ConfigError
from specact.families.chunks.policy import Chunk, ChunkSpec, Inpainting
from specact.records import Count, WholeNumber, check_fields

NOW_S = 1e-9  # times closer than this are equal; rounding errors of summed control periods are smaller
_LATENCY_WINDOW = 10  # real-time chunking assumes the longest of so many latencies, as in its paper

Kind = Literal["synchronous", "append", "aligned", "roll_forward", "rtc"]


@dataclass(frozen=True)
class Execution:
    """How the first n = ``execute`` actions of a chunk are played, the next being inferred in the last ``overlap``.

    The next inference starts as soon as at most that many actions remain and no other one is running. If the actions
    run out before its chunk arrives, the robot idles.

    Raises:
        ConfigError: for an unknown kind, or numbers out of range: ``1 <= n``, ``0 <= overlap <= n``.
    """

    # synchronous: the robot waits for the inference; the overlap is 0.
    # append: the new chunk follows the old one. Its observation is max(T_inf, m T_act) old by then, and a chunk takes
    #   n T_act + max(0, T_inf - m T_act): the naive asynchronous inference of "The Speedup Paradox" (2606.28529).
    # roll_forward: append, but the robot's state in the observation is rolled forward through the overlapping actions;
    #   the rest is as stale as before. VLASH (arXiv 2512.01031) without its fine-tuning on random offsets of the state.
    # aligned: actions have timestamps, the first one that of the observation. Of a new chunk those of the first n that
    #   are past are dropped, the others replace the remaining actions (LeRobot's asynchronous inference). If an
    #   inference takes longer than n actions, nothing of its chunk is played and the robot idles.
    # rtc: aligned, with a new chunk that continues the old one (real-time chunking), see soft_mask.
    kind: Kind
    execute: Count
    overlap: WholeNumber = 0

    def __post_init__(self) -> None:
        check_fields(self)
        most = 0 if self.kind == "synchronous" else self.execute
        if self.overlap > most:
            raise ConfigError(f"overlap must be at most {most} in {self.kind} execution, got {self.overlap}")

    @property
    def by_time(self) -> bool:
        """Whether actions are played by timestamp; otherwise one after the other."""
        return self.kind in ("aligned", "rtc")

    def check(self, spec: ChunkSpec, *, inpaints: bool, rolls_forward: bool) -> None:
        """Refuses a policy that cannot be executed in this way, without inpainting or a model that rolls forward.

        Raises:
            ConfigError: if chunks are too short, or inpainting or the model of the robot is needed but missing.
        """
        if self.execute > spec.chunk:
            raise ConfigError(f"execute must be at most the {spec.chunk} actions of a chunk, got {self.execute}")
        if self.kind == "rtc" and not inpaints:
            raise ConfigError("this policy cannot inpaint; choose aligned execution for it, or a flow policy")
        if self.kind == "roll_forward" and not rolls_forward:
            raise ConfigError(
                "this execution needs a model of the robot, and there is none; give the robot a method "
                "roll_forward(observation, actions), or the task one, or choose append execution"
            )


@dataclass(frozen=True, slots=True)
class Played:
    """One action ``[A]`` to execute now, when its chunk's observation was made [s], and if it is the chunk's first."""

    action: NDArray[np.float32]
    seen_s: float
    first: bool


class Schedule:
    """Plays chunks of actions according to an :class:`~specact.execution.schedule.Execution`; time is an argument.

    At every control step, in this order: :meth:`arrive` if an inference has ended, :meth:`advance`, :meth:`ask` if
    :attr:`wants` is True, :meth:`arrive` and :meth:`advance` if that inference took no time, :meth:`play`. Chunks have
    the shape ``(H, A)``; a control step takes ``period_s`` [s].
    """

    def __init__(self, execution: Execution, period_s: float, shape: tuple[int, int]) -> None:
        self._execution, self._period_s, self._shape = execution, period_s, shape
        self._latencies: deque[float] = deque(maxlen=_LATENCY_WINDOW)
        self.reset()

    def reset(self) -> None:
        """Starts an episode; measured latencies persist."""
        # The current chunk, the index of its next action, and the end of those to play.
        self._chunk: Chunk = np.zeros((0, self._shape[1]), np.float32)
        self._next = self._end = 0
        # When its observation was made and its execution started, with which action, and whether one was played.
        self._seen_s, self._started_s, self._first, self._any_played = 0.0, 0.0, 0, True
        # The time of the current inference's observation, and the chunk that has arrived, with that of its own.
        self._requested_s: float | None = None
        self._arrived: tuple[Chunk, float] | None = None

    @property
    def left(self) -> int:
        """Remaining actions of the current chunk."""
        return max(self._end - self._next, 0)

    @property
    def wants(self) -> bool:
        """Whether the next inference should start now."""
        return self._requested_s is None and self._arrived is None and self.left <= self._execution.overlap

    @property
    def ahead(self) -> Chunk | None:
        """The remaining actions ``[r, A]`` that the observation is rolled forward through; None for other kinds."""
        return self._chunk[self._next : self._end] if self._execution.kind == "roll_forward" else None

    def inpainting(self, held: Chunk | None = None) -> Inpainting | None:
        """Inpainting from the current chunk, or None; the assumed delay is the longest of the last latencies.

        Where the chunk has run out and an action ``[A]`` is ``held`` meanwhile, that is what the new one continues.
        """
        if self._execution.kind != "rtc" or not self._latencies:
            return None
        delay = ceil(max(self._latencies) / self._period_s - NOW_S)
        rest, certain = self._chunk[self._next :], min(delay, self.left)
        if held is not None and not self.left:
            certain = min(delay, self._execution.execute - 1)
            rest = np.repeat(held[None], certain, axis=0)
        return inpainting_of(rest, certain, self._shape[0]) if len(rest) else None

    def ask(self, now: float) -> None:
        """Records the start of an inference on an observation made now [s]."""
        self._requested_s = now

    def miss(self) -> None:
        """Records that the current inference failed."""
        self._requested_s = None

    def arrive(self, chunk: Chunk, took_s: float) -> None:
        """Records the result of the current inference, ``[H, A]``, and its latency [s]."""
        assert self._requested_s is not None, "ask comes before arrive"
        self._latencies.append(took_s)
        self._arrived, self._requested_s = (chunk, self._requested_s), None

    def advance(self, now: float) -> bool:
        """Skips actions whose time has passed, and switches to the chunk that has arrived when it is due.

        Returns whether that one arrived too late for any of its actions.
        """
        by_time = self._execution.by_time
        if by_time and self.left:
            # Control steps may have been skipped.
            self._next = max(self._next, self._first + round((now - self._started_s) / self._period_s))
        if self._arrived is None or (self.left and not by_time):
            return False
        (self._chunk, self._seen_s), self._arrived = self._arrived, None
        past = round((now - self._seen_s) / self._period_s) if by_time else 0
        self._next, self._end, self._any_played = past, self._execution.execute, False
        self._started_s, self._first = now, past
        return not self.left

    def drop_older(self, seen_s: float) -> bool:
        """Drops chunks observed before a time [s]; returns whether one had just arrived and no action was played."""
        unplayed = self._arrived is not None and self._arrived[1] < seen_s
        if unplayed:
            self._arrived = None
        if self._seen_s < seen_s:
            self._next = self._end = len(self._chunk)
        return unplayed

    def play(self) -> Played | None:
        """The action to execute now, or None where there is none."""
        if not self.left:
            return None
        played = Played(self._chunk[self._next], self._seen_s, not self._any_played)
        self._any_played = True
        self._next += 1
        return played


def soft_mask(certain: int, foreseen: int, chunk: int) -> NDArray[np.float32]:
    """Weights ``[H]`` of the old chunk's actions in real-time chunking (arXiv 2506.07339, equation 5).

    ``w_i = 1`` for ``i < d``; ``w_i = c_i (e^{c_i} - 1) / (e - 1)`` with ``c_i = (R - i) / (R - d + 1)`` for
    ``d <= i < R``; 0 from there on.

    Args:
        certain: d, the delay: actions that will be executed before the new chunk arrives, 0 to R.
        foreseen: R, remaining actions of the old chunk, 0 to H.
        chunk: H.
    """
    row = np.arange(chunk)
    near = np.clip((foreseen - row) / (foreseen - certain + 1), 0.0, 1.0)
    fading = near * np.expm1(near) / np.expm1(1.0)
    return np.where(row < certain, 1.0, fading).astype(np.float32)


def inpainting_of(rest: NDArray[np.float32], certain: int, chunk: int) -> Inpainting:
    """The old chunk's rest ``[R, A]``, ``certain`` of it still to be executed, as a constraint on a chunk of H >= R."""
    actions = np.zeros((chunk, rest.shape[1]), np.float32)
    actions[: len(rest)] = rest
    return Inpainting(actions, soft_mask(certain, len(rest), chunk))
