"""How a step's chunk is executed: one action per control step, and verdicts that arrive while it is played."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any, ClassVar, Literal

import numpy as np

from specact.errors import ConfigError
from specact.pair import Pair, Pending, Verifier
from specact.rng import StepAddress
from specact.types import Chunk, Miss, Outcome, Proposal

NO_OUTCOME: Pending[Outcome | None] = Pending(lambda: None)
"""In place of the request of a step that is not verified, or whose verdict comes late."""


class ChunkPlayer:
    """Plays the first ``execute`` actions of each chunk, of a shorter one all.

    With the overlap ``drop`` the newest chunk alone is played; with ``average`` the mean over all chunks that predict
    the current control step (VQ-BeT on PushT).
    """

    def __init__(self, execute: int, overlap: Literal["drop", "average"]) -> None:
        self._execute, self._average = execute, overlap == "average"
        self._chunks: deque[tuple[Chunk, Chunk]] = deque()
        self._played = self._end = execute

    def reset(self) -> None:
        """Drops all chunks."""
        self._chunks.clear()
        self._played = self._end = self._execute

    @property
    def empty(self) -> bool:
        """Whether a new chunk is needed."""
        return self._played >= self._end

    @property
    def played(self) -> int:
        """How many actions of the newest chunk have been played."""
        return self._played

    def put(self, drafted: Chunk, executed: Chunk) -> None:
        """Adds a chunk: the drafted actions and those to execute, both ``[n, A]``."""
        if not self._average:
            self._chunks.clear()
        self._chunks.append((drafted, executed))
        self._played, self._end = 0, min(self._execute, len(executed))

    def replace(self, executed: Chunk) -> int:
        """Replaces the newest chunk's actions ``[n, A]`` from the next action on; returns how many are left to play."""
        self._chunks[-1] = (self._chunks[-1][0], executed)
        self._end = min(self._execute, len(executed))
        return max(0, self._end - self._played)

    def next(self) -> tuple[Chunk, Chunk]:
        """The drafted and the executed action of this control step, both ``[A]``."""
        newest = self._chunks[-1]
        drafted = newest[0][self._played]
        if self._average:
            # The chunk ``age`` inferences old predicts this step at its position ``played + age * execute``.
            reach = [(pair[1], self._played + age * self._execute) for age, pair in enumerate(reversed(self._chunks))]
            votes = [chunk[at] for chunk, at in reach if at < len(chunk)]
            # Drops the oldest chunks that have ended; a shorter one may end before a longer one that is older.
            while reach[-1][1] >= len(reach[-1][0]):
                reach.pop()
                self._chunks.popleft()
            executed = np.asarray(np.mean(votes, axis=0, dtype=np.float32))
        else:
            executed = newest[1][self._played]
        self._played += 1
        return drafted, executed


class Verdicts:
    """How a policy waits for the outcomes of its verifications; this one waits for each, as in the paper."""

    late: ClassVar[bool] = False

    @property
    def free(self) -> bool:
        """Whether another verification may be requested now."""
        return True

    def reset(self) -> None:
        """Forgets the episode."""

    def ask(
        self, verifier: Verifier, proposal: Proposal, address: StepAddress, seen_s: float
    ) -> Pending[Outcome | None]:
        """Requests verification of a step observed at ``seen_s`` [s]; the result is None if the verdict comes late."""
        return verifier.submit(proposal, address)

    def arrived(self, now: float, wanted: StepAddress | None) -> tuple[Outcome | Miss, bool] | None:
        """A late verdict that has arrived by ``now`` [s], or None, and whether it is in time.

        That is, of the step ``wanted``, whose chunk is being executed, and of an observation that is not too old.
        """
        return None


WAIT = Verdicts()


class LateVerdicts(Verdicts):
    """Executes the draft's chunk without waiting; a verdict that arrives meanwhile replaces its remaining actions.

    At most one verification is in flight. A request that cannot be sent is a miss at once.

    Args:
        max_age_s: a verdict is not used later than this after its observation [s]; infinite for no limit.

    Raises:
        ConfigError: if that is not positive.
    """

    late: ClassVar[bool] = True

    def __init__(self, max_age_s: float) -> None:
        if not max_age_s > 0.0:
            raise ConfigError(f"max_age_s of late verdicts must be above 0, got {max_age_s}; math.inf is no limit")
        self._max_age_s = max_age_s
        self.reset()

    @property
    def free(self) -> bool:
        return self._in_flight is None

    def reset(self) -> None:
        # A request, the address of its step, and the time of its observation.
        self._in_flight: tuple[Pending[Outcome], StepAddress, float] | None = None

    def ask(
        self, verifier: Verifier, proposal: Proposal, address: StepAddress, seen_s: float
    ) -> Pending[Outcome | None]:
        request = verifier.submit(proposal, address)
        if not request.sent:
            return request
        self._in_flight = request, address, seen_s
        return NO_OUTCOME

    def arrived(self, now: float, wanted: StepAddress | None) -> tuple[Outcome | Miss, bool] | None:
        if self._in_flight is None or not self._in_flight[0].done():
            return None
        (request, address, seen_s), self._in_flight = self._in_flight, None
        # Taken in any case: the client counts its misses when they are taken.
        return request.result(), address == wanted and now - seen_s <= self._max_age_s


def check_late(verifier: Verifier, pair: Pair[Any], period_s: float) -> None:
    """Refuses late verdicts that would all come after the draft's last action, at control steps of ``period_s`` [s].

    Verifies up to five drafts, until one is in time. A verdict can replace actions until the last one is executed, n -
    1 control steps after the first.

    Raises:
        ConfigError: with the control rate, and the actions n of a chunk, for which they would be in time.
    """
    draft = pair.drafter().propose(pair.observation.zeros(), np.random.default_rng(0))
    fastest_s, steps = math.inf, max(pair.execute, pair.corrects) - 1
    for number in range(5):
        began = time.perf_counter()
        failed = isinstance(verifier.submit(draft, StepAddress(0, 0, 0, number)).result(), Miss)
        fastest_s = min(fastest_s, time.perf_counter() - began)
        # A server that fails is the fallback's case.
        if failed or fastest_s < steps * period_s:
            return
    rate = f"control at {0.9 * steps / fastest_s:.2g} Hz or less (--rate-hz), " if steps else ""
    raise ConfigError(
        f"late verdicts could not be in time: one takes {1e3 * fastest_s:.0f} ms, and the last of the {pair.execute} "
        f"actions that are executed of a chunk begins {1e3 * steps * period_s:.0f} ms after the first; {rate}execute "
        f"{math.ceil(fastest_s / period_s) + 1} actions or more, or wait for the verdicts"
    )
